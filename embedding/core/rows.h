// The rows of one shard and one dimension: slabs of fixed-size cells. A cell is a row's single allocation: its value,
// every optimizer slot, and (in a column of the same slab) its metadata. Freed cells are used again. Cells never move,
// but where a limit makes one class squeeze out the free cells of another.
#pragma once

#include <algorithm>
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
      if (!tier_->in_files()) ready_ = end_;
    }
    if (next_ == ready_) MakeReady();
    return next_++;
  }

  void Free(uint32_t row) { free_.push_back(row); }

  void Clear() {
    slabs_.clear();
    free_.clear();
    free_.shrink_to_fit();
    next_ = end_ = ready_ = 0;
    held_ = 0;
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

  bool has_free() const { return !free_.empty(); }
  const std::vector<uint32_t>& free_cells() const { return free_; }

  // Gives the memory of all cells from `cells` on back to the system; the caller has moved rows out of them, and no
  // cell before them is free.
  void Truncate(uint32_t cells) {
    next_ = cells;
    free_.clear();
    while (!slabs_.empty() && end_ - Cells(slabs_.size() - 1) >= next_) {
      end_ -= static_cast<uint32_t>(Cells(slabs_.size() - 1));
      slabs_.pop_back();
    }
    if (!tier_->in_files()) {
      ready_ = end_;
    } else {
      ready_ = std::min(ready_, next_);
      CountHeld();
    }
    if (next_ == end_) return;
    // The rest of the last slab, of its cells and of its metadata.
    const ZeroedBlock& last = slabs_.back();
    const size_t used = next_ - (end_ - Cells(slabs_.size() - 1));
    const size_t column = Cells(slabs_.size() - 1) * layout_->stride;
    last.Discard(used * layout_->stride, column);
    last.Discard(column + used * layout_->meta_words * sizeof(int64_t), last.size());
  }

  size_t live() const { return next_ - free_.size(); }
  size_t RowBytes() const { return layout_->stride + layout_->meta_words * sizeof(int64_t); }
  // Bytes of cells handed out so far, free ones included; in files, of all that was taken from the disk.
  size_t bytes() const { return tier_->in_files() ? held_ : next_ * RowBytes(); }
  // By how much that grows when a cell is needed and none is free; at most, in files.
  size_t GrowthBytes() const {
    if (!tier_->in_files()) return RowBytes();
    return next_ < ready_ ? 0 : Step() * RowBytes() + 3 * kPage;
  }
  size_t list_bytes() const { return free_.capacity() * sizeof(uint32_t); }

 private:
  struct Place {
    size_t slab, offset;
  };

  size_t Cells(size_t slab) const { return size_t{1} << (layout_->first_shift + static_cast<int>(slab)); }

  static constexpr size_t kPage = 4096;

  // Cells for which space is taken at once.
  size_t Step() const {
    const size_t bytes = std::clamp<size_t>(next_ * RowBytes() / 16, kPage, 16 * kPage);
    return std::max<size_t>(1, bytes / RowBytes());
  }

  void MakeReady() {
    const size_t slab = slabs_.size() - 1, cells = Cells(slab), at = ready_ - (end_ - cells);
    const size_t to = std::min(cells, at + Step()), word = layout_->meta_words * sizeof(int64_t);
    const size_t column = cells * layout_->stride;
    slabs_[slab].Reserve(at * layout_->stride, to * layout_->stride);
    slabs_[slab].Reserve(column + at * word, column + to * word);
    ready_ += static_cast<uint32_t>(to - at);
    CountHeld();
  }

  // Of all slabs, the pages of their cells and of their metadata.
  void CountHeld() {
    const auto pages = [](size_t begin, size_t end) {
      return (end + kPage - 1) / kPage * kPage - begin / kPage * kPage;
    };
    held_ = 0;
    size_t first = 0;
    for (size_t slab = 0; slab < slabs_.size(); ++slab) {
      const size_t cells = ready_ <= first ? 0 : std::min(Cells(slab), ready_ - first);
      const size_t column = Cells(slab) * layout_->stride;
      if (cells != 0) {
        held_ +=
            pages(0, cells * layout_->stride) + pages(column, column + cells * layout_->meta_words * sizeof(int64_t));
      }
      first += Cells(slab);
    }
  }

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
  uint32_t ready_ = 0;  // cells before it have their space
  size_t held_ = 0;     // in files
};

}  // namespace deeprec
