// One embedding table: sharded index and rows, admission, eviction, lookups and updates.
//
// Concurrency: every public function may be called from any number of threads at once. Each shard has one
// reader-writer lock; lookups without training share it (where no tier has to move rows), everything else holds it
// alone. No thread ever holds two shard locks, so there is no order to keep. A row is read and written only under its
// shard's lock: value, slots, frequency and version always belong together.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <vector>

#include "admission.h"
#include "batch.h"
#include "index.h"
#include "initializer.h"
#include "layout.h"
#include "optimizer.h"
#include "rows.h"
#include "shard_snapshot.h"
#include "tier.h"

namespace deeprec {

// Version of a row that has never been updated.
constexpr int64_t kNeverUpdated = -1;

// A row goes when any rule says so.
struct EvictionConfig {
  int64_t steps_to_live = -1;    // -1: off
  int64_t seconds_to_live = -1;  // -1: off
  double l2_threshold = 0;       // 0: off
  bool any() const { return steps_to_live >= 0 || seconds_to_live >= 0 || l2_threshold > 0; }
};

// How a row's dimension grows, in blocks: the first block at once, block k + 1 when the frequency reaches
// thresholds[k - 1]. By rank, the table finds the thresholds itself from decayed frequencies.
struct BlockConfig {
  size_t blocks = 1;
  std::vector<uint32_t> thresholds;
  bool by_rank = false;
  double rank_base = 2;
  double decay = 0.9;
};

struct TableConfig {
  size_t dim;
  ValueType value_type = ValueType::kFloat32;
  Optimizer optimizer;
  Initializer initializer;
  AdmissionConfig admission;
  float no_permission = 0;
  EvictionConfig eviction;
  BlockConfig block;
  std::vector<TierConfig> tiers;  // the first holds what is computed on; empty is memory without limit
  bool lru = false;               // which rows leave the first tier; otherwise the least frequent
  std::string name;               // for errors
};

struct TierStats {
  std::string kind;
  int64_t rows = 0, bytes = 0;
};

struct TableStats {
  int64_t rows = 0, admitted = 0, evicted = 0, lookups = 0, hits = 0, dropped = 0, bytes = 0;
  // Keys that are counted and have no row; estimated for the Bloom filter. The probability filter counts no keys: the
  // occurrences that it did not admit.
  int64_t filtered = 0;
  int64_t promoted = 0, demoted = 0;
  std::vector<TierStats> tiers;
  std::string background_error;  // the last one of moving rows ahead of need; empty if the last try went well
};

// What a row is wanted for: its value, a change, or a copy of everything.
enum class RowUse { kLookup, kUpdate, kCopy };

// Columns of rows, each of n elements; value n * dim, slots n * width. Null columns are left out.
struct RowColumns {
  int64_t* frequency = nullptr;
  int64_t* version = nullptr;
  int64_t* time = nullptr;    // of the last update, seconds
  int64_t* blocks = nullptr;  // of the row's dimension
  // By rank: the decayed frequency (float bits) above the frequency that it has taken in, as of that many refreshes.
  int64_t* rank = nullptr;
  int64_t* rank_refresh = nullptr;
  float* value = nullptr;
  std::vector<float*> slots;
};

class Table {
 public:
  explicit Table(const TableConfig& config);
  ~Table();

  size_t dim() const { return config_.dim; }
  const Optimizer& optimizer() const { return config_.optimizer; }
  size_t slot_width(size_t slot) const { return classes_.back().slot_widths[slot]; }
  bool has_time() const { return config_.eviction.seconds_to_live >= 0; }
  bool has_blocks() const { return config_.block.blocks > 1; }
  bool has_ranks() const { return config_.block.by_rank; }
  CountingBloom* bloom() { return bloom_.get(); }
  // Copies a bucket's Bloom counters out of or into the table.
  void CopyBloom(int bucket, char* counters, bool in);

  // Number of updates applied to this table (AdamAsync's own clock), and of training lookups (the probability
  // filter's).
  int64_t updates() const { return updates_.load(); }
  void set_updates(int64_t updates) { updates_.store(updates); }
  int64_t NextUpdate() { return updates_.fetch_add(1) + 1; }
  int64_t calls() const { return calls_.load(); }
  void set_calls(int64_t calls) { calls_.store(calls); }
  int64_t NextCall() { return calls_.fetch_add(1) + 1; }

