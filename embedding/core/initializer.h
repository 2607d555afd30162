// Start values of rows: pure functions of (table seed, key, position in the row).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace deeprec {

class Initializer {
 public:
  // kind: Constant (a = value), Uniform (a = minval, b = maxval), Normal and TruncatedNormal (a = mean, b = stddev).
  // Throws std::invalid_argument for another kind.
  Initializer(const std::string& kind, double a, double b, uint64_t seed);

  // Writes the elements [begin, end) of the row of the key with this mixed hash to out[0 .. end - begin).
  void Fill(uint64_t hash, size_t begin, size_t end, float* out) const;

 private:
  enum class Kind { kConstant, kUniform, kNormal, kTruncatedNormal };
  Kind kind_;
  double a_, b_;
  uint64_t seed_;
};

}  // namespace deeprec
