// The loops for AVX-512 (F, BW, DQ, VL): 16 floats at a time. Compilers prefer 256-bit vectors unless told.
#include "codec/table.h"

#if defined(__x86_64__)

#if defined(__clang__)
#define RINGDP_CODEC_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"), min_vector_width(512)))
#else
#define RINGDP_CODEC_TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")))
#endif

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
