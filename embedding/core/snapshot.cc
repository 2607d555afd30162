#include "snapshot.h"

#include <algorithm>
#include <stdexcept>

#include "table_internal.h"
#include "thread_pool.h"

namespace deeprec {
namespace {

// Rows that are read under one lock: training waits for no more.
constexpr size_t kPiece = 512;
constexpr size_t kLeastTombstones = 1024;

}  // namespace

void Table::MarkChanged(Shard& shard, Entry* entry) {
  if (entry->pending()) Preserve(shard, *entry);
  if ((entry->word & kChanged) == 0) ListChanged(shard, entry->hash);
  entry->word = (entry->word & ~kPending) | kChanged;
}

void Table::Preserve(Shard& shard, const Entry& entry) {
  if (!entry.has_row()) {
    shard.snapshot.counts.push_back({entry.hash, entry.frequency()});
    return;
  }
  const size_t row_class = Unpack(entry.state).row_class;
  const RowLayout& layout = classes_[row_class];
  std::vector<int64_t> scratch;
  const RowView view = Peek(shard, entry, &scratch);
  std::unique_ptr<int64_t[]> words(new int64_t[layout.meta_words + (layout.cell_bytes + 7) / 8]);
  std::copy(view.meta, view.meta + layout.meta_words, words.get());
  std::memcpy(words.get() + layout.meta_words, view.cell, layout.cell_bytes);
  shard.snapshot.rows.emplace(entry.hash,
                              SavedRow{entry.frequency(), static_cast<uint32_t>(row_class), std::move(words)});
}

void Table::PreserveBloom(Shard& shard, int bucket) {
  std::unique_ptr<char[]> copy(new char[bloom_->bucket_bytes()]);
  std::memcpy(copy.get(), bloom_->bucket_data(bucket), bloom_->bucket_bytes());
  shard.snapshot.bloom.emplace(bucket, std::move(copy));
  shard.snapshot.bloom_pending &= ~(1u << (bucket / kShards));
}

void Table::AddTombstone(Shard& shard, uint64_t hash) {
  if (shard.tombstones_lost) return;
  std::vector<uint64_t>& all = shard.tombstones;
  const size_t limit = std::max(kLeastTombstones, shard.index.size());
  if (all.size() >= limit && all.size() == all.capacity()) {
    std::sort(all.begin(), all.end());
    all.erase(std::unique(all.begin(), all.end()), all.end());
    if (all.size() >= limit) {
      // More was removed than is left: a full snapshot is the smaller one.
      shard.tombstones_lost = true;
      all = {};
      return;
    }
    all.reserve(2 * limit);
  }
  all.push_back(hash);
}

void Table::MarkSaved() {
  if (snapshot_.load()) throw std::runtime_error("A snapshot is running.");
  tracks_.store(true);
  ParallelFor(kShards, [&](size_t s) {
    Shard& shard = *shards_[s];
    std::unique_lock<std::shared_mutex> lock(shard.mutex);
    shard.index.ForEach([](Entry* entry) { entry->word &= ~kChanged; });
    shard.changed = {};
    shard.changed_known = true;
    shard.tombstones = {};
    shard.tombstones_lost = false;
  });
}

Snapshot::Snapshot(Table* table, bool changed_only)
    : table_(table),
      changed_only_(changed_only),
      tombstones_(kShards),
      tombstones_lost_(kShards),
      row_parts_(kShards),
      filtered_parts_(kShards),
      listed_(kShards) {
  table->RequireOwner();
  if (table->snapshot_.exchange(true)) throw std::runtime_error("A snapshot of the table is running already.");
  table->tracks_.store(true);
  updates_ = table->updates();
  calls_ = table->calls();
  {
    std::lock_guard<std::mutex> ranks(table->rank_mutex_);  // all rows are as of the same refresh
    rank_refreshes_ = table->rank_refreshes_;
    for (const auto& threshold : table->rank_thresholds_) rank_thresholds_.push_back(threshold.load());
    ParallelFor(kShards, [this](size_t shard) { Begin(shard); });
  }
  const bool lost = std::any_of(tombstones_lost_.begin(), tombstones_lost_.end(), [](char one) { return one != 0; });
  if (changed_only && lost) {
    Close();
    throw std::invalid_argument("The table lost track of what was removed since the last snapshot: take a full one.");
  }
}

void Snapshot::Begin(size_t index) {
  Table::Shard& shard = *table_->shards_[index];
  size_t rows = 0, filtered = 0;
  std::unique_lock<std::shared_mutex> lock(shard.mutex);
  if (changed_only_ && shard.changed_known) {
    BeginListed(index);
    rows = row_parts_[index].size();
    filtered = filtered_parts_[index].size();
  } else if (changed_only_) {
    static_assert(kChanged >> 1 == kPending, "changed becomes pending by a shift");
    shard.index.ForEach([&](Entry* entry) {
      if ((entry->word & kChanged) == 0) return;
      entry->word = entry->frequency() | kPending;
      ++(entry->has_row() ? rows : filtered);
    });
  } else {
    shard.index.ForEach([&](Entry* entry) {
      entry->word = entry->frequency() | kPending;
      ++(entry->has_row() ? rows : filtered);
    });
  }
  shard.changed.clear();
  shard.changed_known = true;
  tombstones_[index].swap(shard.tombstones);
  tombstones_lost_[index] = static_cast<char>(shard.tombstones_lost);
  shard.tombstones_lost = false;
  if (table_->bloom_) shard.snapshot.bloom_pending = ~0u;
  num_rows_.fetch_add(rows, std::memory_order_relaxed);
  num_filtered_.fetch_add(filtered, std::memory_order_relaxed);
}

// Few changes: found one by one. Rows are noted, counts are read at once.
void Snapshot::BeginListed(size_t index) {
  Table::Shard& shard = *table_->shards_[index];
  const std::vector<uint64_t>& changed = shard.changed;
  row_parts_[index].reserve(changed.size());
  for (size_t step = 0; step < changed.size() + kDistance; ++step) {
    if (step < changed.size()) shard.index.Prefetch(changed[step]);
    if (step < kDistance) continue;
    Entry* entry = shard.index.Find(changed[step - kDistance]);
    if (entry == nullptr || (entry->word & kChanged) == 0) continue;
    if (entry->has_row()) {
      entry->word = entry->frequency() | kPending;
      row_parts_[index].push_back(entry->hash);
    } else {
      entry->word = entry->frequency();
      filtered_parts_[index].push_back({entry->hash, entry->frequency()});
    }
  }
  listed_[index] = 1;
}

void Snapshot::RequireOpen() const {
  if (!open_) throw std::runtime_error("The snapshot is closed.");
}

// The hashes of what belongs to the snapshot, in order; counts are read at once.
void Snapshot::Collect() {
  std::vector<std::vector<uint64_t>>& rows = row_parts_;
  std::vector<std::vector<HashedCount>>& filtered = filtered_parts_;
  ParallelFor(kShards, [&](size_t s) {
    if (listed_[s] != 0) return;
    Table::Shard& shard = *table_->shards_[s];
    std::unique_lock<std::shared_mutex> lock(shard.mutex);
    rows[s].reserve(num_rows_.load() / kShards + 1024);
    for (const auto& saved : shard.snapshot.rows) rows[s].push_back(saved.first);
    filtered[s].swap(shard.snapshot.counts);
    shard.index.ForEach([&](Entry* entry) {
      if (!entry->pending()) return;
      if (entry->has_row()) {
        rows[s].push_back(entry->hash);
      } else {
        filtered[s].push_back({entry->hash, entry->frequency()});
        entry->word &= ~kPending;
      }
    });
  });
  rows_ = InBucketOrder(&rows);
  filtered_ = InBucketOrder(&filtered);
  collected_ = true;
}

void Snapshot::Read(size_t begin, size_t n, int64_t* keys, const RowColumns& columns) {
  std::shared_lock<std::shared_mutex> lock(mutex_);
  RequireOpen();
  std::call_once(collected_once_, [this] { Collect(); });
  if (begin > rows_.size() || n > rows_.size() - begin) throw std::invalid_argument("The snapshot has no such rows.");
  // Pieces of one shard each.
  std::vector<size_t> starts;
  for (size_t at = begin; at < begin + n;) {
    starts.push_back(at);
    const size_t most = std::min(at + kPiece, begin + n);
    const int bucket = BucketOf(rows_[at]);
    if (BucketOf(rows_[most - 1]) == bucket) {
      at = most;
    } else {
      while (BucketOf(rows_[at]) == bucket) ++at;
    }
  }
  starts.push_back(begin + n);
  ParallelFor(starts.size() - 1, [&](size_t i) { ReadPiece(starts[i], starts[i + 1], begin, keys, columns); });
  rows_read_.fetch_add(n);
}

void Snapshot::ReadPiece(size_t begin, size_t end, size_t first, int64_t* keys, const RowColumns& columns) {
  Table::Shard& shard = *table_->shards_[ShardOf(rows_[begin])];
  size_t bytes = table_->classes_[0].cell_bytes;
  const size_t n = end - begin;
  Entry* entries[kPiece];
  std::vector<int64_t>& scratch = ThreadScratch().view;
  std::unique_lock<std::shared_mutex> lock(shard.mutex);
  for (size_t step = 0; step < n + 2 * kDistance; ++step) {
    if (step < n) shard.index.Prefetch(rows_[begin + step]);
    if (step >= kDistance && step - kDistance < n) {
      Entry*& entry = entries[step - kDistance];
      entry = shard.index.Find(rows_[begin + step - kDistance]);
      if (entry != nullptr && entry->pending()) table_->PrefetchRow<RowUse::kCopy>(shard, *entry, bytes);
    }
    if (step < 2 * kDistance) continue;
    const uint64_t hash = rows_[begin + step - 2 * kDistance];
    const size_t to = begin + step - 2 * kDistance - first;
    Entry* entry = entries[step - 2 * kDistance];
    keys[to] = static_cast<int64_t>(Unmix64(hash));
    if (entry != nullptr && entry->pending()) {
      const size_t row_class = Table::Unpack(entry->state).row_class;
      table_->FillColumns(table_->Peek(shard, *entry, &scratch), row_class, entry->frequency(), to, columns);
      entry->word &= ~kPending;
      continue;
    }
    const auto saved = shard.snapshot.rows.find(hash);
    if (saved == shard.snapshot.rows.end()) throw std::invalid_argument("A row of a snapshot can be read only once.");
    const SavedRow& row = saved->second;
    const size_t meta_words = table_->classes_[row.row_class].meta_words;
    const RowView view{reinterpret_cast<const char*>(row.words.get() + meta_words), row.words.get()};
    table_->FillColumns(view, row.row_class, row.frequency, to, columns);
    shard.snapshot.rows.erase(saved);
  }
}

void Snapshot::Filtered(std::vector<int64_t>* keys, std::vector<int64_t>* counts) {
  std::shared_lock<std::shared_mutex> lock(mutex_);
  RequireOpen();
  std::call_once(collected_once_, [this] { Collect(); });
  SplitCounts(filtered_, keys, counts);
  filtered_read_ = true;
}

std::vector<int64_t> Snapshot::Tombstones() {
  std::shared_lock<std::shared_mutex> lock(mutex_);
  RequireOpen();
  if (!changed_only_) return {};
  std::call_once(collected_once_, [this] { Collect(); });
  std::vector<std::vector<uint64_t>> parts = tombstones_;
  const std::vector<uint64_t> all = InBucketOrder(&parts);
  std::vector<int64_t> keys;
  auto row = rows_.begin();
  for (size_t i = 0; i < all.size(); ++i) {
    if (i > 0 && all[i] == all[i - 1]) continue;
    // A removed key that has a row again was made anew, so it belongs to the snapshot.
    row = std::lower_bound(row, rows_.end(), all[i]);
    if (row == rows_.end() || *row != all[i]) keys.push_back(static_cast<int64_t>(Unmix64(all[i])));
  }
  tombstones_read_ = true;
  return keys;
}

void Snapshot::Bloom(int bucket, char* counters) {
  std::shared_lock<std::shared_mutex> open(mutex_);
  RequireOpen();
  Table::Shard& shard = *table_->shards_[bucket & (kShards - 1)];
  std::shared_lock<std::shared_mutex> lock(shard.mutex);
  const auto saved = shard.snapshot.bloom.find(bucket);
  const char* from = saved == shard.snapshot.bloom.end() ? table_->bloom_->bucket_data(bucket) : saved->second.get();
  std::memcpy(counters, from, table_->bloom_->bucket_bytes());
}

size_t Snapshot::Copied() const {
  std::shared_lock<std::shared_mutex> open(mutex_);
  RequireOpen();
  size_t copied = 0;
  for (const auto& shard : table_->shards_) {
    std::shared_lock<std::shared_mutex> lock(shard->mutex);
    copied += shard->snapshot.rows.size();
  }
  return copied;
}

void Snapshot::Undo(size_t index) {
  Table::Shard& shard = *table_->shards_[index];
  // What is pending was not read, and what was copied is marked already; what was read is in the lists.
  shard.changed_known = false;
  shard.changed = {};
  shard.index.ForEach([](Entry* entry) {
    if (entry->pending()) entry->word = entry->frequency() | kChanged;
  });
  for (const uint64_t hash : tombstones_[index]) Table::AddTombstone(shard, hash);
  if (tombstones_lost_[index] != 0) {
    shard.tombstones_lost = true;
    shard.tombstones = {};
  }
}

void Snapshot::Close() {
  std::unique_lock<std::shared_mutex> closing(mutex_);
  if (!open_) return;
  open_ = false;
  const bool any_removed =
      std::any_of(tombstones_.begin(), tombstones_.end(), [](auto& part) { return !part.empty(); });
  const bool complete = collected_ && rows_read_ == num_rows_ && (filtered_read_ || num_filtered_ == 0) &&
                        (tombstones_read_ || !changed_only_ || !any_removed);
  ParallelFor(kShards, [&](size_t s) {
    Table::Shard& shard = *table_->shards_[s];
    std::unique_lock<std::shared_mutex> lock(shard.mutex);
    if (!complete) Undo(s);
    shard.snapshot = ShardSnapshot();
  });
  if (!complete) {
    const auto mark = [&](uint64_t hash) {
      Table::Shard& shard = *table_->shards_[ShardOf(hash)];
      std::unique_lock<std::shared_mutex> lock(shard.mutex);
      Entry* entry = shard.index.Find(hash);
      if (entry != nullptr) entry->word |= kChanged;
    };
    for (const auto& part : row_parts_) {
      for (const uint64_t hash : part) mark(hash);
    }
    for (const auto& part : filtered_parts_) {
      for (const HashedCount& item : part) mark(item.hash);
    }
    for (const uint64_t hash : rows_) mark(hash);
    for (const HashedCount& item : filtered_) mark(item.hash);
  }
  rows_ = {};
  filtered_ = {};
  row_parts_ = {};
  filtered_parts_ = {};
  table_->snapshot_.store(false);
}

}  // namespace deeprec
