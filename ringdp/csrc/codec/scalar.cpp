// The loops for whatever the compiler's baseline is (SSE2 on x86-64, NEON on aarch64).
#include "codec/table.h"

#define RINGDP_CODEC_TARGET

namespace ringdp::codecs {
namespace {

#include "codec/loops.inc"

}  // namespace

const CodecTable& scalar_table() { return kTable; }

}  // namespace ringdp::codecs
