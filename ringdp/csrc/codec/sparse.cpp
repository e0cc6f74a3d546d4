#include "codec/sparse.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "base/error.h"
#include "codec/sparse_scan.h"
#include "kernels/half.h"

namespace ringdp::sparse {
namespace {

using kernels::float_to_half;
using kernels::half_to_float;

static_assert(kBlock == kScanned);

enum Kind : uint32_t { kSparse = 0, kDense = 1 };

struct Header {
  uint32_t kind;
  uint32_t entries;
  float scale;
  uint32_t zero;
};
static_assert(sizeof(Header) == 16 && std::endian::native == std::endian::little);

constexpr uint32_t kInfinity = 0x7f800000u;
constexpr std::size_t kMostInBlock = 255;  // what a byte counts

std::size_t blocks_of(std::size_t count) { return (count + kBlock - 1) / kBlock; }

[[noreturn]] void refuse(const std::string& why) { throw Error(ErrorKind::kValue, "a sparse code: " + why); }

Header header_of(std::span<const std::byte> code) {
  Header header;
  std::memcpy(&header, code.data(), sizeof header);
  return header;
}

uint16_t half_at(const std::byte* at) {
  uint16_t half;
  std::memcpy(&half, at, sizeof half);
  return half;
}

// A power of two by which values up to `largest` fit float16, with its normal numbers reaching 2^-28 of that.
float scale_for(float largest) {
  if (largest == 0) return 1.0f;
  return std::ldexp(1.0f, std::max(std::ilogb(largest) - 14, -126));
}

// Reads a checked code block by block, in order.
class Reader {
 public:
  Reader(std::span<const std::byte> code, std::size_t count)
      : header_(header_of(code)),
        count_(count),
        counts_(code.data() + sizeof(Header)),
        places_(counts_ + blocks_of(count)),
        values_(header_.kind == kDense ? counts_ : places_ + header_.entries) {}

  float scale() const { return header_.scale; }

  // Calls `use(place, value)` for each entry of the next block.
  template <class Use>
  void next(Use use) {
    if (header_.kind == kDense) {
      const std::size_t n = std::min(kBlock, count_ - begin_);
      for (std::size_t i = 0; i < n; ++i, values_ += 2) use(i, half_to_float(half_at(values_)) * header_.scale);
    } else {
      for (auto left = std::to_integer<std::size_t>(*counts_++); left > 0; --left, values_ += 2)
        use(std::to_integer<std::size_t>(*places_++), half_to_float(half_at(values_)) * header_.scale);
    }
    begin_ += kBlock;
  }

 private:
  Header header_;
  std::size_t count_;
  const std::byte* counts_;
  const std::byte* places_;
  const std::byte* values_;
  std::size_t begin_ = 0;
};

// Collects entries in order. The code is dense where that is shorter, or where a block has more entries than a byte
// counts.
class Writer {
 public:
  Writer(std::size_t count, std::size_t expected) : count_(count) {
    counts_.reserve(blocks_of(count));
    places_.reserve(expected);
    values_.reserve(expected);
  }

  void begin_block() { counts_.push_back(0); }
  void add(std::size_t place, float value) {
    dense_ = ++counts_.back() > kMostInBlock || dense_;
    places_.push_back(static_cast<uint8_t>(place));
    values_.push_back(value);
    largest_ = std::max(largest_, std::fabs(value));
  }
  std::size_t entries() const { return values_.size(); }

  // Calls `sent(index, value, decoded)` for each entry. With an entry that is not finite the code decodes to NaN.
  template <class Sent>
  Code code(bool finite, Sent sent) const {
    const float scale = finite ? scale_for(largest_) : std::numeric_limits<float>::quiet_NaN();
    const float inverse = 1.0f / scale;
    const std::size_t sparse = counts_.size() + 3 * values_.size();
    const bool dense = dense_ || sparse > 2 * count_;
    Code code(sizeof(Header) + (dense ? 2 * count_ : sparse));
    const Header header{dense ? kDense : kSparse, static_cast<uint32_t>(values_.size()), scale, 0};
    std::memcpy(code.data(), &header, sizeof header);
    std::byte* at = code.data() + sizeof header;
    if (!dense) {
      for (const uint16_t n : counts_) *at++ = static_cast<std::byte>(n);
      at = std::copy_n(reinterpret_cast<const std::byte*>(places_.data()), places_.size(), at);
    }
    for (std::size_t block = 0, entry = 0; block < counts_.size(); ++block) {
      for (std::size_t i = 0; i < counts_[block]; ++i, ++entry) {
        const std::size_t index = block * kBlock + places_[entry];
        const uint16_t half = float_to_half(values_[entry] * inverse);
        std::memcpy(at + 2 * (dense ? index : entry), &half, sizeof half);
        sent(index, values_[entry], half_to_float(half) * scale);
      }
    }
    return code;
  }

