// Hash functions: the key mixer that places rows, string fingerprints, and de-duplication of key batches.
#pragma once

#include <cstddef>
#include <cstdint>

namespace deeprec {

// Keys are placed by virtual buckets, so that any number of servers can share a checkpoint.
constexpr int kBucketBits = 10;
constexpr int kNumBuckets = 1 << kBucketBits;

// A bijection of 64 bits (the SplitMix64 finalizer): equal hashes mean equal keys. Fixed forever, since
// checkpoints and servers place rows by it.
inline uint64_t Mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// The inverse of Mix64.
inline uint64_t Unmix64(uint64_t x) {
  x = (x ^ (x >> 31) ^ (x >> 62)) * 0x319642b2d24d8ec3ULL;
  x = (x ^ (x >> 27) ^ (x >> 54)) * 0x96de1b173f119089ULL;
  return x ^ (x >> 30) ^ (x >> 60);
}

inline int BucketOf(uint64_t hash) { return static_cast<int>(hash >> (64 - kBucketBits)); }

// FarmHash Fingerprint64, which TensorFlow's tf.fingerprint computes too.
uint64_t Fingerprint64(const char* data, size_t size);

// De-duplicates `keys[n]` in the order of first occurrence. Writes at most n entries to `unique` and `counts`,
// n to `inverse`; returns the number of distinct keys. Any key value is legal.
size_t Unique(const int64_t* keys, size_t n, int64_t* unique, int32_t* inverse, int64_t* counts);

}  // namespace deeprec
