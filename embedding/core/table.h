// One embedding table: sharded index and rows, admission, eviction, lookups and updates.
//
// Concurrency: every public function may be called from any number of threads at once. Each shard has one
// reader-writer lock; lookups without training share it, everything else holds it alone. No thread ever holds two
// shard locks, so there is no order to keep. A row is read and written only under its shard's lock: value, slots,
// frequency and version always belong together.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <shared_mutex>
#include <vector>

#include "batch.h"
#include "index.h"
#include "initializer.h"
#include "optimizer.h"
#include "rows.h"

namespace deeprec {

// Version of a row that has never been updated.
constexpr int64_t kNeverUpdated = -1;

struct TableConfig {
  size_t dim;
  Optimizer optimizer;
  Initializer initializer;
  uint32_t filter_freq;  // 0 and 1: no filter
  bool has_filter;       // unknown ids read no_permission instead of their start value
  float no_permission;
  int64_t steps_to_live;  // -1: rows live for ever
};

struct TableStats {
  int64_t rows = 0, filtered = 0, admitted = 0, evicted = 0, lookups = 0, hits = 0, dropped = 0, bytes = 0;
};

// Columns of rows, each of n elements (value and slots: n * dim).
struct RowColumns {
  int64_t* frequency;
  int64_t* version;
  float* value;
  std::vector<float*> slots;
};

class Table {
 public:
  explicit Table(const TableConfig& config);

  size_t dim() const { return config_.dim; }
  const Optimizer& optimizer() const { return config_.optimizer; }

  // Number of updates applied to this table (AdamAsync's own clock).
  int64_t updates() const { return updates_.load(); }
  void set_updates(int64_t updates) { updates_.store(updates); }
  int64_t NextUpdate() { return updates_.fetch_add(1) + 1; }

  // Work on one shard's group of a batch; see ForEachGroup for `wait` and the result.
  // Read: rows to out[position * dim]; nothing changes.
  bool Read(int shard, const Item* items, size_t n, float* out, bool wait);
  // Train: counts the keys, admits them, makes rows; then reads.
  bool Train(int shard, const Item* items, size_t n, float* out, bool wait);
  // Apply: sums gradients[position * dim] of equal keys, then updates each row once. Keys without permission are
  // dropped; without a filter, a missing row is made first.
  bool Apply(int shard, const Item* items, size_t n, const float* gradients, const StepArgs& args, int64_t step,
             bool wait);

  void Upsert(const KeySpan& keys, const float* values);
  // Removes rows and counts; returns how many keys were there.
  size_t Erase(const KeySpan& keys);
  // Removes what the eviction policy names; returns the keys, sorted by bucket.
  std::vector<int64_t> Evict(int64_t step);
  void Clear();

  // Keys with a row, and keys that are only counted (with their counts): one consistent view for each shard, sorted
  // by bucket.
  void Keys(std::vector<int64_t>* rows, std::vector<int64_t>* filtered, std::vector<int64_t>* counts);
  // Copies rows; present[i] is 0 (and the columns are untouched) where key i has no row.
  void Export(const KeySpan& keys, uint8_t* present, const RowColumns& columns);
  // Makes or overwrites rows.
  void Import(const KeySpan& keys, const RowColumns& columns);
  // Sets the counts of keys without a row; those that pass the filter in force stay counted until their next
  // occurrence.
  void ImportFiltered(const KeySpan& keys);

  TableStats Stats() const;

 private:
  struct alignas(64) Shard {
    explicit Shard(const RowLayout& layout) : rows(layout) {}
    mutable std::shared_mutex mutex;
    Index index;
    RowSlabs rows;
    int64_t filtered = 0, admitted = 0, evicted = 0, dropped = 0;
    std::atomic<int64_t> lookups{0}, hits{0};
  };

  bool Admits(uint32_t frequency) const { return !config_.has_filter || frequency >= config_.filter_freq; }
  void DefaultRow(uint64_t hash, float* out) const;
  // Gives the entry (or, with null, a new one for the hash) a row with start values.
  Entry* MakeRow(Shard& shard, Entry* entry, uint64_t hash);
  void RemoveEntry(Shard& shard, Entry* entry);
  float* Value(const Shard& shard, uint32_t row) const { return reinterpret_cast<float*>(shard.rows.Cell(row)); }
  template <class Work>
  void ForEachShardOf(const KeySpan& keys, Work&& work);

  TableConfig config_;
  size_t slot_count_;
  size_t cell_bytes_;
  std::vector<std::unique_ptr<Shard>> shards_;
  std::atomic<int64_t> updates_{0};
};

// Several tables at once. All spans run in one parallel loop.
struct PullItem {
  Table* table;
  KeySpan keys;
  float* out;
};
void Pull(const std::vector<PullItem>& items, bool train);

struct PushItem {
  Table* table;
  KeySpan keys;
  const float* gradients;
};
// learning_rate NaN: each optimizer's own.
void Push(const std::vector<PushItem>& items, int64_t step, double learning_rate);

}  // namespace deeprec
