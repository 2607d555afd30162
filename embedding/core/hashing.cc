#include "hashing.h"

#include <cstring>
#include <utility>
#include <vector>

namespace deeprec {
namespace {

constexpr uint64_t k0 = 0xc3a5c85c97cb3127ULL;
constexpr uint64_t k1 = 0xb492b66fbe98f273ULL;
constexpr uint64_t k2 = 0x9ae16a3b2f90404fULL;

uint64_t Fetch64(const char* p) {
  uint64_t value;
  std::memcpy(&value, p, sizeof(value));
  return value;
}

uint32_t Fetch32(const char* p) {
  uint32_t value;
  std::memcpy(&value, p, sizeof(value));
  return value;
}

uint64_t Rotate(uint64_t value, int shift) { return (value >> shift) | (value << (64 - shift)); }

uint64_t ShiftMix(uint64_t value) { return value ^ (value >> 47); }

uint64_t HashLen16(uint64_t u, uint64_t v, uint64_t mul) {
  uint64_t a = ShiftMix((u ^ v) * mul);
  return ShiftMix((v ^ a) * mul) * mul;
}

uint64_t HashLen0to16(const char* s, size_t len) {
  if (len >= 8) {
    uint64_t mul = k2 + len * 2;
    uint64_t a = Fetch64(s) + k2;
    uint64_t b = Fetch64(s + len - 8);
    uint64_t c = Rotate(b, 37) * mul + a;
    uint64_t d = (Rotate(a, 25) + b) * mul;
    return HashLen16(c, d, mul);
  }
  if (len >= 4) {
    uint64_t mul = k2 + len * 2;
    uint64_t a = Fetch32(s);
    return HashLen16(len + (a << 3), Fetch32(s + len - 4), mul);
  }
  if (len > 0) {
    uint32_t a = static_cast<uint8_t>(s[0]);
    uint32_t b = static_cast<uint8_t>(s[len >> 1]);
    uint32_t c = static_cast<uint8_t>(s[len - 1]);
    uint32_t y = a + (b << 8);
    uint32_t z = static_cast<uint32_t>(len) + (c << 2);
    return ShiftMix(y * k2 ^ z * k0) * k2;
  }
  return k2;
}

uint64_t HashLen17to32(const char* s, size_t len) {
  uint64_t mul = k2 + len * 2;
  uint64_t a = Fetch64(s) * k1;
  uint64_t b = Fetch64(s + 8);
  uint64_t c = Fetch64(s + len - 8) * mul;
  uint64_t d = Fetch64(s + len - 16) * k2;
  return HashLen16(Rotate(a + b, 43) + Rotate(c, 30) + d, a + Rotate(b + k2, 18) + c, mul);
}

uint64_t HashLen33to64(const char* s, size_t len) {
  uint64_t mul = k2 + len * 2;
  uint64_t a = Fetch64(s) * k2;
  uint64_t b = Fetch64(s + 8);
  uint64_t c = Fetch64(s + len - 8) * mul;
  uint64_t d = Fetch64(s + len - 16) * k2;
  uint64_t y = Rotate(a + b, 43) + Rotate(c, 30) + d;
  uint64_t z = HashLen16(y, a + Rotate(b + k2, 18) + c, mul);
  uint64_t e = Fetch64(s + 16) * mul;
  uint64_t f = Fetch64(s + 24);
  uint64_t g = (y + Fetch64(s + len - 32)) * mul;
  uint64_t h = (z + Fetch64(s + len - 24)) * mul;
  return HashLen16(Rotate(e + f, 43) + Rotate(g, 30) + h, e + Rotate(f + a, 18) + g, mul);
}

using Pair = std::pair<uint64_t, uint64_t>;

Pair WeakHashLen32WithSeeds(const char* s, uint64_t a, uint64_t b) {
  uint64_t w = Fetch64(s), x = Fetch64(s + 8), y = Fetch64(s + 16), z = Fetch64(s + 24);
  a += w;
  b = Rotate(b + a + z, 21);
  uint64_t c = a;
  a += x + y;
  b += Rotate(a, 44);
  return {a + z, b + c};
}

}  // namespace

uint64_t Fingerprint64(const char* s, size_t len) {
  if (len <= 16) return HashLen0to16(s, len);
  if (len <= 32) return HashLen17to32(s, len);
  if (len <= 64) return HashLen33to64(s, len);
  uint64_t x = 81;
  uint64_t y = 81 * k1 + 113;
  uint64_t z = ShiftMix(y * k2 + 113) * k2;
  Pair v{0, 0}, w{0, 0};
  x = x * k2 + Fetch64(s);
  const char* end = s + ((len - 1) / 64) * 64;
  const char* last64 = end + ((len - 1) & 63) - 63;
  do {
    x = Rotate(x + y + v.first + Fetch64(s + 8), 37) * k1;
    y = Rotate(y + v.second + Fetch64(s + 48), 42) * k1;
    x ^= w.second;
    y += v.first + Fetch64(s + 40);
    z = Rotate(z + w.first, 33) * k1;
    v = WeakHashLen32WithSeeds(s, v.second * k1, x + w.first);
    w = WeakHashLen32WithSeeds(s + 32, z + w.second, y + Fetch64(s + 16));
    std::swap(z, x);
    s += 64;
  } while (s != end);
  uint64_t mul = k1 + ((z & 0xff) << 1);
  s = last64;
  w.first += (len - 1) & 63;
  v.first += w.first;
  w.first += v.first;
  x = Rotate(x + y + v.first + Fetch64(s + 8), 37) * mul;
  y = Rotate(y + v.second + Fetch64(s + 48), 42) * mul;
  x ^= w.second * 9;
  y += v.first * 9 + Fetch64(s + 40);
  z = Rotate(z + w.first, 33) * mul;
  v = WeakHashLen32WithSeeds(s, v.second * mul, x + w.first);
  w = WeakHashLen32WithSeeds(s + 32, z + w.second, y + Fetch64(s + 16));
  std::swap(z, x);
  return HashLen16(HashLen16(v.first, w.first, mul) + ShiftMix(y) * k0 + z, HashLen16(v.second, w.second, mul) + x,
                   mul);
}

size_t Unique(const int64_t* keys, size_t n, int64_t* unique, int32_t* inverse, int64_t* counts) {
  // Open addressing over positions in `unique`, 0 for free. Starts small and grows with the distinct keys, so that
  // a batch of few ids stays in the cache.
  size_t capacity = 256;
  std::vector<int32_t> table(capacity, 0);
  size_t distinct = 0;
  for (size_t i = 0; i < n; ++i) {
    if (distinct * 2 >= capacity) {
      capacity *= 4;
      table.assign(capacity, 0);
      for (size_t u = 0; u < distinct; ++u) {
        size_t slot = Mix64(static_cast<uint64_t>(unique[u])) & (capacity - 1);
        while (table[slot] != 0) slot = (slot + 1) & (capacity - 1);
        table[slot] = static_cast<int32_t>(u) + 1;
      }
    }
    const int64_t key = keys[i];
    size_t slot = Mix64(static_cast<uint64_t>(key)) & (capacity - 1);
    while (table[slot] != 0 && unique[table[slot] - 1] != key) slot = (slot + 1) & (capacity - 1);
    int32_t position = table[slot] - 1;
    if (position < 0) {
      position = static_cast<int32_t>(distinct++);
      table[slot] = position + 1;
      unique[position] = key;
      counts[position] = 0;
    }
    ++counts[position];
    inverse[i] = position;
  }
  return distinct;
}

}  // namespace deeprec
