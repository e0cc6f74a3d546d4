// The definition, element by element: what the vector loops are compared with, to the bit.
#include <cmath>
#include <cstdlib>
#include <iterator>
#include <memory>

#include "codec/table.h"
#include "references.h"

namespace ringdp::codecs {
namespace {

template <class Block>
struct ReferenceLoops {
  using Scale = typename Block::Scale;
  static constexpr std::size_t kElements = Block::kElements;

  // Some bits of element i of `count`: the byte that has them, how far they are shifted there, how many they are.
  struct Bits {
    std::size_t byte;
    int shift;
    int count;
  };

  static Bits bits(int plane, std::size_t i, std::size_t count) {
    const std::size_t before = scale_bytes<Block>(count) + (plane == 0 ? 0 : plane_bytes<Block>(0, count));
    const std::size_t across = Block::across(plane), within = i % kElements;
    const int width = static_cast<int>(8 * across / kElements);
    return {before + i / kElements * across + within % across, static_cast<int>(within / across) * width, width};
  }

  // The code of element i is `value`: of its byte nothing was set. Beyond the end of a plane nothing is written.
  static void put(std::byte* code, std::size_t i, std::size_t count, uint32_t value) {
    for (int plane = 0; plane < kPlanes && Block::across(plane) > 0; ++plane) {
      const Bits at = bits(plane, i, count);
      const std::size_t end = bits(plane, 0, count).byte + plane_bytes<Block>(plane, count);
      if (at.byte < end) code[at.byte] |= static_cast<std::byte>((value & ((1u << at.count) - 1)) << at.shift);
      value >>= at.count;
    }
  }

  static uint32_t get(const std::byte* code, std::size_t i, std::size_t count) {
    uint32_t value = 0;
    for (int plane = 0, shift = 0; plane < kPlanes && Block::across(plane) > 0; ++plane) {
      const Bits at = bits(plane, i, count);
      value |= (std::to_integer<uint32_t>(code[at.byte]) >> at.shift & ((1u << at.count) - 1)) << shift;
      shift += at.count;
    }
    return value;
  }

  static int whole_of(float x, const Scaling& by) {
    const float y = std::nearbyint((x * by.before) * by.inverse);
    return static_cast<int>(std::min(std::max(y, Block::kLowest), Block::kHighest));
  }

  static uint32_t code_of(int whole) {
    if constexpr (requires { Block::kLevels; }) {
      const auto nearer = [&](int a, int b) { return std::abs(whole - a) < std::abs(whole - b); };
      return static_cast<uint32_t>(std::min_element(std::begin(Block::kLevels), std::end(Block::kLevels), nearer) -
                                   std::begin(Block::kLevels));
    } else if constexpr (requires { Block::kZero; }) {
      return static_cast<uint32_t>(whole + Block::kZero);
    } else {
      return static_cast<uint8_t>(whole);
    }
  }

  static float decoded(const std::byte* code, std::size_t i, std::size_t count) {
    Scale scale;
    std::memcpy(&scale, code + i / kElements * sizeof(Scale), sizeof scale);
    const uint32_t bits = get(code, i, count);
    int whole;
    if constexpr (requires { Block::kLevels; }) {
      whole = Block::kLevels[bits];
    } else if constexpr (requires { Block::kZero; }) {
      whole = static_cast<int>(bits) - Block::kZero;
    } else {
      whole = static_cast<int8_t>(bits);
    }
    return static_cast<float>(whole) * Block::loaded(scale);
  }

  static Encoded compress(std::byte* code, const float* x, std::size_t count) {
    Encoded seen = Encoded::kFinite;
    std::memset(code + scale_bytes<Block>(count), 0, encoded_bytes<Block>(count) - scale_bytes<Block>(count));
    for (std::size_t begin = 0; begin < count; begin += kElements) {
      const std::size_t end = std::min(begin + kElements, count);
      float highest = 0, lowest = 0;
      bool finite = true;
      for (std::size_t i = begin; i < end; ++i) {
        finite &= std::isfinite(x[i]);
        highest = std::max(highest, x[i]);
        lowest = std::min(lowest, x[i]);
      }
      if (!finite) seen = Encoded::kNonFinite;
      float extreme = std::max(highest, -lowest);
      if (Block::kSigned && -lowest >= highest) extreme = lowest;
      const Scaling by = finite ? Block::scaling(extreme) : Scaling{kMarked, 0.0f, 0.0f};
      const Scale scale = Block::stored(by.scale);
      std::memcpy(code + begin / kElements * sizeof(Scale), &scale, sizeof scale);
      for (std::size_t i = begin; i < begin + kElements; ++i)
        put(code, i, count, code_of(finite && i < end ? whole_of(x[i], by) : 0));
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

}  // namespace ringdp::codecs

namespace ringdp {

const Codec& codec_reference(CodecId id) {
  const auto index = static_cast<std::size_t>(id);
  return index < codecs::kTable.size() ? codecs::kTable[index] : codec(id);
}

}  // namespace ringdp
