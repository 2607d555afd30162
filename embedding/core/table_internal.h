// What the parts of the table's implementation share.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "table.h"

namespace deeprec {

// How many keys lie between the stages of the pipeline: enough to cover a memory access, few enough to stay in L1.
constexpr size_t kDistance = 16;

template <int kWrite>
void PrefetchBytes(const void* start, size_t bytes) {
  const char* at = static_cast<const char*>(start);
  for (size_t offset = 0; offset < bytes; offset += 64) __builtin_prefetch(at + offset, kWrite);
}

inline void CopyRow(float* to, const float* from, size_t dim) {
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

// Adds to a frequency.
inline uint32_t AddSaturated(uint32_t frequency, uint32_t count) {
  const uint32_t room = kMaxFrequency - frequency;
  return frequency + (count < room ? count : room);
}

// Takes the lock, waiting only where asked to.
template <class Lock>
bool Take(Lock& lock, bool wait) {
  if (!wait) return lock.try_lock();
  lock.lock();
  return true;
}

// So many changed keys of a shard are listed at least.
constexpr size_t kListed = 256;

// Scratch of a thread, kept between batches.
struct Scratch {
  std::vector<float*> rows;
  std::vector<uint32_t> table, first, next, last, draws;
  std::vector<double> sum;
  std::vector<float> gradient, update, start;
  std::vector<int64_t> row, view;
};
Scratch& ThreadScratch();

constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();

// The rank word of a row: decayed frequency (float bits) above the frequency that it has taken in.
inline double RankFrequency(uint64_t packed) {
  const auto bits = static_cast<uint32_t>(packed >> 32);
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Occurrences since those that it has taken in.
inline uint32_t FreshFrequency(uint64_t packed, uint32_t frequency) {
  const auto taken_in = static_cast<uint32_t>(packed);
  return frequency > taken_in ? frequency - taken_in : 0;
}

// Orders rows by their (corrected, decayed) frequency, and equal ones by hash, so that a rank divides those too.
// Frequencies that differ by rounding are equal.
inline uint64_t RankOf(double frequency, uint64_t hash) {
  const auto rounded = static_cast<float>(frequency);
  uint32_t bits;
  std::memcpy(&bits, &rounded, sizeof(bits));
  bits = (bits + (1u << 10)) >> 11;  // positive floats are ordered like their bits
  return static_cast<uint64_t>(bits) << 32 | static_cast<uint32_t>(Mix64(hash) >> 32);
}

inline uint64_t PackRank(float frequency, uint32_t taken_in) {
  uint32_t bits;
  std::memcpy(&bits, &frequency, sizeof(bits));
  return static_cast<uint64_t>(bits) << 32 | taken_in;
}

// Metadata words, then the cell.
inline void CopyRecord(const RowView& view, const RowLayout& layout, std::vector<int64_t>* copy) {
  copy->resize(layout.meta_words + (layout.cell_bytes + 7) / 8);
  std::copy(view.meta, view.meta + layout.meta_words, copy->begin());
  std::memcpy(copy->data() + layout.meta_words, view.cell, layout.cell_bytes);
}

inline void Table::Changing(Shard& shard, Entry* entry) {
  if (__builtin_expect((entry->word & (kChanged | kPending)) != kChanged, 0)) MarkChanged(shard, entry);
}

inline void Table::ListChanged(Shard& shard, uint64_t hash) {
  if (!shard.changed_known) return;
  if (shard.changed.size() == shard.changed.capacity() && shard.changed.size() >= kListed &&
      shard.changed.size() > shard.index.size() / 8) {
    shard.changed_known = false;
    shard.changed = {};
    return;
  }
  shard.changed.push_back(hash);
}

inline Entry* Table::Insert(Shard& shard, uint64_t hash) {
  ListChanged(shard, hash);
  return shard.index.Insert(hash);
}

inline void Table::BloomChanging(Shard& shard, int bucket) {
  if ((shard.snapshot.bloom_pending >> (bucket / kShards) & 1) != 0) PreserveBloom(shard, bucket);
}

inline void Table::Wrote(Shard& shard) {
  if (files_) shared_writes_[shard.number].store(++shard.writes, std::memory_order_release);
}

inline void Table::Mutating(Shard& shard) {
  if (!files_) return;
  RequireOwner();
  if (config_.tiers[0].in_files()) Wrote(shard);
}

template <class Work>
void Table::Edit(Shard& shard, Entry* entry, Work&& work) {
  if (tiered_ && !Promote(shard, entry)) {
    EditInPlace(shard, *entry, work);
  } else {
    const Row row = TopRow(shard, *entry);
    Touch(shard, row.meta);
    work(row);
  }
}

template <class Work>
void Table::EditInPlace(Shard& shard, const Entry& entry, Work&& work) {
  const Address at = Unpack(entry.state);
  if (at.tier == 0) {
    work(TopRow(shard, entry));
    return;
  }
  Wrote(shard);
  shard.lower[at.tier - 1]->Change(entry.hash, at.row_class, at.place,
                                   [&](char* cell, int64_t* meta) { work(Row{cell, meta, &classes_[at.row_class]}); });
}

template <class Work>
auto Table::Named(Work&& work) const {
  try {
    return work();
  } catch (const StorageFull& full) {
    throw StorageFull("Table '" + config_.name + "': " + full.what());
  }
}

template <class Work>
void Table::ForEachShardOf(const KeySpan& keys, Work&& work) {
  ForEachGroup(GroupByShard({keys}), [&](size_t, int shard_index, const Item* items, size_t n, bool wait) {
    Shard& shard = *shards_[shard_index];
    std::unique_lock<std::shared_mutex> lock(shard.mutex, std::defer_lock);
    if (!Take(lock, wait)) return false;
    Mutating(shard);
    Named([&] { work(shard, items, n); });
    return true;
  });
}

}  // namespace deeprec