 private:
  std::size_t count_;
  bool dense_ = false;
  float largest_ = 0;
  std::vector<uint16_t> counts_;
  std::vector<uint8_t> places_;
  std::vector<float> values_;
};

// Decodes to NaN everywhere.
Code spoilt(std::size_t count) {
  Writer writer(count, 0);
  for (std::size_t block = 0; block < blocks_of(count); ++block) writer.begin_block();
  return writer.code(false, [](std::size_t, float, float) {});
}

}  // namespace

Selected select(const float* x, const float* residual, float* new_residual, float factor, float threshold,
                std::size_t most, std::size_t count, std::size_t equals) {
  const auto least = std::bit_cast<uint32_t>(std::max(threshold, kLeastThreshold));
  const Scan scan{x, residual, new_residual, factor, 1.0f, least};
  const ScanBlock look = scan_block(current_isa());
  Writer writer(count, std::min(most, count));
  Selected selected;
  bool finite = true;
  alignas(64) float v[kBlock];
  uint64_t large[kBlock / 64];
  for (std::size_t at = 0; at < count; at += kBlock) {
    writer.begin_block();
    if (!look(v, large, scan, at, std::min(kBlock, count - at))) continue;
    for (std::size_t word = 0; word < kBlock / 64; ++word) {
      for (uint64_t bits = large[word]; bits != 0; bits &= bits - 1) {
        const std::size_t place = 64 * word + static_cast<std::size_t>(std::countr_zero(bits));
        const uint32_t magnitude = std::bit_cast<uint32_t>(v[place]) & 0x7fffffffu;
        finite = finite && magnitude < kInfinity;
        ++selected.found;
        const bool at_threshold = magnitude == scan.threshold;
        if (writer.entries() == most || (at_threshold && equals == 0)) continue;
        if (at_threshold) --equals;
        writer.add(place, v[place]);
      }
    }
  }
  selected.entries = writer.entries();
  const float inverse_factor = 1.0f / factor;
  selected.code = writer.code(finite, [&](std::size_t index, float value, float sent) {
    if (residual != nullptr) new_residual[index] = (value - sent) * inverse_factor;
  });
  return selected;
}

void check(std::span<const std::byte> code, std::size_t count) {
  if (code.size() < sizeof(Header)) refuse(std::to_string(code.size()) + " bytes are not a header");
  const Header header = header_of(code);
  const std::size_t blocks = blocks_of(count);
  const std::size_t wanted =
      sizeof(Header) + (header.kind == kDense ? 2 * count : blocks + 3 * std::size_t{header.entries});
  if (header.kind > kDense || header.zero != 0) refuse("its header is invalid");
  if (header.entries > count || code.size() != wanted)
    refuse(std::to_string(code.size()) + " bytes for " + std::to_string(header.entries) + " of " +
           std::to_string(count) + " elements, which take " + std::to_string(wanted));
  if (header.kind == kDense) return;
  const std::byte* counts = code.data() + sizeof(Header);
  const std::byte* places = counts + blocks;
  std::size_t left = header.entries;
  for (std::size_t block = 0; block < blocks; ++block) {
    const auto n = std::to_integer<std::size_t>(counts[block]);
    if (n > left) refuse("its blocks have more than its " + std::to_string(header.entries) + " entries");
    left -= n;
    const std::size_t end = std::min(kBlock, count - block * kBlock);
    for (std::size_t i = 0, next = 0; i < n; ++i) {
      const auto place = std::to_integer<std::size_t>(*places++);
      if (place < next || place >= end)
        refuse("index " + std::to_string(block * kBlock + place) + " of " + std::to_string(count) +
               " elements is out of range or order");
      next = place + 1;
    }
  }
  if (left != 0) refuse("its blocks have less than its " + std::to_string(header.entries) + " entries");
}

std::size_t entries(std::span<const std::byte> code) { return header_of(code).entries; }

void decode_set(float* out, std::span<const std::byte> code, std::size_t count) {
  Reader reader(code, count);
  if (!std::isfinite(reader.scale())) return std::fill_n(out, count, std::numeric_limits<float>::quiet_NaN()), void();
  for (std::size_t at = 0; at < count; at += kBlock) {
    std::fill_n(out + at, std::min(kBlock, count - at), 0.0f);
    reader.next([&](std::size_t place, float value) { out[at + place] = value; });
  }
}

Code merge(std::span<const std::span<const std::byte>> codes, float divisor, float* lost, float back,
           std::size_t count) {
  std::vector<Reader> readers;
  std::size_t expected = 0;
  bool finite = true;
  for (const auto& code : codes) {
    readers.emplace_back(code, count);
    finite = finite && std::isfinite(readers.back().scale());
    expected += entries(code);
  }
  Writer writer(count, std::min(expected, count));
  alignas(64) float sum[kBlock] = {};
  for (std::size_t at = 0; finite && at < count; at += kBlock) {
    writer.begin_block();
    uint64_t there[kBlock / 64] = {};
    for (Reader& reader : readers) {
      reader.next([&](std::size_t place, float value) {
        sum[place] += value;
        there[place / 64] |= uint64_t{1} << place % 64;
      });
    }
    for (std::size_t word = 0; word < kBlock / 64; ++word) {
      for (uint64_t bits = there[word]; bits != 0; bits &= bits - 1) {
        const std::size_t place = 64 * word + static_cast<std::size_t>(std::countr_zero(bits));
        const float mean = sum[place] / divisor;
        finite = finite && std::isfinite(mean);
        writer.add(place, mean);
        sum[place] = 0;
      }
    }
  }
  if (!finite) return spoilt(count);
  return writer.code(true, [&](std::size_t index, float mean, float sent) {
    if (lost != nullptr) lost[index] += (mean - sent) * back;
  });
}

}  // namespace ringdp::sparse
