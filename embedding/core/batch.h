// Batches of keys, regrouped by shard, so that each shard is locked once and its keys run through one prefetch
// pipeline on one thread. Groups of several tables share one parallel loop.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "hashing.h"

namespace deeprec {

constexpr int kShards = 64;

// The low bits of the bucket: every server, whatever its range of buckets, uses its shards evenly.
inline int ShardOf(uint64_t hash) { return BucketOf(hash) & (kShards - 1); }

struct KeySpan {
  const int64_t* keys;
  const int64_t* counts;  // occurrences of each key; null for 1 each
  size_t n;
};

struct Item {
  uint64_t hash;
  uint32_t position;  // in the batch
  uint32_t count;     // occurrences, at most 2^32 - 1
};

// The items of one batch in shard order, batch order within a shard.
struct GroupedKeys {
  std::vector<Item> items;
  size_t offsets[kShards + 1];
};

// Groups every span, in parallel. Throws std::invalid_argument for a span of 2^32 keys or more and for a negative
// count.
std::vector<GroupedKeys> GroupByShard(const std::vector<KeySpan>& spans);

// Calls work(batch, shard, items, n, wait) for every group that is not empty, in parallel. With wait=false the callee
// may return false when it cannot have the shard at once; the group is then tried again later with wait=true.
using GroupWork = std::function<bool(size_t batch, int shard, const Item* items, size_t n, bool wait)>;
void ForEachGroup(const std::vector<GroupedKeys>& batches, const GroupWork& work);

}  // namespace deeprec
