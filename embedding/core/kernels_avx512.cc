// Update kernels for one instruction set: avx512.
#include "optimizer.h"

#pragma GCC target("avx2,avx512f,avx512vl,avx512dq,avx512bw,prefer-vector-width=512")
// Contraction and reassociation stay off, so that every instruction set gives the same bits.
#pragma GCC optimize("O3,no-math-errno,no-trapping-math,fp-contract=off")

namespace deeprec {
namespace kernels_avx512 {
#include "kernels.inc"
const KernelTable kTable{"avx512", DEEPREC_KERNEL_LIST};
}  // namespace kernels_avx512

const KernelTable& kAvx512Kernels = kernels_avx512::kTable;
}  // namespace deeprec
