#include "optimizer.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

namespace deeprec {

const KernelTable& ActiveKernels() {
  static const KernelTable* const active = [] {
    const char* limit = std::getenv("DEEPREC_CPU");
    const bool base = limit != nullptr && std::strcmp(limit, "base") == 0;
    const bool avx2 = limit != nullptr && std::strcmp(limit, "avx2") == 0;
    if (!base && !avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw")) {
      return &kAvx512Kernels;
    }
    if (!base && __builtin_cpu_supports("avx2")) return &kAvx2Kernels;
    return &kBaseKernels;
  }();
  return *active;
}

Optimizer::Optimizer(const std::string& kind, const std::map<std::string, double>& parameters)
    : kind_(kind), parameters_(parameters) {
  Rule sparse = Rule::kSgd;
  Rule dense = Rule::kSgd;
  if (kind == "SGD") {
    if (Parameter("momentum") != 0) {
      sparse = dense = Parameter("nesterov") != 0 ? Rule::kNesterov : Rule::kMomentum;
      slots_ = {{"momentum", 0}};
    }
  } else if (kind == "Momentum") {
    sparse = dense = Parameter("use_nesterov") != 0 ? Rule::kHeavyBallNesterov : Rule::kHeavyBall;
    slots_ = {{"momentum", 0}};
  } else if (kind == "RowwiseAdagrad") {
    sparse = Rule::kRowwiseAdagrad;
    has_dense_ = false;
    slots_ = {{"accumulator", static_cast<float>(Parameter("initial_accumulator_value")), true}};
  } else if (kind == "AdagradDecay") {
    sparse = Rule::kAdagradDecay;
    dense = Rule::kAdagradDecayDense;
    slots_ = {{"accumulator", static_cast<float>(Parameter("initial_accumulator_value"))}, {"decay_epoch", 0, true}};
  } else if (kind == "Adagrad") {
    sparse = dense = Rule::kAdagrad;
    slots_ = {{"accumulator", static_cast<float>(Parameter("initial_accumulator_value"))}};
  } else if (kind == "Adam" || kind == "AdamW" || kind == "AdamAsync") {
    sparse = dense = kind == "AdamW" ? Rule::kAdamW : Rule::kAdam;
    if (kind == "AdamAsync" && Parameter("apply_sparse_rmsprop") != 0) sparse = Rule::kAdamAsyncRmsprop;
    slots_ = {{"m", 0}, {"v", 0}};
  } else if (kind == "Ftrl") {
    sparse = dense = Parameter("learning_rate_power") == -0.5 ? Rule::kFtrl : Rule::kFtrlPower;
    slots_ = {{"accumulator", static_cast<float>(Parameter("initial_accumulator_value"))}, {"linear", 0}};
  } else if (kind == "RMSprop") {
    const bool momentum = Parameter("momentum") != 0;
    const bool centered = Parameter("centered") != 0;
    sparse = dense = momentum ? (centered ? Rule::kRmspropCenteredMomentum : Rule::kRmspropMomentum)
                              : (centered ? Rule::kRmspropCentered : Rule::kRmsprop);
    slots_ = {{"velocity", 0}};
    if (momentum) slots_.push_back({"momentum", 0});
    if (centered) slots_.push_back({"average_gradient", 0});
  } else {
    throw std::invalid_argument("No such optimizer. Received: kind=" + kind);
  }
  clip_value_ = static_cast<float>(Parameter("clipvalue", 0));
  clip_norm_ = static_cast<float>(Parameter("clipnorm", 0));
  sparse_kernel_ = ActiveKernels().kernels[static_cast<size_t>(sparse)];
  dense_kernel_ = ActiveKernels().kernels[static_cast<size_t>(dense)];
}

double Optimizer::Parameter(const char* name) const {
  const auto found = parameters_.find(name);
  if (found == parameters_.end()) throw std::invalid_argument(kind_ + " needs a parameter. Received: no " + name);
  return found->second;
}

double Optimizer::Parameter(const char* name, double absent) const {
  const auto found = parameters_.find(name);
  return found == parameters_.end() ? absent : found->second;
}

void Optimizer::Clip(float* gradient, size_t n) const {
  if (clip_value_ > 0) {
    for (size_t i = 0; i < n; ++i) gradient[i] = std::min(std::max(gradient[i], -clip_value_), clip_value_);
  }
  if (clip_norm_ > 0) {
    double square = 0;
    for (size_t i = 0; i < n; ++i) square += static_cast<double>(gradient[i]) * gradient[i];
    const double norm = std::sqrt(square);
    if (norm > clip_norm_) {
      const auto factor = static_cast<float>(clip_norm_ / norm);
      for (size_t i = 0; i < n; ++i) gradient[i] *= factor;
    }
  }
}

StepArgs Optimizer::Prepare(int64_t step, int64_t updates, double learning_rate) const {
  StepArgs args{};
  const double lr = std::isnan(learning_rate) ? Parameter("learning_rate") : learning_rate;
  args.lr = static_cast<float>(lr);
  if (kind_ == "SGD" || kind_ == "Momentum") {
    args.momentum = static_cast<float>(Parameter("momentum"));
  } else if (kind_ == "AdagradDecay") {
    args.epsilon = static_cast<float>(Parameter("epsilon"));
    args.initial = static_cast<float>(Parameter("initial_accumulator_value"));
    args.decay_rate = static_cast<float>(Parameter("accumulator_decay_rate"));
    args.decay_epoch = static_cast<float>(std::floor(static_cast<double>(step) / Parameter("accumulator_decay_step")));
  } else if (kind_ == "Adagrad" || kind_ == "RowwiseAdagrad") {
    args.epsilon = static_cast<float>(Parameter("epsilon"));
  } else if (kind_ == "Adam" || kind_ == "AdamW" || kind_ == "AdamAsync") {
    const bool async = kind_ == "AdamAsync";
    const double beta1 = Parameter(async ? "beta1" : "beta_1");
    const double beta2 = Parameter(async ? "beta2" : "beta_2");
    const double count = static_cast<double>(std::max<int64_t>(async ? updates : step, 1));
    args.alpha = static_cast<float>(lr * std::sqrt(1 - std::pow(beta2, count)) / (1 - std::pow(beta1, count)));
    args.beta1 = static_cast<float>(beta1);
    args.beta2 = static_cast<float>(beta2);
    args.one_minus_beta1 = static_cast<float>(1 - beta1);
    args.one_minus_beta2 = static_cast<float>(1 - beta2);
    args.epsilon = static_cast<float>(Parameter("epsilon"));
    if (kind_ == "AdamW") args.decay = static_cast<float>(lr * Parameter("weight_decay"));
  } else if (kind_ == "Ftrl") {
    if (lr == 0) throw std::invalid_argument("Ftrl divides by the learning rate. Received: learning_rate=0");
    args.lr_inverse = static_cast<float>(1 / lr);
    args.minus_lr_power = static_cast<float>(-Parameter("learning_rate_power"));
    args.l1 = static_cast<float>(Parameter("l1_regularization_strength"));
    args.l2_twice = static_cast<float>(2 * (Parameter("l2_regularization_strength") + Parameter("beta") / (2 * lr)));
    args.shrinkage_twice = static_cast<float>(2 * Parameter("l2_shrinkage_regularization_strength"));
  } else {
    args.rho = static_cast<float>(Parameter("rho"));
    args.one_minus_rho = static_cast<float>(1 - Parameter("rho"));
    args.momentum = static_cast<float>(Parameter("momentum"));
    args.epsilon = static_cast<float>(Parameter("epsilon"));
  }
  return args;
}

}  // namespace deeprec
