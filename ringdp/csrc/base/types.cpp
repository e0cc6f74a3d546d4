#include "base/types.h"

#include <array>
#include <map>
#include <mutex>

namespace ringdp {
namespace {

struct DTypeInfo {
  std::string_view name;
  std::size_t size;
};

constexpr std::array<DTypeInfo, kDTypeCount> kDTypes{{
    {"uint8", 1},
    {"int8", 1},
    {"int16", 2},
    {"int32", 4},
    {"int64", 8},
    {"uint16", 2},
    {"uint32", 4},
    {"uint64", 8},
    {"float16", 2},
    {"bfloat16", 2},
    {"float32", 4},
    {"float64", 8},
    {"bool", 1},
    {"complex64", 8},
    {"complex128", 16},
    {"complex32", 4},
    {"float8_e4m3fn", 1},
    {"float8_e5m2", 1},
    {"float8_e4m3fnuz", 1},
    {"float8_e5m2fnuz", 1},
    {"float8_e8m0fnu", 1},
    {"float4_e2m1fn_x2", 1},
}};

constexpr std::array<std::string_view, kReduceOpCount> kReduceOps{"SUM", "AVG",  "PRODUCT", "MIN",
                                                                  "MAX", "BAND", "BOR",     "BXOR"};

constexpr std::array<std::string_view, 11> kCollectives{"barrier",        "all_reduce", "broadcast", "all_gather",
                                                        "reduce_scatter", "reduce",     "gather",    "scatter",
                                                        "all_to_all",     "send",       "recv"};

}  // namespace

// A value from the wire may be any byte: an unknown one has the name "unknown".
std::size_t dtype_size(DType dtype) {
  auto i = static_cast<std::size_t>(dtype);
  return i < kDTypes.size() ? kDTypes[i].size : 0;
}

std::string_view dtype_name(DType dtype) {
  auto i = static_cast<std::size_t>(dtype);
  return i < kDTypes.size() ? kDTypes[i].name : "unknown";
}

std::string_view reduce_op_name(ReduceOp op) {
  auto i = static_cast<std::size_t>(op);
  return i < kReduceOps.size() ? kReduceOps[i] : "unknown";
}

std::string_view collective_name(Collective what) {
  auto i = static_cast<std::size_t>(what);
  return i < kCollectives.size() ? kCollectives[i] : "unknown";
}

std::string_view codec_name(CodecId codec) {
  auto i = static_cast<std::size_t>(codec);
  return i < kCodecNames.size() ? kCodecNames[i] : "unknown";
}

namespace {

struct Known {
  std::mutex mutex;
  std::map<int32_t, std::string> texts;
};

Known& known() {
  static Known it;
  return it;
}

}  // namespace

void remember_codec(int32_t number, std::string text) {
  const std::lock_guard lock(known().mutex);
  known().texts[number] = std::move(text);
}

std::string codec_text(int32_t number) {
  if (number >= 0 && number < kCodecCount) return std::string(codec_name(static_cast<CodecId>(number)));
  const std::lock_guard lock(known().mutex);
  const auto found = known().texts.find(number);
  return found != known().texts.end() ? found->second
                                      : "codec " + std::to_string(number) + ", which is not loaded here";
}

}  // namespace ringdp
