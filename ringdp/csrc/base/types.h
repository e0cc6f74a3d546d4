// The words every layer shares: element types, reductions, collectives, codecs.
// Owns nothing; any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace ringdp {

// The values are part of the wire format (docs/wire_format.md): append, never renumber.
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
  // From here on there is nothing to add up: they are only moved.
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

enum class CodecId : uint8_t { kFloat16 = 0, kBfloat16 = 1, kInt8 = 2, kInt4 = 3, kInt5 = 4, kInt6 = 5, kNf4 = 6 };
inline constexpr int kCodecCount = 7;
inline constexpr std::array<std::string_view, kCodecCount> kCodecNames{"float16", "bfloat16", "int8", "int4",
                                                                       "int5",    "int6",     "nf4"};

std::size_t dtype_size(DType dtype);
std::string_view dtype_name(DType dtype);           // torch's names: "float32", "bfloat16", …
std::string_view reduce_op_name(ReduceOp op);       // "SUM", "AVG", …
std::string_view collective_name(Collective what);  // "all_reduce", "broadcast", …
std::string_view codec_name(CodecId codec);         // "int8", …

}  // namespace ringdp
