// Update kernels for one instruction set: base.
#include "optimizer.h"

// Contraction and reassociation stay off, so that every instruction set gives the same bits.
#pragma GCC optimize("O3,no-math-errno,no-trapping-math,fp-contract=off")

namespace deeprec {
namespace kernels_base {
#include "kernels.inc"
const KernelTable kTable{"base", DEEPREC_KERNEL_LIST};
}  // namespace kernels_base

const KernelTable& kBaseKernels = kernels_base::kTable;
}  // namespace deeprec
