// A lower tier that is memory to the CPU (a mapped file, persistent memory, a NUMA node): records in chunks, read where
// they lie, their places used again.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "batch.h"
#include "tier.h"

namespace deeprec {

// A record in one piece: the metadata words, then the cell, in whole words.
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

// A chunk of rows: aligned cells, then a column of metadata with `extra` words for each row, as in the first tier's
// slabs; reading a value touches no more lines than it has to.
struct ChunkLayout {
  ChunkLayout(const RowLayout& layout, size_t chunk_bytes, size_t extra_words)
      : row(&layout),
        stride(layout.stride),
        words(layout.meta_words + extra_words),
        rows(static_cast<uint32_t>(chunk_bytes / (stride + words * sizeof(int64_t)))) {}
  char* Cell(const ZeroedBlock& chunk, uint32_t at) const { return chunk.data() + at * stride; }
  int64_t* Meta(const ZeroedBlock& chunk, uint32_t at) const {
    const size_t column = (rows * stride + 7) / 8 * 8;
    return reinterpret_cast<int64_t*>(chunk.data() + column) + at * words;
  }
  void Write(const ZeroedBlock& chunk, uint32_t at, const char* cell, const int64_t* meta) const {
    std::memcpy(Cell(chunk, at), cell, row->cell_bytes);
    std::memcpy(Meta(chunk, at), meta, row->meta_words * sizeof(int64_t));
  }

  const RowLayout* row;
  size_t stride, words;
  uint32_t rows;  // 32 bits: dividing by it is on the way to every row
};

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

// A place belongs to the rows of one class; where there are several and the tier is full, Compact empties chunks of
// each, so that another class can have them.
class MappedTier : public TierStore {
 public:
  MappedTier(const TierConfig& config, const std::vector<RowLayout>& classes)
      : config_(config), budget_(config), chunk_bytes_(ChunkBytes(config, classes)) {
    // With several classes, one more word for each row: its hash, by which compaction finds it in the index.
    const size_t words = classes.size() > 1 ? 1 : 0;
    for (const RowLayout& layout : classes) {
      pools_.push_back(Pool{ChunkLayout(layout, chunk_bytes_ - 8, words), {}, {}});
    }
  }
  ~MappedTier() override { Clear(); }

  uint32_t Put(uint64_t hash, size_t row_class, const char* cell, const int64_t* meta) override {
    Pool& pool = pools_[row_class];
    if (pool.free.empty()) AddChunk(pool);
    ++rows_;
    return Write(pool, hash, cell, meta);
  }

  RowView View(uint64_t, size_t row_class, uint32_t handle, std::vector<int64_t>*) const override {
    const Pool& pool = pools_[row_class];
    const ZeroedBlock& chunk = pool.chunks[handle / pool.layout.rows].block;
    const uint32_t at = handle % pool.layout.rows;
    return {pool.layout.Cell(chunk, at), pool.layout.Meta(chunk, at)};
  }

  void Prefetch(size_t row_class, uint32_t handle, size_t bytes) const override {
    const Pool& pool = pools_[row_class];
    const char* cell = pool.layout.Cell(pool.chunks[handle / pool.layout.rows].block, handle % pool.layout.rows);
    for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(cell + at);
  }

  void Erase(uint64_t, size_t row_class, uint32_t handle) override {
    Pool& pool = pools_[row_class];
    Chunk& chunk = pool.chunks[handle / pool.layout.rows];
    chunk.used[handle % pool.layout.rows] = false;
    --chunk.live;
    pool.free.push_back(handle);
    --rows_;
  }

  void Change(uint64_t, size_t row_class, uint32_t handle, const Writer& change) override {
    const Pool& pool = pools_[row_class];
    const ZeroedBlock& chunk = pool.chunks[handle / pool.layout.rows].block;
    const uint32_t at = handle % pool.layout.rows;
    change(pool.layout.Cell(chunk, at), pool.layout.Meta(chunk, at));
  }

  uint32_t Replace(uint64_t, size_t row_class, uint32_t handle, uint64_t other, const char* cell,
                   const int64_t* meta) override {
    Overwrite(pools_[row_class], handle, other, cell, meta);
    return handle;
  }

