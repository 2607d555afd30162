#include "admission.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>

#include "hashing.h"

namespace deeprec {
namespace {

// Keys spread over buckets unevenly: room for three standard deviations more than the mean, so that full buckets do
// not spoil the false-positive rate.
size_t CountersPerBucket(uint64_t counters, int hashes) {
  const double mean = static_cast<double>(counters) / kNumBuckets;
  const double per_key = std::max(1.0, static_cast<double>(hashes) / std::log(2.0));
  const double keys = mean / per_key;
  return static_cast<size_t>(std::ceil((keys + 3 * std::sqrt(keys)) * per_key)) + 64;
}

}  // namespace

CountingBloom::CountingBloom(uint64_t counters, int hashes, int counter_bytes)
    : per_bucket_(0), hashes_(hashes), counter_bytes_(counter_bytes) {
  if (counter_bytes != 1 && counter_bytes != 2 && counter_bytes != 4 && counter_bytes != 8) {
    throw std::invalid_argument("Counters have 1, 2, 4 or 8 bytes. Received: counter_bytes=" +
                                std::to_string(counter_bytes));
  }
  // Far more than any machine has, and than may be multiplied below.
  constexpr uint64_t kMaxBytes = uint64_t{1} << 46;
  if (counters > kMaxBytes / static_cast<uint64_t>(counter_bytes)) throw std::bad_alloc();
  per_bucket_ = CountersPerBucket(counters, hashes);
  block_ = ZeroedBlock(kNumBuckets * bucket_bytes());
  used_.resize(kNumBuckets);
}

template <class Counter>
uint32_t CountingBloom::AddTo(Counter* counters, uint64_t* used, uint64_t hash, uint32_t count) {
  constexpr uint64_t kMax = std::numeric_limits<Counter>::max();
  // Double hashing with an odd stride; positions may coincide, which only costs precision.
  const uint64_t first = Mix64(hash ^ 0x6a09e667f3bcc908ULL);
  const uint64_t stride = Mix64(hash ^ 0xbb67ae8584caa73bULL) | 1;
  const auto at = [&](int i) -> Counter& {
    const uint64_t draw = first + static_cast<uint64_t>(i) * stride;
    return counters[((draw >> 32) * per_bucket_) >> 32];
  };
  uint64_t estimate = kMax;
  for (int i = 0; i < hashes_; ++i) estimate = std::min<uint64_t>(estimate, at(i));
  const uint64_t raised = estimate > kMax - std::min<uint64_t>(count, kMax) ? kMax : estimate + count;
  for (int i = 0; i < hashes_; ++i) {
    Counter& counter = at(i);
    if (counter >= raised) continue;
    *used += counter == 0;
    counter = static_cast<Counter>(raised);
  }
  return static_cast<uint32_t>(std::min<uint64_t>(raised, std::numeric_limits<uint32_t>::max()));
}

uint32_t CountingBloom::Add(uint64_t hash, uint32_t count) {
  const int bucket = BucketOf(hash);
  char* data = bucket_data(bucket);
  uint64_t* used = &used_[static_cast<size_t>(bucket)];
  switch (counter_bytes_) {
    case 1:
      return AddTo(reinterpret_cast<uint8_t*>(data), used, hash, count);
    case 2:
      return AddTo(reinterpret_cast<uint16_t*>(data), used, hash, count);
    case 4:
      return AddTo(reinterpret_cast<uint32_t*>(data), used, hash, count);
    default:
      return AddTo(reinterpret_cast<uint64_t*>(data), used, hash, count);
  }
}

void CountingBloom::Clear(int bucket) {
  std::fill(bucket_data(bucket), bucket_data(bucket) + bucket_bytes(), 0);
  used_[static_cast<size_t>(bucket)] = 0;
}

void CountingBloom::Recount(int bucket) {
  const char* data = bucket_data(bucket);
  uint64_t used = 0;
  for (size_t i = 0; i < per_bucket_; ++i) {
    uint64_t counter = 0;  // little-endian
    std::memcpy(&counter, data + i * static_cast<size_t>(counter_bytes_), static_cast<size_t>(counter_bytes_));
    used += counter != 0;
  }
  used_[static_cast<size_t>(bucket)] = used;
}

double CountingBloom::EstimateKeys(int bucket) const {
  const auto size = static_cast<double>(per_bucket_);
  // A full bucket says only that there were many.
  const double free = std::max(size - static_cast<double>(used_[static_cast<size_t>(bucket)]), 0.5);
  return size / hashes_ * std::log(size / free);
}

bool DrawAdmission(const AdmissionConfig& config, uint64_t hash, int64_t call, uint32_t count) {
  const uint64_t draw = Mix64(hash ^ Mix64(config.seed + Mix64(static_cast<uint64_t>(call))));
  const double unit = static_cast<double>(draw >> 11) * 0x1p-53;
  return unit < 1 - std::pow(1 - config.probability, count);
}

}  // namespace deeprec
