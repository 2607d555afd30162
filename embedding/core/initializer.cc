#include "initializer.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "hashing.h"

namespace deeprec {
namespace {

double Polynomial(const double (&c)[8], double x) {
  double sum = c[7];
  for (int i = 6; i >= 0; --i) sum = sum * x + c[i];
  return sum;
}

// The inverse of the normal distribution function (Wichura's AS 241, PPND16), 0 < p < 1.
double InverseNormal(double p) {
  static constexpr double a[8] = {3.3871328727963666080e0, 1.3314166789178437745e2, 1.9715909503065514427e3,
                                  1.3731693765509461125e4, 4.5921953931549871457e4, 6.7265770927008700853e4,
                                  3.3430575583588128105e4, 2.5090809287301226727e3};
  static constexpr double b[8] = {1.0,
                                  4.2313330701600911252e1,
                                  6.8718700749205790830e2,
                                  5.3941960214247511077e3,
                                  2.1213794301586595867e4,
                                  3.9307895800092710610e4,
                                  2.8729085735721942674e4,
                                  5.2264952788528545610e3};
  static constexpr double c[8] = {1.42343711074968357734e0,  4.63033784615654529590e0, 5.76949722146069140550e0,
                                  3.64784832476320460504e0,  1.27045825245236838258e0, 2.41780725177450611770e-1,
                                  2.27238449892691845833e-2, 7.74545014278341407640e-4};
  static constexpr double d[8] = {1.0,
                                  2.05319162663775882187e0,
                                  1.67638483018380384940e0,
                                  6.89767334985100004550e-1,
                                  1.48103976427480074590e-1,
                                  1.51986665636164571966e-2,
                                  5.47593808499534494600e-4,
                                  1.05075007164441684324e-9};
  static constexpr double e[8] = {6.65790464350110377720e0,  5.46378491116411436990e0,  1.78482653991729133580e0,
                                  2.96560571828504891230e-1, 2.65321895265761230930e-2, 1.24266094738807843860e-3,
                                  2.71155556874348757815e-5, 2.01033439929228813265e-7};
  static constexpr double f[8] = {1.0,
                                  5.99832206555887937690e-1,
                                  1.36929880922735805310e-1,
                                  1.48753612908506148525e-2,
                                  7.86869131145613259100e-4,
                                  1.84631831751005468180e-5,
                                  1.42151175831644588870e-7,
                                  2.04426310338993978564e-15};
  const double q = p - 0.5;
  if (std::fabs(q) <= 0.425) {
    const double r = 0.180625 - q * q;
    return q * Polynomial(a, r) / Polynomial(b, r);
  }
  double r = std::sqrt(-std::log(q < 0 ? p : 1.0 - p));
  double value;
  if (r <= 5.0) {
    r -= 1.6;
    value = Polynomial(c, r) / Polynomial(d, r);
  } else {
    r -= 5.0;
    value = Polynomial(e, r) / Polynomial(f, r);
  }
  return q < 0 ? -value : value;
}

// Open interval (0, 1), 32 bits.
double UnitOpen(uint32_t bits) { return (static_cast<double>(bits) + 0.5) * 0x1p-32; }

constexpr double kBelowTwoSigma = 0.022750131948179195;  // normal distribution function at -2

}  // namespace

Initializer::Initializer(const std::string& kind, double a, double b, uint64_t seed) : a_(a), b_(b), seed_(seed) {
  if (kind == "Constant") {
    kind_ = Kind::kConstant;
  } else if (kind == "Uniform") {
    kind_ = Kind::kUniform;
  } else if (kind == "Normal") {
    kind_ = Kind::kNormal;
  } else if (kind == "TruncatedNormal") {
    kind_ = Kind::kTruncatedNormal;
  } else {
    throw std::invalid_argument("No such initializer. Received: kind=" + kind);
  }
}

void Initializer::Fill(uint64_t hash, size_t begin, size_t end, float* out) const {
  if (kind_ == Kind::kConstant) {
    std::fill(out, out + (end - begin), static_cast<float>(a_));
    return;
  }
  // One 64-bit draw makes two elements; the counter is the position, so any part of a row can be made alone.
  const uint64_t base = Mix64(hash ^ Mix64(seed_ + 0x9e3779b97f4a7c15ULL));
  const auto draw = [base](size_t pair) { return Mix64(base + (pair + 1) * 0x9e3779b97f4a7c15ULL); };
  const auto element = [this](uint32_t bits) {
    switch (kind_) {
      case Kind::kUniform:
        // 24 bits: rounding to float must not reach maxval.
        return static_cast<float>(a_) + static_cast<float>(bits >> 8) * 0x1p-24f * static_cast<float>(b_ - a_);
      case Kind::kNormal:
        return static_cast<float>(a_ + b_ * InverseNormal(UnitOpen(bits)));
      default:
        return static_cast<float>(a_ +
                                  b_ * InverseNormal(kBelowTwoSigma + UnitOpen(bits) * (1.0 - 2.0 * kBelowTwoSigma)));
    }
  };
  size_t i = begin;
  if (i < end && i % 2 != 0) {
    *out++ = element(static_cast<uint32_t>(draw(i / 2)));
    ++i;
  }
  for (; i + 1 < end; i += 2) {
    const uint64_t bits = draw(i / 2);
    *out++ = element(static_cast<uint32_t>(bits >> 32));
    *out++ = element(static_cast<uint32_t>(bits));
  }
  if (i < end) *out = element(static_cast<uint32_t>(draw(i / 2) >> 32));
}

}  // namespace deeprec
