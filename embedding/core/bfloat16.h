// float32 to bfloat16 and back: the upper half of the bits, rounded to the nearest even.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace deeprec {

inline void ToBfloat16(const float* from, size_t n, uint16_t* to) {
  for (size_t i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from + i, sizeof(bits));
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    // Rounding could carry a NaN into infinity or beyond.
    const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    to[i] = static_cast<uint16_t>(nan ? (bits >> 16) | 0x40u : rounded);
  }
}

inline void FromBfloat16(const uint16_t* from, size_t n, float* to) {
  for (size_t i = 0; i < n; ++i) {
    const uint32_t bits = static_cast<uint32_t>(from[i]) << 16;
    std::memcpy(to + i, &bits, sizeof(bits));
  }
}

}  // namespace deeprec
