#include "batch.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

#include "thread_pool.h"

namespace deeprec {
namespace {

constexpr size_t kChunk = 16384;      // keys that one task groups
constexpr size_t kTaskKeys = 1024;    // keys that make a task worth handing to a thread
constexpr size_t kInlineKeys = 2048;  // below this, waking a thread costs more than it saves

struct Chunk {
  size_t batch, begin, end;
  size_t next[kShards];  // counts first, then write positions
};

void RunTasks(size_t tasks, size_t keys, const std::function<void(size_t)>& body) {
  if (keys < kInlineKeys) {
    for (size_t task = 0; task < tasks; ++task) body(task);
  } else {
    ParallelFor(tasks, body);
  }
}

}  // namespace

std::vector<GroupedKeys> GroupByShard(const std::vector<KeySpan>& spans) {
  std::vector<GroupedKeys> grouped(spans.size());
  std::vector<Chunk> chunks;
  size_t total = 0;
  for (size_t batch = 0; batch < spans.size(); ++batch) {
    const size_t n = spans[batch].n;
    if (n >= std::numeric_limits<uint32_t>::max())
      throw std::invalid_argument("A batch must have fewer than 2**32 - 1 keys.");
    grouped[batch].items.resize(n);
    total += n;
    for (size_t begin = 0; begin < n; begin += kChunk) {
      chunks.push_back(Chunk{batch, begin, std::min(n, begin + kChunk), {}});
    }
    if (n == 0) std::fill(std::begin(grouped[batch].offsets), std::end(grouped[batch].offsets), 0);
  }

  RunTasks(chunks.size(), total, [&](size_t task) {
    Chunk& chunk = chunks[task];
    const int64_t* keys = spans[chunk.batch].keys;
    for (size_t i = chunk.begin; i < chunk.end; ++i) ++chunk.next[ShardOf(Mix64(static_cast<uint64_t>(keys[i])))];
  });

  // Counts to positions: by shard, then by chunk, so that a shard's items keep the order of the batch.
  for (size_t first = 0; first < chunks.size();) {
    GroupedKeys& out = grouped[chunks[first].batch];
    size_t last = first;
    while (last < chunks.size() && chunks[last].batch == chunks[first].batch) ++last;
    size_t position = 0;
    for (int shard = 0; shard < kShards; ++shard) {
      out.offsets[shard] = position;
      for (size_t c = first; c < last; ++c) {
        const size_t count = chunks[c].next[shard];
        chunks[c].next[shard] = position;
        position += count;
      }
    }
    out.offsets[kShards] = position;
    first = last;
  }

  RunTasks(chunks.size(), total, [&](size_t task) {
    Chunk& chunk = chunks[task];
    const KeySpan& span = spans[chunk.batch];
    Item* items = grouped[chunk.batch].items.data();
    for (size_t i = chunk.begin; i < chunk.end; ++i) {
      const uint64_t hash = Mix64(static_cast<uint64_t>(span.keys[i]));
      uint32_t count = 1;
      if (span.counts != nullptr) {
        if (span.counts[i] < 0) {
          throw std::invalid_argument("counts must be at least 0. Received: counts[" + std::to_string(i) +
                                      "]=" + std::to_string(span.counts[i]));
        }
        count = static_cast<uint32_t>(std::min<int64_t>(span.counts[i], std::numeric_limits<uint32_t>::max()));
      }
      items[chunk.next[ShardOf(hash)]++] = Item{hash, static_cast<uint32_t>(i), count};
    }
  });
  return grouped;
}

void ForEachGroup(const std::vector<GroupedKeys>& batches, const GroupWork& work) {
  struct Group {
    size_t batch;
    int shard;
  };
  std::vector<Group> groups;
  std::vector<size_t> task_starts;
  size_t total = 0;
  size_t in_task = kTaskKeys;
  for (size_t batch = 0; batch < batches.size(); ++batch) {
    for (int shard = 0; shard < kShards; ++shard) {
      const size_t n = batches[batch].offsets[shard + 1] - batches[batch].offsets[shard];
      if (n == 0) continue;
      if (in_task >= kTaskKeys) {
        task_starts.push_back(groups.size());
        in_task = 0;
      }
      groups.push_back({batch, shard});
      in_task += n;
      total += n;
    }
  }
  task_starts.push_back(groups.size());
  if (groups.empty()) return;

  RunTasks(task_starts.size() - 1, total, [&](size_t task) {
    std::vector<Group> deferred;
    const auto run = [&](const Group& group, bool wait) {
      const GroupedKeys& batch = batches[group.batch];
      const size_t begin = batch.offsets[group.shard];
      return work(group.batch, group.shard, batch.items.data() + begin, batch.offsets[group.shard + 1] - begin, wait);
    };
    for (size_t i = task_starts[task]; i < task_starts[task + 1]; ++i) {
      if (!run(groups[i], false)) deferred.push_back(groups[i]);
    }
    for (const Group& group : deferred) run(group, true);
  });
}

}  // namespace deeprec
