// What the lower tiers share: limits, records, sizes of chunks.
#pragma once

#include <cstring>
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

// A chunk of rows: aligned cells, then a column of metadata with a word more for each row, its hash, as in the first
// tier's slabs; reading a value touches no more lines than it has to.
struct ChunkLayout {
  ChunkLayout(const RowLayout& layout, size_t chunk_bytes)
      : row(&layout),
        stride(layout.stride),
        words(layout.meta_words + 1),
        rows(static_cast<uint32_t>((chunk_bytes - 8) / (stride + words * sizeof(int64_t)))) {}
  char* Cell(char* chunk, uint32_t at) const { return chunk + at * stride; }
  int64_t* Meta(char* chunk, uint32_t at) const {
    const size_t column = (rows * stride + 7) / 8 * 8;
    return reinterpret_cast<int64_t*>(chunk + column) + at * words;
  }
  uint64_t Hash(char* chunk, uint32_t at) const {
    uint64_t hash;
    std::memcpy(&hash, Meta(chunk, at) + row->meta_words, sizeof(hash));
    return hash;
  }
  void Write(char* chunk, uint32_t at, uint64_t hash, const char* cell, const int64_t* meta) const {
    std::memcpy(Cell(chunk, at), cell, row->cell_bytes);
    int64_t* words_of_row = Meta(chunk, at);
    std::memcpy(words_of_row, meta, row->meta_words * sizeof(int64_t));
    std::memcpy(words_of_row + row->meta_words, &hash, sizeof(hash));
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

}  // namespace deeprec
