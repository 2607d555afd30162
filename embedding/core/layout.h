// How the parts of a row lie in its cell: value, then every optimizer slot; metadata words in a column beside.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "optimizer.h"

namespace deeprec {

enum class ValueType { kFloat32, kBFloat16 };

inline float FromBFloat16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

// Rounds by a number from [0, 65536): with 0x7fff plus the lowest kept bit to nearest even, with a random one
// stochastically. Infinity and NaN stay what they are.
inline uint16_t ToBFloat16(float value, uint32_t rounding) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7f800000) == 0x7f800000) return static_cast<uint16_t>(bits >> 16 | ((bits & 0x7fffff) != 0));
  return static_cast<uint16_t>((bits + rounding) >> 16);
}

inline uint16_t NearestBFloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return ToBFloat16(value, 0x7fff + (bits >> 16 & 1));
}

// One class of rows: those of one dimension.
struct RowLayout {
  size_t dim = 0;
  size_t cell_bytes = 0;
  size_t stride = 0;                 // of a cell in its slab
  size_t meta_words = 1;             // int64 each; the first is the version
  int first_shift = 0;               // log2 of the cells in a shard's first slab; later slabs double
  std::vector<size_t> slot_offsets;  // in floats from the start of the cell
  std::vector<size_t> slot_widths;   // in floats

  static RowLayout Make(size_t dim, ValueType type, const std::vector<SlotSpec>& slots, size_t meta_words) {
    RowLayout layout;
    layout.dim = dim;
    layout.meta_words = meta_words;
    size_t floats = type == ValueType::kFloat32 ? dim : (dim + 1) / 2;
    for (const SlotSpec& slot : slots) {
      layout.slot_offsets.push_back(floats);
      layout.slot_widths.push_back(slot.scalar ? 1 : dim);
      floats += layout.slot_widths.back();
    }
    layout.cell_bytes = floats * sizeof(float);
    layout.stride = Stride(layout.cell_bytes);
    layout.first_shift = 3;
    while ((layout.stride << (layout.first_shift + 1)) <= 4096) ++layout.first_shift;
    return layout;
  }

 private:
  // Whole cache lines where they waste little, so that a row does not straddle one more.
  static size_t Stride(size_t bytes) {
    const size_t lines = (bytes + 63) / 64 * 64;
    if (lines * 8 <= bytes * 9) return lines;
    if (bytes > 32) return (bytes + 15) / 16 * 16;
    size_t stride = 4;
    while (stride < bytes) stride *= 2;
    return stride;
  }
};

}  // namespace deeprec