  // Work on one shard's group of a batch; see ForEachGroup for `wait` and the result.
  // Read: rows to out[position * dim]; nothing changes but the tier of rows.
  bool Read(int shard, const Item* items, size_t n, float* out, bool wait);
  // Train: counts the keys, admits them, makes rows; then reads.
  bool Train(int shard, const Item* items, size_t n, int64_t call, float* out, bool wait);
  // Apply: sums gradients[position * dim] of equal keys, then updates each row once. Keys without permission are
  // dropped; without a filter, a missing row is made first.
  bool Apply(int shard, const Item* items, size_t n, const float* gradients, const StepArgs& args, int64_t step,
             int64_t now, bool wait);

  // Sets values, with every block of the dimension; makes missing rows.
  void Upsert(const KeySpan& keys, const float* values);
  // Removes rows and counts; returns how many keys were there.
  size_t Erase(const KeySpan& keys);
  // Removes what the eviction rules name; returns the keys, sorted by bucket.
  std::vector<int64_t> Evict(int64_t step, int64_t now);
  void Clear();
  // By rank: takes in the occurrences since the last call and finds new thresholds.
  void RefreshRanks();
  // How often ranks were refreshed, and the thresholds that the last time gave.
  void Ranks(int64_t* refreshes, std::vector<uint64_t>* thresholds);
  // After an import: sets them. Without thresholds, they are found as the last refresh would have from the rows that
  // are here.
  void SetRanks(int64_t refreshes, const std::vector<uint64_t>& thresholds);
  // What the table holds now counts as saved: only later changes and removals are in the next snapshot of changes.
  // Throws std::runtime_error while a snapshot is running.
  void MarkSaved();

  // Moves rows down until every tier has some room, and compacts logs; the background thread's work. Returns whether
  // anything was done; throws the first error of a shard after all had their turn.
  bool Maintain();
  // The same; an error is kept for the statistics. It loses nothing, and whoever needs the room meets it in its own
  // call.
  bool MaintainInBackground();

  // Keys with a row, and keys that are only counted (with their counts): one consistent view for each shard, sorted
  // by bucket.
  void Keys(std::vector<int64_t>* rows, std::vector<int64_t>* filtered, std::vector<int64_t>* counts);
  // Copies rows; present[i] is 0 (and the columns are untouched) where key i has no row.
  void Export(const KeySpan& keys, uint8_t* present, const RowColumns& columns);
  // Makes room in the index for `rows` in all, evenly spread over the shards.
  void Reserve(size_t rows);
  // Makes or overwrites rows.
  void Import(const KeySpan& keys, const RowColumns& columns);
  // Sets the counts of keys without a row; those that pass the filter in force stay counted until their next
  // occurrence.
  void ImportFiltered(const KeySpan& keys);

  TableStats Stats() const;

 private:
  friend class Snapshot;

  struct alignas(64) Shard {
    mutable std::shared_mutex mutex;
    Index index;
    std::vector<RowSlabs> slabs;  // of the first tier, by class
    std::vector<std::unique_ptr<TierStore>> lower;
    ShardSnapshot snapshot;
    // Keys removed since the last snapshot, while changes are tracked; with repeats, and some may be back.
    std::vector<uint64_t> tombstones;
    bool tombstones_lost = false;  // there were too many to keep: the next snapshot must be full
    // Keys that were marked as changed since the last snapshot, unless they became too many: then the next one looks
    // for them in the index. Some may be gone, or listed again when they came back.
    std::vector<uint64_t> changed;
    bool changed_known = false;
    int64_t filtered = 0, admitted = 0, evicted = 0, dropped = 0, promoted = 0, demoted = 0;
    int64_t refused = 0;          // occurrences that the probability filter did not admit
    int64_t clock = 0;            // of accesses, for LRU
    uint32_t no_room = 0;         // for that many moves up, no room is looked for: there was none
    uint32_t cold_frequency = 0;  // LFU: rows that frequent were moved down last
    std::atomic<int64_t> lookups{0}, hits{0};
    uint64_t writes = 0;  // changes of the files of lower tiers
    int64_t rank_refreshes = 0;
    bool ranks_behind = false;  // some rows have not taken in the last refresh, see CatchUp
    size_t number = 0;

    // Bytes of the first tier's rows, and of all cells that it holds for rows.
    size_t FirstTierBytes() const;
    size_t HeldBytes() const;
  };

