// Lookups and updates of batches.
#include <algorithm>

#include "maintenance.h"
#include "table_internal.h"

namespace deeprec {
namespace {

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

}  // namespace

Scratch& ThreadScratch() {
  static thread_local Scratch scratch;
  return scratch;
}

Entry* Table::Count(Shard& shard, Entry* entry, const Item& item, uint32_t draws, int64_t call) {
  using Kind = AdmissionConfig::Kind;
  if (entry != nullptr) Changing(shard, entry);
  if (entry != nullptr && entry->has_row()) {
    CatchUp(shard, *entry);
    entry->Add(item.count);
    return entry;
  }
  uint32_t frequency = AddSaturated(entry == nullptr ? 0 : entry->frequency(), item.count);
  bool admitted = true;
  switch (config_.admission.kind) {
    case Kind::kAll:
      break;
    case Kind::kCounter:
      admitted = frequency >= config_.admission.threshold;
      if (!admitted && entry == nullptr) {
        entry = Insert(shard, item.hash);
        entry->state = kFiltered;
        ++shard.filtered;
      }
      break;
    case Kind::kBloom:
      BloomChanging(shard, BucketOf(item.hash));
      frequency = bloom_->Add(item.hash, item.count);
      admitted = frequency >= config_.admission.threshold;
      break;
    case Kind::kProbability:
      admitted = DrawAdmission(config_.admission, item.hash, call, draws);
      if (!admitted) shard.refused += item.count;
      break;
  }
  if (admitted) entry = MakeRow(shard, entry, item.hash, 0);
  if (entry != nullptr) entry->set_frequency(frequency);
  return entry;
}

// For the probability filter, which remembers nothing of an id: at a key's first item all its occurrences in the batch,
// 0 at its repeats, so that the repeats count and are drawn for once. Null for other filters.
const uint32_t* Table::Draws(const Item* items, size_t n) const {
  if (config_.admission.kind != AdmissionConfig::Kind::kProbability) return nullptr;
  Scratch& scratch = ThreadScratch();
  LinkDuplicates(items, n, scratch);
  scratch.draws.assign(n, 0);
  for (const uint32_t head : scratch.first) {
    uint64_t total = 0;
    for (uint32_t i = head; i != kNone; i = scratch.next[i]) total += items[i].count;
    scratch.draws[head] = static_cast<uint32_t>(std::min<uint64_t>(total, std::numeric_limits<uint32_t>::max()));
  }
  return scratch.draws.data();
}

// Rows of one class in memory: pointers stay valid, so each key is looked for once.
template <bool kTrain>
void Table::LookupSimple(Shard& shard, const Item* items, size_t n, int64_t call, float* out) {
  const size_t dim = config_.dim;
  const uint32_t* draws = kTrain ? Draws(items, n) : nullptr;
  std::vector<float*>& rows = ThreadScratch().rows;
  rows.resize(n);
  size_t hits = 0;
  bool late = false;
  const auto read = [&](size_t i) {
    float* to = out + items[i].position * dim;
    if (rows[i] != nullptr) {
      CopyRow(to, rows[i], dim);
    } else {
      DefaultRow(items[i].hash, to);
    }
  };
  for (size_t step = 0; step < n + 2 * kDistance; ++step) {
    if (step < n) shard.index.Prefetch(items[step].hash);
    if (step >= kDistance && step - kDistance < n) {
      const size_t i = step - kDistance;
      Entry* entry = shard.index.Find(items[i].hash);
      const bool hit = entry != nullptr && entry->has_row();
      hits += hit;
      if (kTrain) {
        if (hit) {
          Changing(shard, entry);
          entry->Add(items[i].count);
        } else {
          entry = Count(shard, entry, items[i], draws == nullptr ? 1 : draws[i], call);
        }
        late = late || (filters_ && !hit && entry != nullptr && entry->has_row());
      }
      rows[i] = nullptr;
      if (entry != nullptr && entry->has_row()) {
        rows[i] = reinterpret_cast<float*>(shard.slabs[0].Cell(Unpack(entry->state).place));
        PrefetchBytes<0>(rows[i], dim * sizeof(float));
      }
    }
    if (step >= 2 * kDistance) read(step - 2 * kDistance);
  }
  // A key that a later repeat in this batch admitted reads its row everywhere in the batch.
  if (kTrain && late) {
    for (size_t i = 0; i < n; ++i) {
      if (rows[i] != nullptr) continue;
      const Entry* entry = shard.index.Find(items[i].hash);
      if (entry == nullptr || !entry->has_row()) continue;
      rows[i] = reinterpret_cast<float*>(shard.slabs[0].Cell(Unpack(entry->state).place));
      read(i);
    }
  }
  shard.lookups.fetch_add(static_cast<int64_t>(n), std::memory_order_relaxed);
  shard.hits.fetch_add(static_cast<int64_t>(hits), std::memory_order_relaxed);
}

// Rows may move while the group runs (to another tier, or growing), so no pointer outlives its item; the second
// search of a key finds its line in the cache.
template <bool kTrain>
void Table::LookupGeneral(Shard& shard, const Item* items, size_t n, int64_t call, float* out) {
  const size_t dim = config_.dim;
  const uint32_t* draws = kTrain ? Draws(items, n) : nullptr;
  std::vector<int64_t>& scratch = ThreadScratch().view;
  const bool stays = !tiered_ || Inherited();  // rows are where they are
  size_t hits = 0;
  // All are counted before any is read: a key that a repeat admits or grows reads the same everywhere in the batch.
  if (kTrain) {
    for (size_t step = 0; step < n + kDistance; ++step) {
      if (step < n) shard.index.Prefetch(items[step].hash);
      if (step < kDistance) continue;
      const size_t i = step - kDistance;
      Entry* entry = shard.index.Find(items[i].hash);
      hits += entry != nullptr && entry->has_row();
      entry = Count(shard, entry, items[i], draws == nullptr ? 1 : draws[i], call);
      if (has_blocks() && entry != nullptr && entry->has_row()) Grow(shard, entry);
    }
  }
  for (size_t step = 0; step < n + 2 * kDistance; ++step) {
    if (step < n) shard.index.Prefetch(items[step].hash);
    if (step >= kDistance && step - kDistance < n) {
      const Entry* entry = shard.index.Find(items[step - kDistance].hash);
      if (entry != nullptr && entry->has_row()) PrefetchRow<RowUse::kLookup>(shard, *entry, dim * sizeof(float));
    }
    if (step < 2 * kDistance) continue;
    const Item& item = items[step - 2 * kDistance];
    float* to = out + item.position * dim;
    Entry* entry = shard.index.Find(item.hash);
    if (entry == nullptr || !entry->has_row()) {
      DefaultRow(item.hash, to);
      continue;
    }
    if (!kTrain) ++hits;
    const RowLayout& layout = classes_[Unpack(entry->state).row_class];
    ReadValue(layout, stays ? Peek(shard, *entry, &scratch).cell : ViewRow(shard, entry, &scratch).cell, to);
  }
  shard.lookups.fetch_add(static_cast<int64_t>(n), std::memory_order_relaxed);
  shard.hits.fetch_add(static_cast<int64_t>(hits), std::memory_order_relaxed);
}

bool Table::Read(int shard_index, const Item* items, size_t n, float* out, bool wait) {
  Shard& shard = *shards_[shard_index];
  if (!tiered_) {
    std::shared_lock<std::shared_mutex> lock(shard.mutex, std::defer_lock);
    if (!Take(lock, wait)) return false;
    simple_ ? LookupSimple<false>(shard, items, n, 0, out) : LookupGeneral<false>(shard, items, n, 0, out);
    if (files_) RequireUnchanged(shard);
    return true;
  }
  std::unique_lock<std::shared_mutex> lock(shard.mutex, std::defer_lock);
  if (!Take(lock, wait)) return false;
  Named([&] { LookupGeneral<false>(shard, items, n, 0, out); });
  RequireUnchanged(shard);
  if (OverHighWater(shard)) RequestMaintenance(this);
  return true;
}

bool Table::Train(int shard_index, const Item* items, size_t n, int64_t call, float* out, bool wait) {
  Shard& shard = *shards_[shard_index];
  std::unique_lock<std::shared_mutex> lock(shard.mutex, std::defer_lock);
  if (!Take(lock, wait)) return false;
  Mutating(shard);
  Named([&] {
    simple_ ? LookupSimple<true>(shard, items, n, call, out) : LookupGeneral<true>(shard, items, n, call, out);
  });
  if (tiered_ && has_blocks()) RequestCompaction(shard);
  if (tiered_ && OverHighWater(shard)) RequestMaintenance(this);
  return true;
}

bool Table::Apply(int shard_index, const Item* items, size_t n, const float* gradients, const StepArgs& args,
                  int64_t step, int64_t now, bool wait) {
  Shard& shard = *shards_[shard_index];
  std::unique_lock<std::shared_mutex> lock(shard.mutex, std::defer_lock);
  if (!Take(lock, wait)) return false;
  Mutating(shard);
  const size_t dim = config_.dim;
  Scratch& scratch = ThreadScratch();
  LinkDuplicates(items, n, scratch);
  const size_t distinct = scratch.first.size();
  scratch.sum.resize(dim);
  scratch.gradient.resize(dim);
  scratch.update.resize(2 * dim);
  for (size_t turn = 0; turn < distinct + 2 * kDistance; ++turn) {
    if (turn < distinct) shard.index.Prefetch(items[scratch.first[turn]].hash);
    if (turn >= kDistance && turn - kDistance < distinct) {
      const Item& item = items[scratch.first[turn - kDistance]];
      const Entry* entry = shard.index.Find(item.hash);
      PrefetchBytes<0>(gradients + item.position * dim, dim * sizeof(float));
      if (entry != nullptr && entry->has_row()) PrefetchRow<RowUse::kUpdate>(shard, *entry, classes_[0].cell_bytes);
    }
    if (turn < 2 * kDistance) continue;
    const uint32_t head = scratch.first[turn - 2 * kDistance];
    const Item& item = items[head];
    Entry* entry = shard.index.Find(item.hash);
    if (entry == nullptr && !filters_) entry = MakeRow(shard, nullptr, item.hash, 0);
    if (entry == nullptr || !entry->has_row()) {
      ++shard.dropped;
      continue;
    }
    Changing(shard, entry);
    const float* gradient = gradients + item.position * dim;
    if (scratch.next[head] != kNone) {
      std::copy(gradient, gradient + dim, scratch.sum.begin());
      for (uint32_t j = scratch.next[head]; j != kNone; j = scratch.next[j]) {
        const float* more = gradients + items[j].position * dim;
        for (size_t k = 0; k < dim; ++k) scratch.sum[k] += static_cast<double>(more[k]);
      }
      for (size_t k = 0; k < dim; ++k) scratch.gradient[k] = static_cast<float>(scratch.sum[k]);
      gradient = scratch.gradient.data();
    }
    if (!tiered_) {
      Update(TopRow(shard, *entry), item.hash, gradient, args, step, now, scratch.update.data());
    } else {
      Edit(shard, entry,
           [&](const Row& row) { Update(row, item.hash, gradient, args, step, now, scratch.update.data()); });
    }
  }
  if (tiered_ && OverHighWater(shard)) RequestMaintenance(this);
  return true;
}

void Pull(const std::vector<PullItem>& items, bool train) {
  std::vector<KeySpan> spans;
  std::vector<int64_t> calls;
  for (const PullItem& item : items) {
    spans.push_back(item.keys);
    calls.push_back(train ? item.table->NextCall() : 0);
  }
  const std::vector<GroupedKeys> grouped = GroupByShard(spans);
  ForEachGroup(grouped, [&](size_t batch, int shard, const Item* group, size_t n, bool wait) {
    Table* table = items[batch].table;
    float* out = items[batch].out;
    return train ? table->Train(shard, group, n, calls[batch], out, wait) : table->Read(shard, group, n, out, wait);
  });
}

void Push(const std::vector<PushItem>& items, int64_t step, double learning_rate, int64_t now) {
  std::vector<KeySpan> spans;
  std::vector<StepArgs> args;
  for (const PushItem& item : items) {
    spans.push_back(item.keys);
    args.push_back(item.table->optimizer().Prepare(step, item.table->NextUpdate(), learning_rate));
  }
  const std::vector<GroupedKeys> grouped = GroupByShard(spans);
  ForEachGroup(grouped, [&](size_t batch, int shard, const Item* group, size_t n, bool wait) {
    return items[batch].table->Apply(shard, group, n, items[batch].gradients, args[batch], step, now, wait);
  });
}

}  // namespace deeprec
