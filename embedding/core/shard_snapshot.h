// What a shard keeps for the running snapshot of its table: rows, counts and Bloom counters that changed or went
// before the snapshot read them, as they were at its beginning.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "bucket_order.h"

namespace deeprec {

// The metadata words, then the cell.
struct SavedRow {
  uint32_t frequency;
  uint32_t row_class;
  std::unique_ptr<int64_t[]> words;
};

struct ShardSnapshot {
  std::unordered_map<uint64_t, SavedRow> rows;
  std::vector<HashedCount> counts;
  uint32_t bloom_pending = 0;  // a bit for each bucket of the shard whose counters are as they were
  std::unordered_map<int, std::unique_ptr<char[]>> bloom;
};
static_assert(kNumBuckets / kShards <= 32, "one bit for each bucket of a shard");

}  // namespace deeprec
