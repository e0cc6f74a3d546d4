// The codecs, filled in from a set of loops. One table per instruction set, indexed by CodecId. Constant data; any
// thread. Included by the files with the loops and by dispatch.cpp.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>

#include "codec/blocks.h"
#include "codec/casts.h"
#include "codec/codec.h"

namespace ringdp::codecs {

using CodecTable = std::array<Codec, kCodecCount>;

const CodecTable& scalar_table();
const CodecTable* avx2_table();  // null where the compiler does not target x86-64
const CodecTable* avx512_table();
const CodecTable& counting_table();  // see CountedWork

template <class Loops>
constexpr Codec make_codec(CodecId id, std::size_t (*bytes)(std::size_t), const CodecSpec& spec) {
  return {.id = id,
          .name = kCodecNames[static_cast<std::size_t>(id)],
          .block = Loops::kElements,
          .encoded_bytes = bytes,
          .compress = Loops::compress,
          .compress_with_feedback = Loops::compress_with_feedback,
          .decode_set = Loops::decode_set,
          .decode_add = Loops::decode_add,
          .inspect = Loops::inspect,
          .spec = spec};
}

template <template <class> class BlockLoops, const ReduceKernels& (*kKernels)(DType, ReduceOp) = reduce_kernels>
constexpr CodecTable make_table() {
  return {
#define RINGDP_CAST_CODEC(codec, name)                                                                     \
  make_codec<Casts<DType::k##codec, kKernels>>(CodecId::k##codec, Casts<DType::k##codec, kKernels>::bytes, \
                                               {.bits = 8 * sizeof(uint16_t)}),
#define RINGDP_BLOCK_CODEC(codec, name) \
  make_codec<BlockLoops<codec##Block>>(CodecId::k##codec, encoded_bytes<codec##Block>, spec_of<codec##Block>()),
#include "base/codecs.def"
  };
}

}  // namespace ringdp::codecs
