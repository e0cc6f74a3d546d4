// Which codecs there are, filled in from a set of loops. One table per instruction set, indexed by CodecId.
// Constant data; any thread. Included by the files that bring the loops and by dispatch.cpp.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>

#include "codec/blocks.h"
#include "codec/casts.h"
#include "codec/codec.h"

namespace ringdp::codecs {

using CodecTable = std::array<Codec, kCodecCount>;

const CodecTable& reference_table();
const CodecTable& scalar_table();
const CodecTable* avx2_table();  // null where the compiler does not target x86-64
const CodecTable* avx512_table();

template <class Loops>
constexpr Codec make_codec(CodecId id, std::size_t (*bytes)(std::size_t)) {
  return {.id = id,
          .name = kCodecNames[static_cast<std::size_t>(id)],
          .block = Loops::kElements,
          .encoded_bytes = bytes,
          .compress = Loops::compress,
          .compress_with_feedback = Loops::compress_with_feedback,
          .decode_set = Loops::decode_set,
          .decode_add = Loops::decode_add,
          .inspect = Loops::inspect};
}

template <template <class> class BlockLoops, const ReduceKernels& (*kKernels)(DType, ReduceOp) = reduce_kernels>
constexpr CodecTable make_table() {
  using Half = Casts<DType::kFloat16, kKernels>;
  using Brain = Casts<DType::kBfloat16, kKernels>;
  return {make_codec<Half>(CodecId::kFloat16, Half::bytes),
          make_codec<Brain>(CodecId::kBfloat16, Brain::bytes),
          make_codec<BlockLoops<Int8Block>>(CodecId::kInt8, encoded_bytes<Int8Block>),
          make_codec<BlockLoops<Int4Block>>(CodecId::kInt4, encoded_bytes<Int4Block>),
          make_codec<BlockLoops<Int5Block>>(CodecId::kInt5, encoded_bytes<Int5Block>),
          make_codec<BlockLoops<Int6Block>>(CodecId::kInt6, encoded_bytes<Int6Block>),
          make_codec<BlockLoops<NormalFloat4Block>>(CodecId::kNf4, encoded_bytes<NormalFloat4Block>)};
}

}  // namespace ringdp::codecs
