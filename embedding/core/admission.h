// Admission filters: which occurrence of an id gets it a row.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "memory.h"

namespace deeprec {

struct AdmissionConfig {
  enum class Kind {
    kAll,         // the first occurrence
    kCounter,     // the threshold-th, counted in the index
    kBloom,       // the threshold-th, counted in a counting Bloom filter
    kProbability  // any, with a probability
  };
  Kind kind = Kind::kAll;
  uint32_t threshold = 0;
  uint64_t counters = 0;   // Bloom: at least this many in all
  int hashes = 0;          // Bloom: counters of one key
  int counter_bytes = 0;   // Bloom: 1, 2, 4 or 8
  double probability = 1;  // of one occurrence
  uint64_t seed = 0;       // of the probability filter's draws
};

// A counting Bloom filter with conservative update: only the counters that hold a key's minimum grow, so the estimate
// is never below the truth and rarely above. Counters saturate. Each placement bucket has counters of its own, in a
// block of equal size: its shard's lock guards them, memory of buckets that another server holds is never touched, and
// a checkpoint restores bucket by bucket on any number of servers.
class CountingBloom {
 public:
  // Throws std::invalid_argument for a counter size other than 1, 2, 4 or 8.
  CountingBloom(uint64_t counters, int hashes, int counter_bytes);

  // Counts `count` occurrences and returns the estimate with them, at most 2^32 - 1.
  uint32_t Add(uint64_t hash, uint32_t count);

  size_t bucket_bytes() const { return per_bucket_ * static_cast<size_t>(counter_bytes_); }
  char* bucket_data(int bucket) const { return block_.data() + static_cast<size_t>(bucket) * bucket_bytes(); }
  size_t bytes() const { return block_.size(); }
  // Zeroes the counters of a bucket.
  void Clear(int bucket);
  // After a bucket's counters were overwritten.
  void Recount(int bucket);
  // How many keys of a bucket were counted, from the share of its counters that are still zero.
  double EstimateKeys(int bucket) const;

 private:
  template <class Counter>
  uint32_t AddTo(Counter* counters, uint64_t* used, uint64_t hash, uint32_t count);

  size_t per_bucket_;
  int hashes_;
  int counter_bytes_;
  ZeroedBlock block_;
  std::vector<uint64_t> used_;  // counters above zero, by bucket
};

// Whether one of `count` occurrences of a key, in the `call`-th training lookup, is drawn: a pure function, so that
// the same data admits the same keys on any number of servers.
bool DrawAdmission(const AdmissionConfig& config, uint64_t hash, int64_t call, uint32_t count);

}  // namespace deeprec
