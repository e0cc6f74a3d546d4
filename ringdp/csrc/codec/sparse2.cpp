#include "codec/sparse2.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <functional>
#include <string>

#include "base/error.h"
#include "codec/sparse_scan.h"
#include "kernels/half.h"
#include "kernels/kernels.h"

namespace ringdp::sparse2 {
namespace {

using kernels::bfloat_to_float;
using kernels::float_to_bfloat;

constexpr uint32_t kMagnitude = 0x7fffffffu;
constexpr uint32_t kInfinity = 0x7f800000u;
constexpr uint32_t kNone = 0x80000000u;  // a threshold above all magnitudes
constexpr uint32_t kLower = 1u << 20;    // from a threshold to the guess of the next: an eighth of an octave
constexpr uint16_t kLargestLevel = 0x7f7f;
constexpr uint16_t kNotFinite = 0x7fc0;
constexpr std::size_t kBlocks = kChunk / kBlock;
constexpr std::size_t kGroups = 256;
constexpr std::size_t kMany = 8;  // times what is kept: more candidates than that are worth a better threshold
constexpr uint8_t kNegative = 1 << 6, kHigh = 1 << 7;

static_assert(kChunk % sparse::kScanned == 0 && kChunk % kGroups == 0);

struct Shape {
  std::size_t n, entries, blocks;

  Shape(std::size_t count, std::size_t kept)
      : n(std::min(count, kChunk)), entries(std::min(kept, n)), blocks((n + kBlock - 1) / kBlock) {}
  std::size_t map_bytes() const { return (entries + blocks + 7) / 8; }
  std::size_t bytes() const { return 2 * sizeof(uint16_t) + map_bytes() + entries; }
};

// The map of a chunk as words, whatever its length.
using Map = std::array<uint64_t, (kChunk + kBlocks) / 64>;

[[noreturn]] void refuse(const std::string& why) { throw Error(ErrorKind::kValue, "a sparse2 code: " + why); }

uint32_t magnitude_of(float v) { return std::bit_cast<uint32_t>(v) & kMagnitude; }

// ---- The largest of a chunk ----

RINGDP_ALWAYS_INLINE void maxima_loop(int32_t* maxima, const float* v) {
  std::fill_n(maxima, kGroups, 0);
  for (std::size_t at = 0; at < kChunk; at += kGroups) {
    for (std::size_t i = 0; i < kGroups; ++i)
      maxima[i] = std::max(maxima[i], static_cast<int32_t>(magnitude_of(v[at + i])));
  }
}

void maxima_scalar(int32_t* maxima, const float* v) { maxima_loop(maxima, v); }
#if defined(__x86_64__)
RINGDP_TARGET_AVX2 void maxima_avx2(int32_t* maxima, const float* v) { maxima_loop(maxima, v); }
#endif

// A magnitude that at least `wanted` of the chunk's elements reach, and few more: that many groups have such a maximum.
uint32_t reached(const float* v, std::size_t wanted) {
  if (wanted > kGroups) return 0;
  alignas(64) int32_t maxima[kGroups];
  auto* find = maxima_scalar;
#if defined(__x86_64__)
  if (current_isa() != Isa::kScalar) find = maxima_avx2;
#endif
  find(maxima, v);
  std::nth_element(maxima, maxima + (wanted - 1), maxima + kGroups, std::greater<>());
  return static_cast<uint32_t>(maxima[wanted - 1]);
}

// Finds the entries of one chunk after the other. Between chunks: `guess_` is a threshold that about that many elements
// of the next one reach, if it is like the last one.
class Chooser {
 public:
  explicit Chooser(const Input& input) : input_(input), look_(sparse::scan_block(current_isa())) {}

  // The places of the `wanted` largest of the n elements from `at` on, ascending; their values are in v().
  std::span<const uint16_t> choose(std::size_t at, std::size_t n, std::size_t wanted) {
    std::size_t found =
        scan({input_.x, input_.residual, input_.new_residual, input_.factor, input_.decay, guess_}, at, n);
    if (found < wanted || found > kMany * wanted) {
      found = scan({v_, nullptr, nullptr, 1.0f, 1.0f, n == kChunk ? reached(v_, wanted) : 0}, 0, n);
    }
    list(n);
    std::copy_n(magnitudes_, found, sorted_);
    std::nth_element(sorted_, sorted_ + (wanted - 1), sorted_ + found, std::greater<>());
    const uint32_t threshold = sorted_[wanted - 1];
    const auto above = static_cast<std::size_t>(
        std::count_if(sorted_, sorted_ + wanted, [&](uint32_t magnitude) { return magnitude > threshold; }));
    std::size_t chosen = 0, equals = wanted - above;
    for (std::size_t i = 0; i < found; ++i) {
      const bool equal = magnitudes_[i] == threshold;
      if (magnitudes_[i] < threshold || (equal && equals == 0)) continue;
      if (equal) --equals;
      places_[chosen++] = places_[i];
    }
    guess_ = threshold - std::min(threshold, kLower);
    return {places_, chosen};
  }

