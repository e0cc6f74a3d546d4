// Types that all layers share: element types, reductions, collectives, codecs. Owns nothing; any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace ringdp {

// The values are part of the wire format (docs/reference/wire_format.md): append, never renumber.
enum class DType : uint8_t {
  kUint8 = 0,
  kInt8 = 1,
  kInt16 = 2,
  kInt32 = 3,
  kInt64 = 4,
  kUint16 = 5,
  kUint32 = 6,
  kUint64 = 7,
  kFloat16 = 8,
  kBfloat16 = 9,
  kFloat32 = 10,
  kFloat64 = 11,
  kBool = 12,
  kComplex64 = 13,
  kComplex128 = 14,
  // From here on only moved, never reduced.
  kComplex32 = 15,
  kFloat8E4m3fn = 16,
  kFloat8E5m2 = 17,
  kFloat8E4m3fnuz = 18,
  kFloat8E5m2fnuz = 19,
  kFloat8E8m0fnu = 20,
  kFloat4E2m1fnX2 = 21,
};
inline constexpr int kDTypeCount = 22;

enum class ReduceOp : uint8_t {
  kSum = 0,
  kAvg = 1,
  kProduct = 2,
  kMin = 3,
  kMax = 4,
  kBand = 5,
  kBor = 6,
  kBxor = 7,
};
inline constexpr int kReduceOpCount = 8;

enum class Collective : uint8_t {
  kBarrier = 0,
  kAllReduce = 1,
  kBroadcast = 2,
  kAllGather = 3,
  kReduceScatter = 4,
  kReduce = 5,
  kGather = 6,
  kScatter = 7,
  kAllToAll = 8,
  kSend = 9,
  kRecv = 10,
};

// The built-in ones; a number above is a codec of a shared library (codec/plugin.h).
enum class CodecId : uint8_t {
#define RINGDP_CAST_CODEC(codec, name) k##codec,
#define RINGDP_BLOCK_CODEC(codec, name) k##codec,
#include "base/codecs.def"
};
inline constexpr std::array kCodecNames{
#define RINGDP_CAST_CODEC(codec, name) std::string_view(name),
#define RINGDP_BLOCK_CODEC(codec, name) std::string_view(name),
#include "base/codecs.def"
};
inline constexpr int kCodecCount = static_cast<int>(kCodecNames.size());

std::size_t dtype_size(DType dtype);
std::string_view dtype_name(DType dtype);           // torch's names: "float32", "bfloat16", …
std::string_view reduce_op_name(ReduceOp op);       // "SUM", "AVG", …
std::string_view collective_name(Collective what);  // "all_reduce", "broadcast", …
std::string_view codec_name(CodecId codec);         // "int8", …

// The names of codec numbers from the wire (docs/reference/wire_format.md): a CodecId, or the hash of a codec from a
// shared library. For messages that name the codec which another rank uses.

void remember_codec(int32_t number, std::string text);
std::string codec_text(int32_t number);  // "int8", or "codec N, which is not loaded here"

}  // namespace ringdp
