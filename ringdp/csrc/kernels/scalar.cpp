// The loops for whatever the compiler's baseline is (SSE2 on x86-64, NEON on aarch64).
#include "kernels/table.h"

#define RINGDP_KERNEL_TARGET

namespace ringdp::kernels {
namespace {

#include "kernels/loops.inc"

}  // namespace

const KernelTable& scalar_table() { return kTable; }

}  // namespace ringdp::kernels