  // Where a row is: its tier, its class (blocks - 1) and its place there, packed into an entry's state.
  struct Address {
    uint32_t tier, row_class, place;
  };
  static constexpr uint32_t kMaxPlace = (1u << 26) - 8, kNoPlace = ~0u;
  static uint32_t Pack(uint32_t tier, size_t row_class, uint32_t place) {
    return kFirstRow + (tier << 30 | static_cast<uint32_t>(row_class) << 26 | place);
  }
  static Address Unpack(uint32_t state) {
    const uint32_t packed = state - kFirstRow;
    return {packed >> 30, packed >> 26 & 15, packed & ((1u << 26) - 1)};
  }

  // A row in the first tier.
  struct Row {
    char* cell;
    int64_t* meta;
    const RowLayout* layout;
    float* slot(size_t index) const { return reinterpret_cast<float*>(cell) + layout->slot_offsets[index]; }
  };

  bool Inherited() const { return files_ && generation_ != ForkGeneration(); }
  // Throws std::runtime_error in a forked child of a table with files.
  void RequireOwner() const;
  void RequireUnchanged(const Shard& shard) const;
  // Before anything of a shard is changed, and before a file of a lower tier is.
  void Mutating(Shard& shard);
  void Wrote(Shard& shard);
  // Asks for compaction in the background if that would give much space back.
  void RequestCompaction(const Shard& shard);

  template <class Work>
  void ForEachShardOf(const KeySpan& keys, Work&& work);
  // Runs the work; names the table in its StorageFull.
  template <class Work>
  auto Named(Work&& work) const;

  void DefaultRow(uint64_t hash, float* out) const;
  void FillStart(uint64_t hash, const Row& row, size_t begin) const;
  void ReadValue(const RowLayout& layout, const char* cell, float* out) const;
  void WriteValue(const Row& row, const float* value) const;
  void Update(const Row& row, uint64_t hash, const float* gradient, const StepArgs& args, int64_t step, int64_t now,
              float* scratch) const;

  // Gives the entry (or, with null, a new one for the hash) a row with start values (or garbage, to be overwritten).
  Entry* MakeRow(Shard& shard, Entry* entry, uint64_t hash, size_t row_class, bool fill = true);
  uint32_t AllocateTop(Shard& shard, size_t row_class);
  void FreeRow(Shard& shard, const Entry& entry);
  void RemoveEntry(Shard& shard, Entry* entry);
  // Before anything of an entry changes, its row or its count: marks it, and copies what a running snapshot has not
  // read yet. The same for the Bloom counters of a bucket.
  void Changing(Shard& shard, Entry* entry);
  void MarkChanged(Shard& shard, Entry* entry);
  static void ListChanged(Shard& shard, uint64_t hash);
  static Entry* Insert(Shard& shard, uint64_t hash);
  void Preserve(Shard& shard, const Entry& entry);
  void BloomChanging(Shard& shard, int bucket);
  void PreserveBloom(Shard& shard, int bucket);
  static void AddTombstone(Shard& shard, uint64_t hash);
  // Fills element `to` of the columns.
  void FillColumns(const RowView& view, size_t row_class, uint32_t frequency, size_t to,
                   const RowColumns& columns) const;
  Row TopRow(const Shard& shard, const Entry& entry) const;
  // Moves the row to the first tier if need be; false if there is no room for it.
  bool Promote(Shard& shard, Entry* entry);
  // The place in the first tier of a colder row of the class, which goes where this row is; kNoPlace if there is none.
  uint32_t Exchange(Shard& shard, const Entry& entry);
  // Works on the row in the first tier, or where it is if there is no room. Throws StorageFull, the row as it was.
  template <class Work>
  void Edit(Shard& shard, Entry* entry, Work&& work);
  template <class Work>
  void EditInPlace(Shard& shard, const Entry& entry, Work&& work);
  // The row for reading: moved up if it deserves a place above, otherwise where it is.
  RowView ViewRow(Shard& shard, Entry* entry, std::vector<int64_t>* scratch);
  RowView Peek(const Shard& shard, const Entry& entry, std::vector<int64_t>* scratch) const;
  // Hints that the first `bytes` of the row, and its metadata where the use has to do with them, are used soon.
  template <RowUse kUse>
  void PrefetchRow(const Shard& shard, const Entry& entry, size_t bytes) const;
  void Touch(Shard& shard, int64_t* meta);

