// Update kernels for one instruction set: avx2.
#include "optimizer.h"

#pragma GCC target("avx2")
// Contraction and reassociation stay off, so that every instruction set gives the same bits.
#pragma GCC optimize("O3,no-math-errno,no-trapping-math,fp-contract=off")

namespace deeprec {
namespace kernels_avx2 {
#include "kernels.inc"
const KernelTable kTable{"avx2", DEEPREC_KERNEL_LIST};
}  // namespace kernels_avx2

const KernelTable& kAvx2Kernels = kernels_avx2::kTable;
}  // namespace deeprec
