// The rows of one shard: slabs of fixed-size cells. A cell is a row's single allocation: its value, every optimizer
// slot, and (in a column of the same slab) its version. Cells never move; freed ones are used again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "memory.h"

namespace deeprec {

// Where the parts of a cell lie, in bytes. Shared by all shards of a table.
struct RowLayout {
  size_t stride = 0;    // of one cell, metadata aside
  int first_shift = 0;  // log2 of the cells in a shard's first slab; later slabs double

  static RowLayout Make(size_t cell_bytes) {
    RowLayout layout;
    // Whole cache lines where they waste little, so that a row does not straddle one more.
    const size_t lines = (cell_bytes + 63) / 64 * 64;
    if (lines * 8 <= cell_bytes * 9) {
      layout.stride = lines;
    } else if (cell_bytes > 32) {
      layout.stride = (cell_bytes + 15) / 16 * 16;
    } else {
      layout.stride = 4;
      while (layout.stride < cell_bytes) layout.stride *= 2;
    }
    layout.first_shift = 3;
    while ((layout.stride << (layout.first_shift + 1)) <= 4096) ++layout.first_shift;
    return layout;
  }
};

class RowSlabs {
 public:
  explicit RowSlabs(const RowLayout& layout) : layout_(layout) {}

  // A cell, not cleared. Throws std::bad_alloc without changing anything.
  uint32_t Allocate() {
    if (!free_.empty()) {
      const uint32_t row = free_.back();
      free_.pop_back();
      return row;
    }
    if (next_ == end_) {
      const size_t cells = size_t{1} << (layout_.first_shift + static_cast<int>(slabs_.size()));
      slabs_.emplace_back(cells * (layout_.stride + sizeof(int64_t)));
      end_ += static_cast<uint32_t>(cells);
    }
    return next_++;
  }

  void Free(uint32_t row) { free_.push_back(row); }

  void Clear() {
    slabs_.clear();
    free_.clear();
    free_.shrink_to_fit();
    next_ = end_ = 0;
  }

  char* Cell(uint32_t row) const {
    const Place place = Locate(row);
    return slabs_[place.slab].data() + place.offset * layout_.stride;
  }

  int64_t* Version(uint32_t row) const {
    const Place place = Locate(row);
    const size_t cells = size_t{1} << (layout_.first_shift + static_cast<int>(place.slab));
    return reinterpret_cast<int64_t*>(slabs_[place.slab].data() + cells * layout_.stride) + place.offset;
  }

  size_t live() const { return next_ - free_.size(); }
  // Bytes of cells handed out so far, free ones included.
  size_t bytes() const { return next_ * (layout_.stride + sizeof(int64_t)) + free_.capacity() * sizeof(uint32_t); }

 private:
  struct Place {
    size_t slab, offset;
  };

  // Slab s holds the cells from (2^s - 1) << first_shift on.
  Place Locate(uint32_t row) const {
    const uint64_t shifted = (static_cast<uint64_t>(row) >> layout_.first_shift) + 1;
    const int slab = 63 - __builtin_clzll(shifted);
    const uint64_t first = ((uint64_t{1} << slab) - 1) << layout_.first_shift;
    return {static_cast<size_t>(slab), static_cast<size_t>(row - first)};
  }

  RowLayout layout_;
  std::vector<ZeroedBlock> slabs_;
  std::vector<uint32_t> free_;
  uint32_t next_ = 0;
  uint32_t end_ = 0;
};

}  // namespace deeprec
