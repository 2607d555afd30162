// A log-structured tier for SSDs: rows are appended to segments; only where there is no room for that, they are changed
// in place. The index in memory (the table's) knows each row's place. A segment that is mostly dead is compacted in the
// background: its live rows are appended again, and its space goes back to the disk.
//
// Segments are mapped files whose space was reserved beforehand, so appending cannot meet a full disk half-way; the
// kernel writes them out in order, and pages that are not read leave memory on demand.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "tier.h"
#include "tier_mapped.h"

namespace deeprec {

class LogTier : public TierStore {
 public:
  LogTier(const TierConfig& config, const std::vector<RowLayout>& classes)
      : config_(config), budget_(config), segment_bytes_(ChunkBytes(config, classes)) {
    // One more word for each row: its hash, by which compaction finds it in the index.
    for (const RowLayout& layout : classes) logs_.push_back(Log{ChunkLayout(layout, segment_bytes_ - 8, 1), {}, kNone});
  }
  ~LogTier() override { Clear(); }

  uint32_t Put(uint64_t hash, size_t row_class, const char* cell, const int64_t* meta) override {
    return Append(logs_[row_class], hash, cell, meta, /*reserve=*/segment_bytes_);
  }

  RowView View(uint64_t, size_t row_class, uint32_t handle, std::vector<int64_t>*) const override {
    const Log& log = logs_[row_class];
    const ZeroedBlock& block = log.segments[handle / log.layout.rows].block;
    const uint32_t at = handle % log.layout.rows;
    return {log.layout.Cell(block, at), log.layout.Meta(block, at)};
  }

  void Prefetch(size_t row_class, uint32_t handle, size_t bytes) const override {
    const Log& log = logs_[row_class];
    const char* cell = log.layout.Cell(log.segments[handle / log.layout.rows].block, handle % log.layout.rows);
    for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(cell + at);
  }

  void Erase(uint64_t, size_t row_class, uint32_t handle) override {
    Log& log = logs_[row_class];
    const size_t index = handle / log.layout.rows;
    Segment& segment = log.segments[index];
    segment.dead[handle % log.layout.rows] = true;
    --segment.live;
    --rows_;
    if (segment.live == 0 && index != log.active) Drop(log, index);
  }

  void Change(uint64_t, size_t row_class, uint32_t handle, const Writer& change) override {
    const Log& log = logs_[row_class];
    const ZeroedBlock& block = log.segments[handle / log.layout.rows].block;
    const uint32_t at = handle % log.layout.rows;
    change(log.layout.Cell(block, at), log.layout.Meta(block, at));
  }

  uint32_t Replace(uint64_t, size_t row_class, uint32_t handle, uint64_t other, const char* cell,
                   const int64_t* meta) override {
    const Log& log = logs_[row_class];
    const ZeroedBlock& block = log.segments[handle / log.layout.rows].block;
    const uint32_t at = handle % log.layout.rows;
    log.layout.Write(block, at, cell, meta);
    std::memcpy(log.layout.Meta(block, at) + log.layout.row->meta_words, &other, sizeof(other));
    return handle;
  }

  void Clear() override {
    for (Log& log : logs_) {
      for (size_t i = 0; i < log.segments.size(); ++i) {
        if (log.segments[i].block.data() != nullptr) Drop(log, i);
      }
      log.segments.clear();
      log.active = kNone;
    }
    rows_ = 0;
  }

  // One segment for each call and class: a lookup waits for no more than that.
  bool Compact(const Moved& moved, bool force) override {
    bool worked = false;
    for (size_t row_class = 0; row_class < logs_.size(); ++row_class) {
      Log& log = logs_[row_class];
      size_t worst = kNone;
      for (size_t i = 0; i < log.segments.size(); ++i) {
        const Segment& segment = log.segments[i];
        if (i == log.active || segment.block.data() == nullptr || segment.live == segment.used) continue;
        if (!force && segment.live * 2 > segment.used) continue;
        if (worst == kNone || segment.live < log.segments[worst].live) worst = i;
      }
      if (worst != kNone) worked = Relocate(log, row_class, worst, moved) || worked;
    }
    return worked;
  }

  size_t rows() const override { return rows_; }
  size_t bytes() const override { return budget_.used(); }

 private:
  static constexpr size_t kNone = ~size_t{0};

  struct Segment {
    ZeroedBlock block;
    uint32_t used = 0, live = 0;
    std::vector<bool> dead;
  };

  struct Log {
    ChunkLayout layout;
    std::vector<Segment> segments;
    size_t active;
  };

  uint32_t Append(Log& log, uint64_t hash, const char* cell, const int64_t* meta, size_t reserve) {
    if (log.active == kNone || log.segments[log.active].used == log.layout.rows) StartSegment(log, reserve);
    Segment& segment = log.segments[log.active];
    log.layout.Write(segment.block, segment.used, cell, meta);
    std::memcpy(log.layout.Meta(segment.block, segment.used) + log.layout.row->meta_words, &hash, sizeof(hash));
    segment.dead.push_back(false);
    ++segment.live;
    ++rows_;
    return static_cast<uint32_t>(log.active * log.layout.rows + segment.used++);
  }

  // `reserve` bytes of the tier are left for compaction, which needs space before it gives any back.
  void StartSegment(Log& log, size_t reserve) {
    size_t at = 0;
    while (at < log.segments.size() && log.segments[at].block.data() != nullptr) ++at;
    if ((at + 1) * log.layout.rows > kMaxHandles || !budget_.Reserve(segment_bytes_, reserve)) ThrowFull(config_);
    try {
      ZeroedBlock block = MakeTierBlock(config_, segment_bytes_);
      if (at == log.segments.size()) log.segments.emplace_back();
      log.segments[at] = Segment{std::move(block), 0, 0, {}};
    } catch (...) {
      budget_.Release(segment_bytes_);
      throw;
    }
    const size_t sealed = log.active;
    log.active = at;
    if (sealed != kNone && log.segments[sealed].live == 0) Drop(log, sealed);
  }

  void Drop(Log& log, size_t index) {
    log.segments[index] = Segment{};
    budget_.Release(segment_bytes_);
  }

  bool Relocate(Log& log, size_t row_class, size_t index, const Moved& moved) {
    const uint32_t used = log.segments[index].used;
    for (uint32_t i = 0; i < used; ++i) {
      const ZeroedBlock& block = log.segments[index].block;
      if (block.data() == nullptr) break;  // its last live row was moved
      if (log.segments[index].dead[i]) continue;
      const char* cell = log.layout.Cell(block, i);
      const int64_t* meta = log.layout.Meta(block, i);
      uint64_t hash;
      std::memcpy(&hash, meta + log.layout.row->meta_words, sizeof(hash));
      uint32_t to;
      try {
        to = Append(log, hash, cell, meta, /*reserve=*/0);
      } catch (const StorageFull&) {
        return false;  // nothing is lost: the rest stays where it is
      }
      const auto from = static_cast<uint32_t>(index * log.layout.rows + i);
      moved(hash, row_class, from, to);
      Erase(hash, row_class, from);
    }
    return true;
  }

  const TierConfig& config_;
  Budget budget_;
  const size_t segment_bytes_;
  std::vector<Log> logs_;
  size_t rows_ = 0;
};

}  // namespace deeprec