  const float* v() const { return v_; }

 private:
  // Returns how many reach the threshold; `large_` says which.
  std::size_t scan(const sparse::Scan& scan, std::size_t at, std::size_t n) {
    std::size_t found = 0;
    for (std::size_t begin = 0; begin < n; begin += sparse::kScanned) {
      uint64_t* words = large_ + begin / 64;
      look_(v_ + begin, words, scan, at + begin, std::min(sparse::kScanned, n - begin));
      for (std::size_t i = 0; i < sparse::kScanned / 64; ++i)
        found += static_cast<std::size_t>(std::popcount(words[i]));
    }
    return found;
  }

  void list(std::size_t n) {
    std::size_t listed = 0;
    for (std::size_t word = 0; word * 64 < n; ++word) {
      for (uint64_t bits = large_[word]; bits != 0; bits &= bits - 1) {
        const std::size_t place = 64 * word + static_cast<std::size_t>(std::countr_zero(bits));
        places_[listed] = static_cast<uint16_t>(place);
        magnitudes_[listed++] = magnitude_of(v_[place]);
      }
    }
  }

  Input input_;
  sparse::ScanBlock look_;
  uint32_t guess_ = kNone;
  alignas(64) float v_[kChunk];
  uint64_t large_[kChunk / 64];
  uint16_t places_[kChunk];
  uint32_t magnitudes_[kChunk], sorted_[kChunk];
};

// ---- The code of a chunk ----

struct Levels {
  uint16_t low = kNotFinite, high = kNotFinite;
  double boundary = 0;  // larger magnitudes are `high`

