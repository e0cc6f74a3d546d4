// The definition, element by element: what the vector loops are compared with, to the bit.
#include <cmath>
#include <memory>
#include <type_traits>

#include "codec/table.h"

namespace ringdp::codecs {
namespace {

template <class Block>
struct ReferenceLoops {
  using Scale = typename Block::Scale;
  static constexpr std::size_t kElements = Block::kElements;

  // Where element i of `count` has its code: the byte, and how far its bits are shifted.
  struct Place {
    std::size_t byte;
    int shift;
  };

  static Place place(std::size_t i, std::size_t count) {
    const std::size_t codes = block_count<Block>(count) * sizeof(Scale);
    if constexpr (std::is_same_v<Block, Int8Block>) return {codes + i, 0};
    const std::size_t within = i % kElements;
    const std::size_t half = kElements / 2;
    return {codes + i / kElements * half + within % half, within < half ? 0 : 4};
  }

  static int code_of(float x, const Scaling& by) {
    const float y = std::nearbyint((x * by.before) * by.inverse);
    return static_cast<int>(std::min(std::max(y, -Block::kLargest), Block::kLargest));
  }

  static float decoded(const std::byte* code, std::size_t i, std::size_t count) {
    Scale scale;
    std::memcpy(&scale, code + i / kElements * sizeof(Scale), sizeof scale);
    const Place at = place(i, count);
    const auto bits = std::to_integer<uint32_t>(code[at.byte]);
    int value = static_cast<int8_t>(bits);
    if constexpr (std::is_same_v<Block, Int4Block>) value = static_cast<int>(bits >> at.shift & 15u) - 8;
    return static_cast<float>(value) * Block::loaded(scale);
  }

  static Encoded compress(std::byte* code, const float* x, std::size_t count) {
    Encoded seen = Encoded::kFinite;
    if constexpr (std::is_same_v<Block, Int4Block>)
      std::memset(code + block_count<Block>(count) * sizeof(Scale), 0x88, Block::code_bytes(count));
    for (std::size_t begin = 0; begin < count; begin += kElements) {
      const std::size_t end = std::min(begin + kElements, count);
      float absmax = 0;
      bool finite = true;
      for (std::size_t i = begin; i < end; ++i) {
        finite &= std::isfinite(x[i]);
        absmax = std::max(absmax, std::fabs(x[i]));
      }
      if (!finite) seen = Encoded::kNonFinite;
      const Scaling by = finite ? Block::scaling(absmax) : Scaling{kMarked, 0.0f, 0.0f};
      const Scale scale = Block::stored(by.scale);
      std::memcpy(code + begin / kElements * sizeof(Scale), &scale, sizeof scale);
      for (std::size_t i = begin; i < end; ++i) {
        const int value = finite ? code_of(x[i], by) : 0;
        const Place at = place(i, count);
        if constexpr (std::is_same_v<Block, Int8Block>) {
          code[at.byte] = static_cast<std::byte>(value);
        } else {
          code[at.byte] &= static_cast<std::byte>(0xf0 >> at.shift);
          code[at.byte] |= static_cast<std::byte>((value + 8) << at.shift);
        }
      }
    }
    return seen;
  }

  static Encoded compress_with_feedback(std::byte* code, const float* x, const float* residual, float* new_residual,
                                        float factor, std::size_t count) {
    std::unique_ptr<float[]> v(new float[count + 1]);
    for (std::size_t i = 0; i < count; ++i) v[i] = x[i] + factor * residual[i];
    const Encoded seen = compress(code, v.get(), count);
    for (std::size_t i = 0; i < count; ++i) {
      const float back = decoded(code, i, count);
      new_residual[i] = std::isnan(back) ? residual[i] : (v[i] - back) * (1.0f / factor);
    }
    return seen;
  }

  static void decode_set(float* out, const std::byte* code, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) out[i] = decoded(code, i, count);
  }

  static Encoded inspect(const std::byte* code, std::size_t count) {
    bool finite = true;
    for (std::size_t i = 0; i < count; ++i) finite &= std::isfinite(decoded(code, i, count));
    return finite ? Encoded::kFinite : Encoded::kNonFinite;
  }

  static void decode_add(float* sum, const std::byte* code, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) sum[i] = one_nan(sum[i] + decoded(code, i, count));
  }
};

constexpr CodecTable kTable = make_table<ReferenceLoops, reduce_kernels_reference>();

}  // namespace

const CodecTable& reference_table() { return kTable; }

}  // namespace ringdp::codecs
