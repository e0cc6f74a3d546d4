// The loops for AVX-512 (F, BW, DQ, VL): 16 floats at a time.
#include "codec/table.h"
#include "kernels/kernels.h"

#if defined(__x86_64__)

#define RINGDP_CODEC_TARGET RINGDP_TARGET_AVX512

namespace ringdp::codecs {
namespace {

#include "codec/loops.inc"

}  // namespace

const CodecTable* avx512_table() { return &kTable; }

}  // namespace ringdp::codecs

#else

namespace ringdp::codecs {
const CodecTable* avx512_table() { return nullptr; }
}  // namespace ringdp::codecs

#endif