  bool finite() const { return low != kNotFinite; }
};

// In bfloat16; no finite mean becomes an infinity.
uint16_t level_of(double sum, std::size_t terms) {
  return terms == 0 ? 0
                    : std::min(float_to_bfloat(static_cast<float>(sum / static_cast<double>(terms))), kLargestLevel);
}

Levels levels_of(const float* v, std::span<const uint16_t> places) {
  double total = 0;
  for (const uint16_t place : places) {
    if (magnitude_of(v[place]) >= kInfinity) return {};
    total += std::bit_cast<float>(magnitude_of(v[place]));
  }
  Levels levels;
  levels.boundary = total / static_cast<double>(places.size());
  double sums[2] = {};
  std::size_t terms[2] = {};
  for (const uint16_t place : places) {
    const double magnitude = std::bit_cast<float>(magnitude_of(v[place]));
    const bool high = magnitude > levels.boundary;
    sums[high] += magnitude;
    ++terms[high];
  }
  levels.low = level_of(sums[0], terms[0]);
  levels.high = level_of(sums[1], terms[1]);
  return levels;
}

// What the upper two bits of an entry stand for, times `weight`.
std::array<float, 4> values_of(const std::byte* code, float weight) {
  uint16_t levels[2];
  std::memcpy(levels, code, sizeof levels);
  const float low = bfloat_to_float(levels[0]), high = bfloat_to_float(levels[1]);
  return {low * weight, -low * weight, high * weight, -high * weight};
}

// Calls `use(entry, block)` for each entry of the map.
template <class Use>
void walk(const std::byte* map_bytes, const Shape& shape, Use use) {
  Map map{};
  std::memcpy(map.data(), map_bytes, shape.map_bytes());
  std::size_t entry = 0;
  for (std::size_t word = 0; 64 * word < 8 * shape.map_bytes(); ++word) {
    for (uint64_t bits = map[word]; bits != 0; bits &= bits - 1, ++entry)
      use(entry, 64 * word + static_cast<std::size_t>(std::countr_zero(bits)) - entry);
  }
}

// Calls `use(code, first element, shape)` for each chunk.
template <class Byte, class Use>
void for_chunks(Byte* code, std::size_t count, std::size_t kept, Use use) {
  for (std::size_t at = 0; at < count; at += kChunk) {
    const Shape shape(count - at, kept);
    use(code, at, shape);
    code += shape.bytes();
  }
}

}  // namespace

std::size_t encoded_bytes(std::size_t count, std::size_t kept) {
  const std::size_t rest = count % kChunk;
  return count / kChunk * Shape(kChunk, kept).bytes() + (rest == 0 ? 0 : Shape(rest, kept).bytes());
}

Encoded encode(std::byte* code, const Input& input, std::size_t count, std::size_t kept) {
  Chooser chooser(input);
  Encoded encoded = Encoded::kFinite;
  const float inverse_factor = 1.0f / input.factor;
  for_chunks(code, count, kept, [&](std::byte* out, std::size_t at, const Shape& shape) {
    const std::span<const uint16_t> places = chooser.choose(at, shape.n, shape.entries);
    const Levels levels = levels_of(chooser.v(), places);
    if (!levels.finite()) encoded = Encoded::kNonFinite;
    const uint16_t both[2] = {levels.low, levels.high};
    std::memcpy(out, both, sizeof both);
    const std::array<float, 4> sent = values_of(out, 1.0f);
    Map map{};
    std::byte* const map_bytes = out + sizeof both;
    std::byte* const entries = map_bytes + shape.map_bytes();
    for (std::size_t i = 0; i < places.size(); ++i) {
      const float v = chooser.v()[places[i]];
      const std::size_t bit = i + places[i] / kBlock;
      map[bit / 64] |= uint64_t{1} << bit % 64;
      const auto sign = static_cast<uint8_t>(std::bit_cast<uint32_t>(v) >> 31);
      const auto high = static_cast<uint8_t>(std::bit_cast<float>(magnitude_of(v)) > levels.boundary);
      entries[i] = static_cast<std::byte>(places[i] % kBlock + sign * kNegative + high * kHigh);
      if (input.residual != nullptr) input.new_residual[at + places[i]] = (v - sent[sign + 2 * high]) * inverse_factor;
    }
    std::memcpy(map_bytes, map.data(), shape.map_bytes());
  });
  return encoded;
}

void check(std::span<const std::byte> code, std::size_t count, std::size_t kept) {
  const std::size_t wanted = encoded_bytes(count, kept);
  if (code.size() != wanted)
    refuse(std::to_string(code.size()) + " bytes for " + std::to_string(count) + " elements, which take " +
           std::to_string(wanted));
  for_chunks(code.data(), count, kept, [&](const std::byte* chunk, std::size_t at, const Shape& shape) {
    uint16_t levels[2];
    std::memcpy(levels, chunk, sizeof levels);
    const bool marked = levels[0] == kNotFinite && levels[1] == kNotFinite;
    if (!marked && std::max(levels[0], levels[1]) > kLargestLevel) refuse("a magnitude is negative or not finite");
    const std::byte* entries = chunk + sizeof levels + shape.map_bytes();
    std::size_t seen = 0, next = 0;
    walk(chunk + sizeof levels, shape, [&](std::size_t entry, std::size_t block) {
      if (entry >= shape.entries || block >= shape.blocks) refuse("its blocks have more entries than it has");
      const std::size_t place = kBlock * block + std::to_integer<std::size_t>(entries[entry]) % kBlock;
      if (place < next || place >= shape.n)
        refuse("index " + std::to_string(at + place) + " of " + std::to_string(count) +
               " elements is out of range or order");
      next = place + 1;
      ++seen;
    });
    if (seen != shape.entries) refuse("its blocks have less entries than it has");
  });
}

Encoded decode_add(float* sum, const std::byte* code, float weight, std::size_t count, std::size_t kept) {
  bool finite = true;
  for_chunks(code, count, kept, [&](const std::byte* chunk, std::size_t at, const Shape& shape) {
    const std::array<float, 4> values = values_of(chunk, weight);
    finite = finite && values[0] == values[0];
    const std::byte* map_bytes = chunk + 2 * sizeof(uint16_t);
    const std::byte* entries = map_bytes + shape.map_bytes();
    walk(map_bytes, shape, [&](std::size_t entry, std::size_t block) {
      const auto byte = std::to_integer<std::size_t>(entries[entry]);
      sum[at + kBlock * block + byte % kBlock] += values[byte / kBlock];
    });
  });
  return finite ? Encoded::kFinite : Encoded::kNonFinite;
}

}  // namespace ringdp::sparse2
