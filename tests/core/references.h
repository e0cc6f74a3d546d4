// Kernels and codecs element by element, as they are defined: what the product's vectorised loops are compared with, to
// the bit. Constant data; any thread.
#pragma once

#include "codec/codec.h"
#include "kernels/kernels.h"

namespace ringdp {

const ReduceKernels& reduce_kernels_reference(DType dtype, ReduceOp op);  // throws as reduce_kernels
FirstNonFinite first_non_finite_reference(DType dtype);
Multiply multiply_reference(DType dtype);
Weigh weigh_reference(DType dtype);
const Codec& codec_reference(CodecId id);  // of a plug-in the plug-in itself

}  // namespace ringdp
