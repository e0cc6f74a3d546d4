// The loops for AVX2: 8 floats at a time.
#include "codec/table.h"

#if defined(__x86_64__)

#define RINGDP_CODEC_TARGET __attribute__((target("avx2")))

namespace ringdp::codecs {
namespace {

#include "codec/loops.inc"

}  // namespace

const CodecTable* avx2_table() { return &kTable; }

}  // namespace ringdp::codecs

#else

namespace ringdp::codecs {
const CodecTable* avx2_table() { return nullptr; }
}  // namespace ringdp::codecs

#endif
