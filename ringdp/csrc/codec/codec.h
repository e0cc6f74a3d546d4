// Codecs: float32 elements to fewer bytes and back. Stateless, any thread; the floating-point mode is the default one
// (kernels/float_mode.h). Every instruction set gives the same bits; docs/reference/wire_format.md has the layouts. A
// code of `count` elements has encoded_bytes(count) bytes, whatever they hold: no length is ever read from a code, and
// any bytes decode to something without touching memory outside it. Non-finite elements survive: float16 and bfloat16
// carry them, block codes mark the whole block with a NaN scale, so it decodes to NaN; those within 2^-8 of the
// largest float may decode to infinity. Floats are aligned to 4, bytes need not be.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/types.h"

namespace ringdp {

// Whether the elements of a call were finite.
enum class Encoded { kFinite, kNonFinite };

// The parameters of a built-in codec.
struct CodecSpec {
  int bits = 0;         // of an element's code, without the scale
  int scale_bytes = 0;  // of a block; 0 for casts, which have no blocks
  int lowest = 0;       // the scale is multiplied by a whole number from `lowest` to `highest`
  int highest = 0;
  std::span<const int8_t> levels = {};  // the whole numbers that have a code, rising; empty: all
};

struct Codec {
  CodecId id;
  std::string_view name;
  std::size_t block;  // elements that share a scale; 1 where there is none

  std::size_t (*encoded_bytes)(std::size_t count);

  // code = encode(x[0..count)).
  Encoded (*compress)(std::byte* code, const float* x, std::size_t count);

  // Error feedback in the same pass: v = x + factor·residual, code = encode(v), new_residual = (v − decode(code)) /
  // factor. `factor` is a power of two: the loss scale, where residuals are kept without it. new_residual may be
  // residual. Blocks that are not finite leave new_residual = residual.
  Encoded (*compress_with_feedback)(std::byte* code, const float* x, const float* residual, float* new_residual,
                                    float factor, std::size_t count);

  void (*decode_set)(float* out, const std::byte* code, std::size_t count);
  void (*decode_add)(float* sum, const std::byte* code, std::size_t count);  // sum += decode(code)
  // Whether all decoded elements are finite. Mostly reads the scales only, unless inspect_decodes.
  Encoded (*inspect)(const std::byte* code, std::size_t count);
  bool inspect_decodes = false;
  CodecSpec spec = {};
};

// As codec.inspect(code, count), for a caller that has the result of decode_set, `decoded`.
Encoded inspect(const Codec& codec, const std::byte* code, const float* decoded, std::size_t count);
Encoded inspect_elements(const float* x, std::size_t count);

const Codec& codec(CodecId id);  // of the selected instruction set (select_isa); throws Error(kValue) for an unknown id
// one of kCodecNames, or what load_plugin has loaded (plugin.h); throws Error(kValue)
CodecId codec_by_name(std::string_view name);

}  // namespace ringdp
