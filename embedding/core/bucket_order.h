// Hashes collected shard by shard, brought into the order of buckets, in parallel.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "batch.h"
#include "thread_pool.h"

namespace deeprec {

// A hash with a frequency.
struct HashedCount {
  uint64_t hash;
  uint32_t count;
};

inline uint64_t HashOf(uint64_t hash) { return hash; }
inline uint64_t HashOf(const HashedCount& item) { return item.hash; }

// Sorts hashes of one shard. They are spread evenly over their range, so nearly all find their place by a scaled copy
// of themselves; what shares a place is sorted there.
template <class T>
void SortShard(std::vector<T>* part) {
  const size_t n = part->size();
  const auto less = [](const T& a, const T& b) { return HashOf(a) < HashOf(b); };
  if (n < 64 || n > ~uint32_t{0}) {
    std::sort(part->begin(), part->end(), less);
    return;
  }
  // The bits that all hashes of a shard share are left out.
  constexpr int kShared = kBucketBits - __builtin_ctz(kNumBuckets / kShards);
  constexpr int kLow = 64 - kBucketBits;
  const auto place = [&](const T& item) {
    const uint64_t hash = HashOf(item);
    const uint64_t own = (hash >> (kLow + kShared) << kLow | (hash & ((uint64_t{1} << kLow) - 1))) << kShared;
    return static_cast<size_t>(((own >> 32) * n) >> 32);
  };
  std::vector<uint32_t> ends(n + 1, 0);
  for (const T& item : *part) ++ends[place(item) + 1];
  for (size_t at = 0; at < n; ++at) ends[at + 1] += ends[at];
  std::vector<T> sorted(n);
  for (const T& item : *part) sorted[ends[place(item)]++] = item;
  // Each place now knows where it ends.
  for (size_t at = 0, begin = 0; at < n; begin = ends[at++]) {
    if (ends[at] - begin > 1) {
      std::sort(sorted.begin() + static_cast<std::ptrdiff_t>(begin),
                sorted.begin() + static_cast<std::ptrdiff_t>(ends[at]), less);
    }
  }
  part->swap(sorted);
}

// One vector of what parts[s] holds of each shard s, sorted by hash, and hence by bucket; the parts are used up.
template <class T>
std::vector<T> InBucketOrder(std::vector<std::vector<T>>* parts) {
  constexpr int kBucketsOfShard = kNumBuckets / kShards;
  std::vector<size_t> starts(kNumBuckets + 1, 0);
  ParallelFor(kShards, [&](size_t s) {
    std::vector<T>& part = (*parts)[s];
    SortShard(&part);
    for (const T& item : part) ++starts[BucketOf(HashOf(item)) + 1];
  });
  for (int bucket = 0; bucket < kNumBuckets; ++bucket) starts[bucket + 1] += starts[bucket];
  std::vector<T> all(starts[kNumBuckets]);
  ParallelFor(kShards, [&](size_t s) {
    std::vector<T>& part = (*parts)[s];
    auto from = part.begin();
    for (int k = 0; k < kBucketsOfShard; ++k) {
      const size_t bucket = static_cast<size_t>(k) * kShards + s;
      const auto count = static_cast<std::ptrdiff_t>(starts[bucket + 1] - starts[bucket]);
      std::copy(from, from + count, all.begin() + static_cast<std::ptrdiff_t>(starts[bucket]));
      from += count;
    }
    part = {};
  });
  return all;
}

// The keys and counts of hashed counts; `counts` may be null.
inline void SplitCounts(const std::vector<HashedCount>& items, std::vector<int64_t>* keys,
                        std::vector<int64_t>* counts) {
  keys->resize(items.size());
  if (counts != nullptr) counts->resize(items.size());
  for (size_t i = 0; i < items.size(); ++i) {
    (*keys)[i] = static_cast<int64_t>(Unmix64(items[i].hash));
    if (counts != nullptr) (*counts)[i] = items[i].count;
  }
}

}  // namespace deeprec
