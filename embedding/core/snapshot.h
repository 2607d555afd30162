// A snapshot of a table: its rows, counts and filter as of one moment, read while training goes on.
//
// Beginning marks what belongs to the snapshot and copies nothing. Whatever then changes or removes a marked row
// copies it first, under the lock of its shard; reading a row clears its mark. So every row is as of the moment when
// the snapshot passed its shard, and none is copied twice.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "bucket_order.h"
#include "table.h"

namespace deeprec {

class Snapshot {
 public:
  // Of everything, or of what changed since the last one (or since MarkSaved, or the beginning). Throws
  // std::runtime_error if one is running already, std::invalid_argument if a snapshot of changes cannot be had because
  // the table was cleared or too much was removed.
  Snapshot(Table* table, bool changed_only);
  Snapshot(const Snapshot&) = delete;
  Snapshot& operator=(const Snapshot&) = delete;
  ~Snapshot() { Close(); }

  Table& table() const { return *table_; }
  int64_t updates() const { return updates_; }
  int64_t calls() const { return calls_; }
  int64_t rank_refreshes() const { return rank_refreshes_; }
  const std::vector<uint64_t>& rank_thresholds() const { return rank_thresholds_; }
  size_t num_rows() const { return num_rows_; }
  size_t num_filtered() const { return num_filtered_; }

  // Everything below throws std::runtime_error after Close.

  // Reads the rows [begin, begin + n) in the order of buckets; each row once. Several threads may read parts at once.
  void Read(size_t begin, size_t n, int64_t* keys, const RowColumns& columns);
  // Keys that were only counted, and their counts, sorted by bucket.
  void Filtered(std::vector<int64_t>* keys, std::vector<int64_t>* counts);
  // Keys removed since the last snapshot that have no row in this one, sorted by bucket; only of changes.
  std::vector<int64_t> Tombstones();
  // The Bloom counters of a bucket.
  void Bloom(int bucket, char* counters);
  // Rows that are held as copies now.
  size_t Copied() const;

  // Frees what is left. Unless all rows, counts and tombstones were read, all that belongs to the snapshot counts as
  // changed again, and its removals as unsaved.
  void Close();

 private:
  void Begin(size_t shard);
  void BeginListed(size_t shard);
  void Collect();
  void ReadPiece(size_t begin, size_t end, size_t first, int64_t* keys, const RowColumns& columns);
  void Undo(size_t shard);
  void RequireOpen() const;

  Table* const table_;
  const bool changed_only_;
  int64_t updates_ = 0, calls_ = 0, rank_refreshes_ = 0;
  std::vector<uint64_t> rank_thresholds_;
  std::atomic<size_t> num_rows_{0}, num_filtered_{0}, rows_read_{0};
  std::vector<std::vector<uint64_t>> tombstones_;  // by shard, as the table kept them
  std::vector<char> tombstones_lost_;
  // By shard: rows and counts, in no order; of a shard whose changes were listed from the beginning, else by Collect.
  std::vector<std::vector<uint64_t>> row_parts_;
  std::vector<std::vector<HashedCount>> filtered_parts_;
  std::vector<char> listed_;
  mutable std::shared_mutex mutex_;  // Close against everything else
  bool open_ = true;
  std::once_flag collected_once_;
  bool collected_ = false;
  std::atomic<bool> filtered_read_{false}, tombstones_read_{false};
  std::vector<uint64_t> rows_;
  std::vector<HashedCount> filtered_;
};

}  // namespace deeprec
