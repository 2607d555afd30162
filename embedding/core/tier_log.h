// A log-structured tier for SSDs: rows are appended to segments, never changed in place; the index in memory (the
// table's) knows each row's place. A segment that is mostly dead is compacted in the background: its live rows are
// appended again, and its space goes back to the disk.
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
    for (const RowLayout& layout : classes) {
      const size_t record = sizeof(uint64_t) + RecordBytes(layout);
      logs_.push_back(Log{&layout, record, segment_bytes_ / record, {}, kNoSegment});
    }
  }
  ~LogTier() override { Clear(); }

  uint32_t Put(uint64_t hash, size_t row_class, const char* cell, const int64_t* meta) override {
    return Append(logs_[row_class], hash, cell, meta, /*reserve=*/segment_bytes_);
  }

  RowView View(uint64_t, size_t row_class, uint32_t handle, std::vector<int64_t>*) const override {
    const Log& log = logs_[row_class];
    return ViewRecord(Record(log, handle) + sizeof(uint64_t), *log.layout);
  }

  void Prefetch(size_t row_class, uint32_t handle) const override {
    const Log& log = logs_[row_class];
    const char* record = Record(log, handle);
    for (size_t at = 0; at < log.record_bytes; at += 64) __builtin_prefetch(record + at);
  }

  void Erase(uint64_t, size_t row_class, uint32_t handle) override {
    Log& log = logs_[row_class];
    Segment& segment = log.segments[handle / log.per_segment];
    segment.dead[handle % log.per_segment] = true;
    --segment.live;
    --rows_;
    if (segment.live == 0 && handle / log.per_segment != log.active) Drop(log, handle / log.per_segment);
  }

  void Clear() override {
    for (Log& log : logs_) {
      for (size_t i = 0; i < log.segments.size(); ++i) {
        if (log.segments[i].block.data() != nullptr) Drop(log, i);
      }
      log.segments.clear();
      log.active = kNoSegment;
    }
    rows_ = 0;
  }

  // One segment for each call and class: a lookup waits for no more than that.
  bool Compact(const Moved& moved, bool force) override {
    bool worked = false;
    for (size_t row_class = 0; row_class < logs_.size(); ++row_class) {
      Log& log = logs_[row_class];
      size_t worst = kNoSegment;
      for (size_t i = 0; i < log.segments.size(); ++i) {
        const Segment& segment = log.segments[i];
        if (i == log.active || segment.block.data() == nullptr || segment.live == segment.used) continue;
        if (!force && segment.live * 2 > segment.used) continue;
        if (worst == kNoSegment || segment.live < log.segments[worst].live) worst = i;
      }
      if (worst == kNoSegment) continue;
      worked = Relocate(log, row_class, worst, moved) || worked;
    }
    return worked;
  }

  bool reuses_places() const override { return false; }
  size_t rows() const override { return rows_; }
  size_t bytes() const override { return budget_.used(); }

 private:
  static constexpr size_t kNoSegment = ~size_t{0};

  struct Segment {
    ZeroedBlock block;
    size_t used = 0, live = 0;
    std::vector<bool> dead;
  };

  struct Log {
    const RowLayout* layout;
    size_t record_bytes, per_segment;
    std::vector<Segment> segments;
    size_t active;
  };

  static const char* Record(const Log& log, uint32_t handle) {
    return log.segments[handle / log.per_segment].block.data() + handle % log.per_segment * log.record_bytes;
  }

  uint32_t Append(Log& log, uint64_t hash, const char* cell, const int64_t* meta, size_t reserve) {
    if (log.active == kNoSegment || log.segments[log.active].used == log.per_segment) StartSegment(log, reserve);
    Segment& segment = log.segments[log.active];
    char* record = segment.block.data() + segment.used * log.record_bytes;
    std::memcpy(record, &hash, sizeof(hash));
    WriteRecord(record + sizeof(hash), *log.layout, cell, meta);
    segment.dead.push_back(false);
    const auto handle = static_cast<uint32_t>(log.active * log.per_segment + segment.used);
    ++segment.used;
    ++segment.live;
    ++rows_;
    return handle;
  }

  // `reserve` bytes of the tier are left for compaction, which needs space before it gives any back.
  void StartSegment(Log& log, size_t reserve) {
    size_t at = 0;
    while (at < log.segments.size() && log.segments[at].block.data() != nullptr) ++at;
    if ((at + 1) * log.per_segment > kMaxHandles || !budget_.Reserve(segment_bytes_, reserve)) {
      ThrowFull(config_);
    }
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
    if (sealed != kNoSegment && log.segments[sealed].live == 0) Drop(log, sealed);
  }

  void Drop(Log& log, size_t index) {
    log.segments[index] = Segment{};
    budget_.Release(segment_bytes_);
  }

  bool Relocate(Log& log, size_t row_class, size_t index, const Moved& moved) {
    const size_t used = log.segments[index].used;
    for (size_t i = 0; i < used; ++i) {
      if (log.segments[index].block.data() == nullptr) break;  // its last live row was moved
      if (log.segments[index].dead[i]) continue;
      const auto from = static_cast<uint32_t>(index * log.per_segment + i);
      const char* record = Record(log, from);
      uint64_t hash;
      std::memcpy(&hash, record, sizeof(hash));
      const RowView view = ViewRecord(record + sizeof(hash), *log.layout);
      uint32_t to;
      try {
        to = Append(log, hash, view.cell, view.meta, /*reserve=*/0);
      } catch (const StorageFull&) {
        return false;  // nothing is lost: the rest stays where it is
      }
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
