#include "table.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <mutex>
#include <numeric>
#include <stdexcept>

#include "thread_pool.h"

namespace deeprec {
namespace {

// How many keys lie between the stages of the pipeline: enough to cover a memory access, few enough to stay in L1.
constexpr size_t kDistance = 16;

// Runs probe(i) and then use(i) for all items, each kDistance items after what it needs was prefetched.
template <class Probe, class Use>
void Pipeline(const Index& index, const Item* items, size_t n, Probe&& probe, Use&& use) {
  for (size_t i = 0; i < n + 2 * kDistance; ++i) {
    if (i < n) index.Prefetch(items[i].hash);
    if (i >= kDistance && i - kDistance < n) probe(i - kDistance);
    if (i >= 2 * kDistance) use(i - 2 * kDistance);
  }
}

template <int kWrite>
void PrefetchBytes(const void* start, size_t bytes) {
  const char* at = static_cast<const char*>(start);
  for (size_t offset = 0; offset < bytes; offset += 64) __builtin_prefetch(at + offset, kWrite);
}

void CopyRow(float* to, const float* from, size_t dim) {
  switch (dim) {  // constant sizes become vector moves
    case 8:
      std::memcpy(to, from, 32);
      break;
    case 16:
      std::memcpy(to, from, 64);
      break;
    case 32:
      std::memcpy(to, from, 128);
      break;
    case 64:
      std::memcpy(to, from, 256);
      break;
    default:
      std::memcpy(to, from, dim * sizeof(float));
  }
}

void AddCount(Entry* entry, uint32_t count) {
  const uint32_t room = std::numeric_limits<uint32_t>::max() - entry->frequency;
  entry->frequency += std::min(count, room);
}

// Takes the lock, waiting only where asked to.
template <class Lock>
bool Take(Lock& lock, bool wait) {
  if (!wait) return lock.try_lock();
  lock.lock();
  return true;
}

// Scratch of a thread, kept between batches.
struct Scratch {
  std::vector<float*> rows;
  std::vector<uint32_t> table, first, next, last;
  std::vector<double> sum;
  std::vector<float> gradient;
};

Scratch& ThreadScratch() {
  static thread_local Scratch scratch;
  return scratch;
}

constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();

// Finds equal keys: `first` gets the items that occur first, in order; `next` links each item to the next equal one.
void LinkDuplicates(const Item* items, size_t n, Scratch& scratch) {
  size_t capacity = 4;
  while (capacity < 2 * n) capacity *= 2;
  scratch.table.assign(capacity, kNone);
  scratch.first.clear();
  scratch.next.assign(n, kNone);
  scratch.last.resize(n);
  for (size_t i = 0; i < n; ++i) {
    size_t slot = (items[i].hash >> 24) & (capacity - 1);
    while (scratch.table[slot] != kNone && items[scratch.table[slot]].hash != items[i].hash) {
      slot = (slot + 1) & (capacity - 1);
    }
    const uint32_t head = scratch.table[slot];
    if (head == kNone) {
      scratch.table[slot] = static_cast<uint32_t>(i);
      scratch.first.push_back(static_cast<uint32_t>(i));
      scratch.last[i] = static_cast<uint32_t>(i);
    } else {
      scratch.next[scratch.last[head]] = static_cast<uint32_t>(i);
      scratch.last[head] = static_cast<uint32_t>(i);
    }
  }
}

std::vector<int64_t> SortedKeys(std::vector<uint64_t>* hashes) {
  std::sort(hashes->begin(), hashes->end());
  std::vector<int64_t> keys(hashes->size());
  std::transform(hashes->begin(), hashes->end(), keys.begin(),
                 [](uint64_t hash) { return static_cast<int64_t>(Unmix64(hash)); });
  return keys;
}

}  // namespace

Table::Table(const TableConfig& config)
    : config_(config),
      slot_count_(config.optimizer.slots().size()),
      cell_bytes_((1 + slot_count_) * config.dim * sizeof(float)) {
  if (config.dim == 0) throw std::invalid_argument("A table's dimension must be at least 1. Received: dim=0");
  const RowLayout layout = RowLayout::Make(cell_bytes_);
  for (int i = 0; i < kShards; ++i) shards_.push_back(std::make_unique<Shard>(layout));
}

void Table::DefaultRow(uint64_t hash, float* out) const {
  if (config_.has_filter) {
    std::fill(out, out + config_.dim, config_.no_permission);
  } else {
    config_.initializer.Fill(hash, 0, config_.dim, out);
  }
}

Entry* Table::MakeRow(Shard& shard, Entry* entry, uint64_t hash) {
  const uint32_t row = shard.rows.Allocate();
  if (entry == nullptr) {
    try {
      entry = shard.index.Insert(hash);
    } catch (...) {
      shard.rows.Free(row);
      throw;
    }
  } else {
    --shard.filtered;
  }
  entry->state = kFirstRow + row;
  ++shard.admitted;
  float* value = Value(shard, row);
  config_.initializer.Fill(hash, 0, config_.dim, value);
  float* slot = value + config_.dim;
  for (const SlotSpec& spec : config_.optimizer.slots()) {
    std::fill(slot, slot + config_.dim, spec.initial);
    slot += config_.dim;
  }
  *shard.rows.Version(row) = kNeverUpdated;
  return entry;
}

void Table::RemoveEntry(Shard& shard, Entry* entry) {
  if (entry->has_row()) {
    shard.rows.Free(entry->state - kFirstRow);
  } else {
    --shard.filtered;
  }
  shard.index.Erase(entry);
}

bool Table::Read(int shard_index, const Item* items, size_t n, float* out, bool wait) {
  Shard& shard = *shards_[shard_index];
  std::shared_lock<std::shared_mutex> lock(shard.mutex, std::defer_lock);
  if (!Take(lock, wait)) return false;
  const size_t dim = config_.dim;
  std::vector<float*>& rows = ThreadScratch().rows;
  rows.resize(n);
  size_t hits = 0;
  Pipeline(
      shard.index, items, n,
      [&](size_t i) {
        const Entry* entry = shard.index.Find(items[i].hash);
        rows[i] = nullptr;
        if (entry != nullptr && entry->has_row()) {
          rows[i] = Value(shard, entry->state - kFirstRow);
          PrefetchBytes<0>(rows[i], dim * sizeof(float));
        }
      },
      [&](size_t i) {
        float* to = out + items[i].position * dim;
        if (rows[i] != nullptr) {
          CopyRow(to, rows[i], dim);
          ++hits;
        } else {
          DefaultRow(items[i].hash, to);
        }
      });
  shard.lookups.fetch_add(static_cast<int64_t>(n), std::memory_order_relaxed);
  shard.hits.fetch_add(static_cast<int64_t>(hits), std::memory_order_relaxed);
  return true;
}

bool Table::Train(int shard_index, const Item* items, size_t n, float* out, bool wait) {
  Shard& shard = *shards_[shard_index];
  std::unique_lock<std::shared_mutex> lock(shard.mutex, std::defer_lock);
  if (!Take(lock, wait)) return false;
  const size_t dim = config_.dim;
  std::vector<float*>& rows = ThreadScratch().rows;
  rows.resize(n);
  size_t hits = 0;
  // A key that a later repeat in this batch admits must read its row everywhere in the batch, so with a filter
  // reading waits until all are counted.
  bool late = false;
  const auto read = [&](size_t i) {
    float* to = out + items[i].position * dim;
    if (rows[i] != nullptr) {
      CopyRow(to, rows[i], dim);
    } else {
      DefaultRow(items[i].hash, to);
    }
  };
  Pipeline(
      shard.index, items, n,
      [&](size_t i) {
        Entry* entry = shard.index.Find(items[i].hash);
        rows[i] = nullptr;
        if (entry != nullptr && entry->has_row()) {
          AddCount(entry, items[i].count);
          ++hits;
        } else {
          const uint32_t before = entry == nullptr ? 0 : entry->frequency;
          const uint32_t room = std::numeric_limits<uint32_t>::max() - before;
          if (Admits(before + std::min(items[i].count, room))) {
            late = late || config_.has_filter;
            entry = MakeRow(shard, entry, items[i].hash);
          } else if (entry == nullptr) {
            entry = shard.index.Insert(items[i].hash);
            entry->state = kFiltered;
            ++shard.filtered;
          }
          AddCount(entry, items[i].count);
          if (!entry->has_row()) return;
        }
        rows[i] = Value(shard, entry->state - kFirstRow);
        PrefetchBytes<0>(rows[i], dim * sizeof(float));
      },
      read);
  if (late) {
    for (size_t i = 0; i < n; ++i) {
      if (rows[i] != nullptr) continue;
      const Entry* entry = shard.index.Find(items[i].hash);
      if (!entry->has_row()) continue;
      rows[i] = Value(shard, entry->state - kFirstRow);
      read(i);
    }
  }
  shard.lookups.fetch_add(static_cast<int64_t>(n), std::memory_order_relaxed);
  shard.hits.fetch_add(static_cast<int64_t>(hits), std::memory_order_relaxed);
  return true;
}

bool Table::Apply(int shard_index, const Item* items, size_t n, const float* gradients, const StepArgs& args,
                  int64_t step, bool wait) {
  Shard& shard = *shards_[shard_index];
  std::unique_lock<std::shared_mutex> lock(shard.mutex, std::defer_lock);
  if (!Take(lock, wait)) return false;
  const size_t dim = config_.dim;
  const Kernel kernel = config_.optimizer.kernel(true);
  Scratch& scratch = ThreadScratch();
  LinkDuplicates(items, n, scratch);
  const size_t distinct = scratch.first.size();
  std::vector<float*>& rows = scratch.rows;
  rows.resize(distinct);
  scratch.sum.resize(dim);
  scratch.gradient.resize(dim);
  for (size_t i = 0; i < distinct + 2 * kDistance; ++i) {
    if (i < distinct) {
      const Item& item = items[scratch.first[i]];
      shard.index.Prefetch(item.hash);
    }
    if (i >= kDistance && i - kDistance < distinct) {
      const size_t at = i - kDistance;
      const Item& item = items[scratch.first[at]];
      Entry* entry = shard.index.Find(item.hash);
      if (entry == nullptr && !config_.has_filter) entry = MakeRow(shard, nullptr, item.hash);
      if (entry == nullptr || !entry->has_row()) {
        rows[at] = nullptr;
        ++shard.dropped;
      } else {
        const uint32_t row = entry->state - kFirstRow;
        rows[at] = Value(shard, row);
        *shard.rows.Version(row) = step;
        PrefetchBytes<1>(rows[at], cell_bytes_);
        PrefetchBytes<0>(gradients + item.position * dim, dim * sizeof(float));
      }
    }
    if (i >= 2 * kDistance) {
      const size_t at = i - 2 * kDistance;
      if (rows[at] == nullptr) continue;
      const uint32_t head = scratch.first[at];
      const float* gradient = gradients + items[head].position * dim;
      if (scratch.next[head] != kNone) {
        std::copy(gradient, gradient + dim, scratch.sum.begin());
        for (uint32_t j = scratch.next[head]; j != kNone; j = scratch.next[j]) {
          const float* more = gradients + items[j].position * dim;
          for (size_t k = 0; k < dim; ++k) scratch.sum[k] += static_cast<double>(more[k]);
        }
        for (size_t k = 0; k < dim; ++k) scratch.gradient[k] = static_cast<float>(scratch.sum[k]);
        gradient = scratch.gradient.data();
      }
      float* slots[4] = {rows[at] + dim, rows[at] + 2 * dim, rows[at] + 3 * dim, nullptr};
      kernel(args, rows[at], slots, gradient, dim);
    }
  }
  return true;
}

template <class Work>
void Table::ForEachShardOf(const KeySpan& keys, Work&& work) {
  ForEachGroup(GroupByShard({keys}), [&](size_t, int shard_index, const Item* items, size_t n, bool wait) {
    Shard& shard = *shards_[shard_index];
    std::unique_lock<std::shared_mutex> lock(shard.mutex, std::defer_lock);
    if (!Take(lock, wait)) return false;
    work(shard, items, n);
    return true;
  });
}

void Table::Upsert(const KeySpan& keys, const float* values) {
  ForEachShardOf(keys, [&](Shard& shard, const Item* items, size_t n) {
    for (size_t i = 0; i < n; ++i) {
      Entry* entry = shard.index.Find(items[i].hash);
      if (entry == nullptr || !entry->has_row()) entry = MakeRow(shard, entry, items[i].hash);
      entry->frequency = std::max(entry->frequency, config_.filter_freq);
      CopyRow(Value(shard, entry->state - kFirstRow), values + items[i].position * config_.dim, config_.dim);
    }
  });
}

size_t Table::Erase(const KeySpan& keys) {
  std::atomic<size_t> erased{0};
  ForEachShardOf(keys, [&](Shard& shard, const Item* items, size_t n) {
    for (size_t i = 0; i < n; ++i) {
      Entry* entry = shard.index.Find(items[i].hash);
      if (entry == nullptr) continue;
      RemoveEntry(shard, entry);
      erased.fetch_add(1, std::memory_order_relaxed);
    }
  });
  return erased.load();
}

std::vector<int64_t> Table::Evict(int64_t step) {
  if (config_.steps_to_live < 0) return {};
  std::vector<std::vector<uint64_t>> evicted(kShards);
  ParallelFor(kShards, [&](size_t s) {
    Shard& shard = *shards_[s];
    std::unique_lock<std::shared_mutex> lock(shard.mutex);
    shard.index.ForEach([&](Entry* entry) {
      if (!entry->has_row()) return;
      int64_t* version = shard.rows.Version(entry->state - kFirstRow);
      if (*version == kNeverUpdated) {
        *version = step;
      } else if (step - *version > config_.steps_to_live) {
        evicted[s].push_back(entry->hash);
        RemoveEntry(shard, entry);
      }
    });
    shard.evicted += static_cast<int64_t>(evicted[s].size());
  });
  std::vector<uint64_t> all;
  for (const auto& part : evicted) all.insert(all.end(), part.begin(), part.end());
  return SortedKeys(&all);
}

void Table::Clear() {
  for (auto& shard : shards_) {
    std::unique_lock<std::shared_mutex> lock(shard->mutex);
    shard->index.Clear();
    shard->rows.Clear();
    shard->filtered = 0;
  }
}

void Table::Keys(std::vector<int64_t>* rows, std::vector<int64_t>* filtered, std::vector<int64_t>* counts) {
  std::vector<uint64_t> with_row;
  std::vector<std::pair<uint64_t, uint32_t>> without_row;
  for (auto& shard : shards_) {
    std::shared_lock<std::shared_mutex> lock(shard->mutex);
    shard->index.ForEach([&](const Entry* entry) {
      if (entry->has_row()) {
        with_row.push_back(entry->hash);
      } else {
        without_row.emplace_back(entry->hash, entry->frequency);
      }
    });
  }
  *rows = SortedKeys(&with_row);
  std::sort(without_row.begin(), without_row.end());
  filtered->clear();
  counts->clear();
  for (const auto& [hash, count] : without_row) {
    filtered->push_back(static_cast<int64_t>(Unmix64(hash)));
    counts->push_back(count);
  }
}

void Table::Export(const KeySpan& keys, uint8_t* present, const RowColumns& columns) {
  const size_t dim = config_.dim;
  ForEachGroup(GroupByShard({keys}), [&](size_t, int shard_index, const Item* items, size_t n, bool wait) {
    Shard& shard = *shards_[shard_index];
    std::shared_lock<std::shared_mutex> lock(shard.mutex, std::defer_lock);
    if (!Take(lock, wait)) return false;
    for (size_t i = 0; i < n; ++i) {
      const size_t to = items[i].position;
      const Entry* entry = shard.index.Find(items[i].hash);
      present[to] = entry != nullptr && entry->has_row();
      if (!present[to]) continue;
      const uint32_t row = entry->state - kFirstRow;
      columns.frequency[to] = entry->frequency;
      columns.version[to] = *shard.rows.Version(row);
      const float* value = Value(shard, row);
      CopyRow(columns.value + to * dim, value, dim);
      for (size_t s = 0; s < slot_count_; ++s) CopyRow(columns.slots[s] + to * dim, value + (s + 1) * dim, dim);
    }
    return true;
  });
}

void Table::Import(const KeySpan& keys, const RowColumns& columns) {
  const size_t dim = config_.dim;
  ForEachShardOf(keys, [&](Shard& shard, const Item* items, size_t n) {
    for (size_t i = 0; i < n; ++i) {
      const size_t from = items[i].position;
      Entry* entry = shard.index.Find(items[i].hash);
      if (entry == nullptr || !entry->has_row()) entry = MakeRow(shard, entry, items[i].hash);
      const int64_t frequency = std::clamp<int64_t>(columns.frequency[from], 0, std::numeric_limits<uint32_t>::max());
      // A row that was admitted once stays admitted, also under a higher threshold.
      entry->frequency = std::max(static_cast<uint32_t>(frequency), config_.filter_freq);
      const uint32_t row = entry->state - kFirstRow;
      *shard.rows.Version(row) = columns.version[from];
      float* value = Value(shard, row);
      CopyRow(value, columns.value + from * dim, dim);
      for (size_t s = 0; s < slot_count_; ++s) CopyRow(value + (s + 1) * dim, columns.slots[s] + from * dim, dim);
    }
  });
}

void Table::ImportFiltered(const KeySpan& keys) {
  ForEachShardOf(keys, [&](Shard& shard, const Item* items, size_t n) {
    for (size_t i = 0; i < n; ++i) {
      Entry* entry = shard.index.Find(items[i].hash);
      if (entry == nullptr) {
        entry = shard.index.Insert(items[i].hash);
        entry->state = kFiltered;
        ++shard.filtered;
      }
      if (!entry->has_row()) entry->frequency = items[i].count;
    }
  });
}

TableStats Table::Stats() const {
  TableStats stats;
  for (const auto& shard : shards_) {
    std::shared_lock<std::shared_mutex> lock(shard->mutex);
    stats.rows += static_cast<int64_t>(shard->rows.live());
    stats.filtered += shard->filtered;
    stats.admitted += shard->admitted;
    stats.evicted += shard->evicted;
    stats.dropped += shard->dropped;
    stats.lookups += shard->lookups.load(std::memory_order_relaxed);
    stats.hits += shard->hits.load(std::memory_order_relaxed);
    stats.bytes += static_cast<int64_t>(shard->index.bytes() + shard->rows.bytes());
  }
  return stats;
}

void Pull(const std::vector<PullItem>& items, bool train) {
  std::vector<KeySpan> spans;
  for (const PullItem& item : items) spans.push_back(item.keys);
  const std::vector<GroupedKeys> grouped = GroupByShard(spans);
  ForEachGroup(grouped, [&](size_t batch, int shard, const Item* group, size_t n, bool wait) {
    Table* table = items[batch].table;
    float* out = items[batch].out;
    return train ? table->Train(shard, group, n, out, wait) : table->Read(shard, group, n, out, wait);
  });
}

void Push(const std::vector<PushItem>& items, int64_t step, double learning_rate) {
  std::vector<KeySpan> spans;
  std::vector<StepArgs> args;
  for (const PushItem& item : items) {
    spans.push_back(item.keys);
    args.push_back(item.table->optimizer().Prepare(step, item.table->NextUpdate(), learning_rate));
  }
  const std::vector<GroupedKeys> grouped = GroupByShard(spans);
  ForEachGroup(grouped, [&](size_t batch, int shard, const Item* group, size_t n, bool wait) {
    return items[batch].table->Apply(shard, group, n, items[batch].gradients, args[batch], step, wait);
  });
}

}  // namespace deeprec
