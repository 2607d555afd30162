// The rows of one shard and one dimension: slabs of fixed-size cells. A cell is a row's single allocation: its value,
// every optimizer slot, and (in a column of the same slab) its metadata. Cells never move; freed ones are used again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "layout.h"
#include "memory.h"
#include "tier.h"

namespace deeprec {

class RowSlabs {
 public:
  RowSlabs(const RowLayout& layout, const TierConfig& tier) : layout_(&layout), tier_(&tier) {}

  // A cell, not cleared. Throws std::bad_alloc without changing anything.
  uint32_t Allocate() {
    if (!free_.empty()) {
      const uint32_t row = free_.back();
      free_.pop_back();
      return row;
    }
    if (next_ == end_) {
      const size_t cells = Cells(slabs_.size());
      slabs_.push_back(MakeTierBlock(*tier_, cells * RowBytes()));
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
    return slabs_[place.slab].data() + place.offset * layout_->stride;
  }

  int64_t* Meta(uint32_t row) const {
    const Place place = Locate(row);
    auto* column = reinterpret_cast<int64_t*>(slabs_[place.slab].data() + Cells(place.slab) * layout_->stride);
    return column + place.offset * layout_->meta_words;
  }

  size_t live() const { return next_ - free_.size(); }
  size_t RowBytes() const { return layout_->stride + layout_->meta_words * sizeof(int64_t); }
  // Bytes of cells handed out so far, free ones included.
  size_t bytes() const { return next_ * RowBytes() + free_.capacity() * sizeof(uint32_t); }

 private:
  struct Place {
    size_t slab, offset;
  };

  size_t Cells(size_t slab) const { return size_t{1} << (layout_->first_shift + static_cast<int>(slab)); }

  // Slab s holds the cells from (2^s - 1) << first_shift on.
  Place Locate(uint32_t row) const {
    const uint64_t shifted = (static_cast<uint64_t>(row) >> layout_->first_shift) + 1;
    const int slab = 63 - __builtin_clzll(shifted);
    const uint64_t first = ((uint64_t{1} << slab) - 1) << layout_->first_shift;
    return {static_cast<size_t>(slab), static_cast<size_t>(row - first)};
  }

  const RowLayout* layout_;
  const TierConfig* tier_;
  std::vector<ZeroedBlock> slabs_;
  std::vector<uint32_t> free_;
  uint32_t next_ = 0;
  uint32_t end_ = 0;
};

}  // namespace deeprec