  void Clear() override {
    budget_.Release(budget_.used());
    for (Pool& pool : pools_) {
      pool.chunks.clear();
      pool.free.clear();
    }
    rows_ = 0;
  }

  // In each class, at most one chunk is moved into free places of others, and chunks without rows are given back.
  bool Compact(const Moved& moved, bool force) override {
    if (!force || pools_.size() == 1) return false;
    bool released = false;
    for (size_t row_class = 0; row_class < pools_.size(); ++row_class) {
      Pool& pool = pools_[row_class];
      Chunk* sparsest = nullptr;
      for (Chunk& chunk : pool.chunks) {
        if (chunk.block.data() != nullptr && (sparsest == nullptr || chunk.live < sparsest->live)) sparsest = &chunk;
      }
      if (sparsest == nullptr || pool.free.size() < pool.layout.rows) continue;
      const auto index = static_cast<uint32_t>(sparsest - pool.chunks.data());
      const auto inside = [&](uint32_t handle) { return handle / pool.layout.rows == index; };
      pool.free.erase(std::remove_if(pool.free.begin(), pool.free.end(), inside), pool.free.end());
      for (uint32_t at = 0; at < pool.layout.rows; ++at) {
        if (!sparsest->used[at]) continue;
        const int64_t* meta = pool.layout.Meta(sparsest->block, at);
        uint64_t hash;
        std::memcpy(&hash, meta + pool.layout.row->meta_words, sizeof(hash));
        moved(hash, row_class, index * pool.layout.rows + at,
              Write(pool, hash, pool.layout.Cell(sparsest->block, at), meta));
      }
      *sparsest = Chunk{};
      budget_.Release(chunk_bytes_);
      released = true;
    }
    return released;
  }

  size_t rows() const override { return rows_; }
  size_t bytes() const override { return budget_.used(); }

 private:
  struct Chunk {
    ZeroedBlock block;
    uint32_t live = 0;
    std::vector<bool> used;
  };

  struct Pool {
    ChunkLayout layout;
    std::vector<Chunk> chunks;
    std::vector<uint32_t> free;
  };

  // Into a free place.
  uint32_t Write(Pool& pool, uint64_t hash, const char* cell, const int64_t* meta) {
    const uint32_t handle = pool.free.back();
    pool.free.pop_back();
    Overwrite(pool, handle, hash, cell, meta);
    Chunk& chunk = pool.chunks[handle / pool.layout.rows];
    chunk.used[handle % pool.layout.rows] = true;
    ++chunk.live;
    return handle;
  }

  void Overwrite(const Pool& pool, uint32_t handle, uint64_t hash, const char* cell, const int64_t* meta) {
    const ZeroedBlock& block = pool.chunks[handle / pool.layout.rows].block;
    const uint32_t at = handle % pool.layout.rows;
    pool.layout.Write(block, at, cell, meta);
    if (pools_.size() > 1) {
      std::memcpy(pool.layout.Meta(block, at) + pool.layout.row->meta_words, &hash, sizeof(hash));
    }
  }

  void AddChunk(Pool& pool) {
    size_t index = 0;
    while (index < pool.chunks.size() && pool.chunks[index].block.data() != nullptr) ++index;
    const size_t first = index * pool.layout.rows;
    if (first + pool.layout.rows > kMaxHandles || !budget_.Reserve(chunk_bytes_)) ThrowFull(config_);
    try {
      ZeroedBlock block = MakeTierBlock(config_, chunk_bytes_);
      if (index == pool.chunks.size()) pool.chunks.emplace_back();
      pool.chunks[index] = Chunk{std::move(block), 0, std::vector<bool>(pool.layout.rows)};
    } catch (...) {
      budget_.Release(chunk_bytes_);
      throw;
    }
    for (uint32_t i = pool.layout.rows; i-- > 0;) pool.free.push_back(static_cast<uint32_t>(first) + i);
  }

  const TierConfig& config_;
  Budget budget_;
  const size_t chunk_bytes_;
  std::vector<Pool> pools_;
  size_t rows_ = 0;
};

}  // namespace deeprec