  // Counts occurrences (`draws` of them are the probability filter's); the entry then has a row, or null or an entry
  // without one is returned.
  Entry* Count(Shard& shard, Entry* entry, const Item& item, uint32_t draws, int64_t call);
  const uint32_t* Draws(const Item* items, size_t n) const;
  size_t WantedClass(const Entry& entry, const int64_t* meta) const;
  // By rank. A refresh changes a row's rank words in a way that follows from the words, the row's frequency and the
  // number of refreshes. So it may pass a row over, and it marks none as changed: the row takes in what it missed
  // before its frequency changes, wherever it was meanwhile, also in a checkpoint.
  uint64_t RankAfter(const int64_t* meta, uint32_t frequency, int64_t refreshes) const;
  void SetRank(int64_t* meta, uint64_t packed, int64_t refreshes) const;
  void CatchUp(Shard& shard, const Entry& entry);
  void FindThresholds(bool refresh);
  float RankCorrection() const;
  // Gives the row the blocks that its frequency deserves, or those of a class; what it learned stays.
  void Grow(Shard& shard, Entry* entry);
  void GrowTo(Shard& shard, Entry* entry, size_t wanted);

  // Makes sure that one more row of the class keeps the first tier within its limit.
  void MakeRoom(Shard& shard, size_t row_class);
  // Moves rows of that many bytes one tier down, or fewer if there is no more room below; returns the bytes. Throws
  // StorageFull if none could go.
  size_t Demote(Shard& shard, uint32_t tier, size_t bytes);
  uint32_t PutBelow(Shard& shard, uint32_t tier, const Entry& entry);
  // Keeps an error that no caller can be told for the statistics.
  void Note(const std::exception& error);
  // Moves the rows of the other classes together, so that the memory of their free cells serves this one.
  void Squeeze(Shard& shard, size_t row_class);
  bool OverHighWater(const Shard& shard) const;
  // Keeps the index right while a lower tier compacts.
  static TierStore::Moved Relocator(Shard& shard, uint32_t tier);
  // Gives a row a new cell of a class in the first tier, not filled, for its old one.
  void MoveToClass(Shard& shard, Entry* entry, size_t row_class);

  template <bool kTrain>
  void LookupSimple(Shard& shard, const Item* items, size_t n, int64_t call, float* out);
  template <bool kTrain>
  void LookupGeneral(Shard& shard, const Item* items, size_t n, int64_t call, float* out);

  TableConfig config_;
  size_t slot_count_;
  std::vector<RowLayout> classes_;
  bool simple_;  // one class of float rows in memory: pointers to rows stay valid within a group
  bool filters_;
  bool tiered_ = false;
  bool files_ = false;  // some tier is in files
  std::vector<std::string> kinds_;
  // A forked child has the index and the memory of the moment of the fork, and the files of now. It may read as long as
  // its parent has not changed them, which the parent counts here, by shard, where the child sees it.
  const unsigned generation_ = ForkGeneration();
  std::shared_ptr<std::atomic<uint64_t>[]> shared_writes_;
  // Metadata words, -1 where not kept; the rank's is followed by the refresh that it is of.
  int time_word_ = -1, rank_word_ = -1, access_word_ = -1;
  size_t shard_limit_ = 0;  // bytes of the first tier for each shard; 0 is none
  std::unique_ptr<CountingBloom> bloom_;
  std::vector<std::unique_ptr<Shard>> shards_;
  std::atomic<int64_t> updates_{0}, calls_{0};
  std::atomic<bool> tracks_{false};    // removals, since the first snapshot
  std::atomic<bool> snapshot_{false};  // one is running
  mutable std::mutex error_mutex_;
  std::string background_error_;
  // By rank: thresholds of the decayed frequency for blocks 2, 3, ..., and 1 - decay^t.
  std::mutex rank_mutex_;
  std::vector<std::atomic<uint64_t>> rank_thresholds_;  // see RankOf
  std::atomic<float> rank_correction_{1};
  int64_t rank_refreshes_ = 0;
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
// learning_rate NaN: each optimizer's own. `now` in seconds, for eviction by time.
void Push(const std::vector<PushItem>& items, int64_t step, double learning_rate, int64_t now = 0);

}  // namespace deeprec
