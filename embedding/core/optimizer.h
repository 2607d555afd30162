// Optimizers: what a row must carry, and the arithmetic of one update on a span of floats. Rows and dense vectors
// run the same kernels.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace deeprec {

// The constants of one update, computed once for each step (in double, then rounded).
struct StepArgs {
  float lr;
  float alpha;  // Adam: the learning rate with bias correction
  float beta1, beta2, one_minus_beta1, one_minus_beta2;
  float epsilon;
  float momentum;
  float rho, one_minus_rho;
  float decay;  // learning rate times weight decay
  float l1, l2_twice, shrinkage_twice, minus_lr_power, lr_inverse;
  float initial;      // AdagradDecay: the accumulator never falls below it
  float decay_rate;   // AdagradDecay: factor of one period
  float decay_epoch;  // AdagradDecay: periods begun up to this step
};

// w[n] are the parameters, g[n] their gradient, slots[k][n] the k-th state vector (one element where it is scalar).
using Kernel = void (*)(const StepArgs& args, float* w, float* const* slots, const float* g, size_t n);

enum class Rule {
  kSgd,
  kMomentum,
  kNesterov,
  kHeavyBall,
  kHeavyBallNesterov,
  kAdagrad,
  kRowwiseAdagrad,
  kAdagradDecay,
  kAdagradDecayDense,
  kAdam,
  kAdamW,
  kAdamAsyncRmsprop,
  kFtrl,
  kFtrlPower,
  kRmsprop,
  kRmspropMomentum,
  kRmspropCentered,
  kRmspropCenteredMomentum,
  kCount
};

struct KernelTable {
  const char* name;
  Kernel kernels[static_cast<size_t>(Rule::kCount)];
};

// The same source compiled for three instruction sets. Results are bit-identical: no contraction, no reassociation.
extern const KernelTable& kBaseKernels;
extern const KernelTable& kAvx2Kernels;
extern const KernelTable& kAvx512Kernels;

// The widest table that this CPU runs, or the one that DEEPREC_CPU (base, avx2, avx512) limits it to.
const KernelTable& ActiveKernels();

struct SlotSpec {
  std::string name;
  float initial;
  bool scalar = false;  // one element for the row instead of one for each of its elements
};

class Optimizer {
 public:
  // `kind` and the parameter names are those of the Python dataclasses. Throws std::invalid_argument for an unknown
  // kind or a missing parameter.
  Optimizer(const std::string& kind, const std::map<std::string, double>& parameters);

  const std::vector<SlotSpec>& slots() const { return slots_; }
  // Whether flat vectors can be updated; rules that treat a row as a whole cannot.
  bool has_dense() const { return has_dense_; }

  // Clips a row's gradient in place as the options say: first each element, then the row's norm.
  bool clips() const { return clip_value_ > 0 || clip_norm_ > 0; }
  void Clip(float* gradient, size_t n) const;

  // One update's constants. `step` counts updates of the store from 1, `updates` those of this variable from 1.
  // `learning_rate` is NaN for the optimizer's own.
  StepArgs Prepare(int64_t step, int64_t updates, double learning_rate) const;

  // For rows (sparse) or for a flat dense vector.
  Kernel kernel(bool sparse) const { return sparse ? sparse_kernel_ : dense_kernel_; }

 private:
  double Parameter(const char* name) const;
  double Parameter(const char* name, double absent) const;

  std::string kind_;
  std::map<std::string, double> parameters_;
  std::vector<SlotSpec> slots_;
  Kernel sparse_kernel_;
  Kernel dense_kernel_;
  bool has_dense_ = true;
  float clip_value_ = 0, clip_norm_ = 0;  // 0: off
};

}  // namespace deeprec
