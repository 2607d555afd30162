// A lower tier that is memory to the CPU (a mapped file, persistent memory, a NUMA node): records in chunks, read where
// they lie, their places used again.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "batch.h"
#include "tier.h"

namespace deeprec {

// A record is the metadata words, then the cell, in whole words.
inline size_t RecordBytes(const RowLayout& layout) {
  return layout.meta_words * sizeof(int64_t) + (layout.cell_bytes + 7) / 8 * 8;
}
inline void WriteRecord(char* record, const RowLayout& layout, const char* cell, const int64_t* meta) {
  std::memcpy(record, meta, layout.meta_words * sizeof(int64_t));
  std::memcpy(record + layout.meta_words * sizeof(int64_t), cell, layout.cell_bytes);
}
inline RowView ViewRecord(const char* record, const RowLayout& layout) {
  return {record + layout.meta_words * sizeof(int64_t), reinterpret_cast<const int64_t*>(record)};
}

// Size of the pieces in which a shard takes space of its tier.
size_t ChunkBytes(const TierConfig& config, const std::vector<RowLayout>& classes);

[[noreturn]] void ThrowFull(const TierConfig& config);

// The bytes that one shard may take of its tier.
class Budget {
 public:
  explicit Budget(const TierConfig& config) : limit_(config.bytes / kShards) {}
  // False, and nothing taken, unless `spare` bytes are left afterwards.
  bool Reserve(uint64_t bytes, uint64_t spare = 0) {
    if (limit_ != 0 && used_ + bytes + spare > limit_) return false;
    used_ += bytes;
    return true;
  }
  void Release(uint64_t bytes) { used_ -= bytes; }
  uint64_t used() const { return used_; }

 private:
  const uint64_t limit_;
  uint64_t used_ = 0;
};

constexpr uint32_t kMaxHandles = (1u << 26) - 8;

class MappedTier : public TierStore {
 public:
  MappedTier(const TierConfig& config, const std::vector<RowLayout>& classes)
      : config_(config), budget_(config), chunk_bytes_(ChunkBytes(config, classes)) {
    for (const RowLayout& layout : classes) pools_.push_back(Pool{&layout, chunk_bytes_ / RecordBytes(layout), {}, {}});
  }
  ~MappedTier() override { Clear(); }

  uint32_t Put(uint64_t, size_t row_class, const char* cell, const int64_t* meta) override {
    Pool& pool = pools_[row_class];
    if (pool.free.empty()) AddChunk(pool);
    const uint32_t handle = pool.free.back();
    pool.free.pop_back();
    WriteRecord(Record(pool, handle), *pool.layout, cell, meta);
    ++rows_;
    return handle;
  }

  RowView View(uint64_t, size_t row_class, uint32_t handle, std::vector<int64_t>*) const override {
    const Pool& pool = pools_[row_class];
    return ViewRecord(Record(pool, handle), *pool.layout);
  }

  void Prefetch(size_t row_class, uint32_t handle) const override {
    const Pool& pool = pools_[row_class];
    const char* record = Record(pool, handle);
    for (size_t at = 0; at < RecordBytes(*pool.layout); at += 64) __builtin_prefetch(record + at);
  }

  void Erase(uint64_t, size_t row_class, uint32_t handle) override {
    pools_[row_class].free.push_back(handle);
    --rows_;
  }

  void Clear() override {
    for (Pool& pool : pools_) {
      budget_.Release(pool.chunks.size() * chunk_bytes_);
      pool.chunks.clear();
      pool.free.clear();
    }
    rows_ = 0;
  }

  bool Compact(const Moved&, bool) override { return false; }
  size_t rows() const override { return rows_; }
  size_t bytes() const override { return budget_.used(); }

 private:
  struct Pool {
    const RowLayout* layout;
    size_t per_chunk;
    std::vector<ZeroedBlock> chunks;
    std::vector<uint32_t> free;
  };

  static char* Record(const Pool& pool, uint32_t handle) {
    return pool.chunks[handle / pool.per_chunk].data() + handle % pool.per_chunk * RecordBytes(*pool.layout);
  }

  void AddChunk(Pool& pool) {
    const size_t first = pool.chunks.size() * pool.per_chunk;
    if (first + pool.per_chunk > kMaxHandles || !budget_.Reserve(chunk_bytes_)) {
      ThrowFull(config_);
    }
    try {
      pool.chunks.push_back(MakeTierBlock(config_, chunk_bytes_));
    } catch (...) {
      budget_.Release(chunk_bytes_);
      throw;
    }
    for (size_t i = pool.per_chunk; i-- > 0;) pool.free.push_back(static_cast<uint32_t>(first + i));
  }

  const TierConfig& config_;
  Budget budget_;
  const size_t chunk_bytes_;
  std::vector<Pool> pools_;
  size_t rows_ = 0;
};

}  // namespace deeprec
