// The codecs of every instruction set this CPU has against the element-by-element reference, to the bit, and the
// reference against its laws.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "codec/codec.h"
#include "guarded.h"
#include "instruction_sets.h"
#include "kernels/kernels.h"
#include "references.h"
#include "testing.h"

namespace ringdp {
namespace {

using testing::on_every_isa;

constexpr std::array<std::size_t, 22> kSizes = {0,   1,   2,   31,  32,  33,  63,   64,   65,   96,   127,
                                                255, 256, 257, 300, 511, 512, 1021, 1024, 2047, 4096, 5000};

template <class Body>
void for_every_codec(Body&& body) {
  for (int id = 0; id < kCodecCount; ++id) body(static_cast<CodecId>(id));
}

using Code = testing::Guarded<std::byte>;
using Data = std::vector<float>;

struct Kind {
  const char* name;
  Data (*make)(std::size_t, std::mt19937&);
};

Data gaussian(std::size_t n, std::mt19937& random, float sigma) {
  std::normal_distribution<float> normal(0.0f, sigma);
  Data x(n);
  for (float& v : x) v = normal(random);
  return x;
}

const std::array<Kind, 9> kKinds = {{
    {"gaussian", [](std::size_t n, std::mt19937& r) { return gaussian(n, r, 1e-3f); }},
    {"zeros", [](std::size_t n, std::mt19937&) { return Data(n, 0.0f); }},
    {"1e-30 beside 1e30",
     [](std::size_t n, std::mt19937& r) {
       Data x = gaussian(n, r, 1e-30f);
       for (std::size_t i = 0; i < n; i += 7) x[i] = 1e30f;
       return x;
     }},
    {"subnormal",
     [](std::size_t n, std::mt19937& r) {
       Data x = gaussian(n, r, 1.0f);
       for (float& v : x) v = std::copysign(std::ldexp(std::fabs(v), -140), v);
       return x;
     }},
    {"tiny", [](std::size_t n, std::mt19937& r) { return gaussian(n, r, 3e-37f); }},
    {"blocks of all sizes",
     [](std::size_t n, std::mt19937& r) {
       Data x = gaussian(n, r, 1.0f);
       for (std::size_t i = 0; i < n; ++i) {
         const std::size_t block = i / 64 * 7 % 11;
         x[i] = block == 3 ? 0.0f : block == 5 ? x[i] * 1e-36f : block == 7 ? x[i] * 1e-42f : x[i];
       }
       return x;
     }},
    {"nearly too large",
     [](std::size_t n, std::mt19937& r) {
       Data x = gaussian(n, r, 1.0f);
       for (float& v : x)
         v = std::copysign(std::numeric_limits<float>::max(), v) * (std::fabs(v) < 1.0f ? 0.999f : 1.0f);
       return x;
     }},
    {"one NaN",
     [](std::size_t n, std::mt19937& r) {
       Data x = gaussian(n, r, 1.0f);
       if (n > 0) x[n / 2] = std::numeric_limits<float>::quiet_NaN();
       return x;
     }},
    {"one infinity and halves",
     [](std::size_t n, std::mt19937& r) {
       Data x = gaussian(n, r, 40.0f);
       for (float& v : x) v = std::round(v) + 0.5f;
       if (n > 0) x[n - 1] = -std::numeric_limits<float>::infinity();
       return x;
     }},
}};

bool same(const Data& a, const Data& b) {
  return a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

template <class Body>
void for_every_input(Body&& body) {
  std::mt19937 random(7);
  for (const Kind& kind : kKinds)
    for (const std::size_t n : kSizes) body(kind, kind.make(n, random));
}

bool all_finite(const Data& x, std::size_t begin, std::size_t end) {
  for (std::size_t i = begin; i < end && i < x.size(); ++i)
    if (!std::isfinite(x[i])) return false;
  return true;
}

CASE("every instruction set gives the bits of the reference") {
  std::mt19937 random(3);
  for_every_codec([&](CodecId id) {
    const Codec& plain = codec_reference(id);
    for_every_input([&](const Kind& kind, const Data& x) {
      const std::size_t n = x.size(), bytes = plain.encoded_bytes(n);
      const Data residual = gaussian(n, random, 1e-4f);
      Code expected(bytes, 0), expected_fed(bytes, 0);
      Data new_residual(n), decoded(n), sum = residual;
      const Encoded seen = plain.compress(expected.data(), x.data(), n);
      const Encoded fed =
          plain.compress_with_feedback(expected_fed.data(), x.data(), residual.data(), new_residual.data(), 8.0f, n);
      plain.decode_set(decoded.data(), expected.data(), n);
      plain.decode_add(sum.data(), expected.data(), n);
      const Encoded inside = plain.inspect(expected.data(), n);
      CHECK_MSG(inside == (all_finite(decoded, 0, n) ? Encoded::kFinite : Encoded::kNonFinite), kind.name);
      on_every_isa([&](const std::string& isa) {
        const Codec& it = codec(id);
        const auto where = [&](const char* what) {
          return std::string(it.name) + " on " + isa + ", " + kind.name + ", " + std::to_string(n) + " elements" + what;
        };
        for (const std::size_t offset : {0, 1}) {
          Code code(bytes, offset), code_fed(bytes, offset);
          Data residual_out = residual, residual_beside(n), out(n), total = residual;
          CHECK_MSG(it.encoded_bytes(n) == bytes, where(""));
          CHECK_MSG(it.compress(code.data(), x.data(), n) == seen, where(""));
          CHECK_MSG(std::memcmp(code.data(), expected.data(), bytes) == 0, where(""));
          const Encoded now =
              it.compress_with_feedback(code_fed.data(), x.data(), residual_out.data(), residual_out.data(), 8.0f, n);
          CHECK_MSG(now == fed, where(""));
          CHECK_MSG(std::memcmp(code_fed.data(), expected_fed.data(), bytes) == 0, where(", feedback"));
          CHECK_MSG(same(residual_out, new_residual), where(", residual"));
          it.compress_with_feedback(code_fed.data(), x.data(), residual.data(), residual_beside.data(), 8.0f, n);
          CHECK_MSG(same(residual_beside, new_residual), where(", residual beside the old one"));
          CHECK_MSG(it.inspect(code.data(), n) == inside, where(""));
          it.decode_set(out.data(), code.data(), n);
          CHECK_MSG(same(out, decoded), where(", decoded"));
          it.decode_add(total.data(), code.data(), n);
          CHECK_MSG(same(total, sum), where(", added"));
          CHECK_MSG(code.intact() && code_fed.intact(), where(""));
        }
      });
    });
  });
}

// What a scale is multiplied with at most, and how far from that an element may be: half of what lies between two
// neighbours, or, opposite the element that makes a scale with a sign, a whole step.
struct Fineness {
  double steps, half;
  bool opposite = false;
};
Fineness fineness(const CodecSpec& spec) {
  Fineness out{static_cast<double>(std::max(-spec.lowest, spec.highest)), 0.5};
  out.opposite = spec.levels.empty() && spec.highest < -spec.lowest;
  for (std::size_t i = 1; i < spec.levels.size(); ++i)
    out.half = std::max(out.half, (spec.levels[i] - spec.levels[i - 1]) / 2.0);
  if (!spec.levels.empty())  // above the highest level, below the lowest
    out.half = std::max({out.half, 1.0 * spec.highest - spec.levels.back(), 1.0 * spec.levels.front() - spec.lowest});
  return out;
}

// Block codes: half a step of the block's scale, or a whole one; casts: half a unit in the last place.
CASE("what is decoded is near") {
  for_every_codec([&](CodecId id) {
    const Codec& it = codec_reference(id);
    for_every_input([&](const Kind& kind, const Data& x) {
      const std::size_t n = x.size();
      Code code(it.encoded_bytes(n), 0);
      Data out(n);
      it.compress(code.data(), x.data(), n);
      it.decode_set(out.data(), code.data(), n);
      for (std::size_t begin = 0; begin < n; begin += it.block) {
        const std::size_t end = std::min(n, begin + it.block);
        const bool finite = all_finite(x, begin, end);
        const auto [lowest, highest] = std::minmax_element(x.begin() + begin, x.begin() + end);
        const double up = std::max(*highest, 0.0f), down = std::max(-*lowest, 0.0f), absmax = std::max(up, down);
        // The scale is rounded: by 2^-9 for bfloat16, by a unit of the subnormals for tiny blocks.
        const Fineness fine = fineness(it.spec);
        const bool wide = it.spec.scale_bytes == sizeof(float);
        const double scale = absmax / fine.steps * (1 + 1.0 / 256) + (wide ? 0x1p-149 : 0x1p-133);
        for (std::size_t i = begin; i < end; ++i) {
          if (finite && it.block > 1 && absmax > 0x1.fep127 && !std::isfinite(out[i]))
            continue;  // rounded up beyond the largest float
          const bool opposite = fine.opposite && (x[i] < 0) != (down >= up);
          const double half = opposite ? 1 : fine.half;
          const double bound = absmax < 0x1p-120 ? fine.steps * scale : half * scale + absmax / 256 * !wide;
          const bool near = it.block == 1 ? finite || !std::isfinite(out[i])
                            : finite      ? std::fabs(double{x[i]} - double{out[i]}) <= bound * 1.0001
                                          : std::isnan(out[i]);
          CHECK_MSG(near, std::string(it.name) + ", " + kind.name + ", element " + std::to_string(i));
        }
      }
    });
  });
}

// The residual is exactly what the code left out: x + factor·residual = decoded + factor·new_residual, step by step.
CASE("error feedback loses nothing") {
  std::mt19937 random(11);
  for_every_codec([&](CodecId id) {
    const Codec& it = codec(id);
    for (const float factor : {1.0f, 1024.0f}) {
      const std::size_t n = 1000;
      Data residual(n, 0.0f), next(n), out(n);
      for (int step = 0; step < 20; ++step) {
        const Data x = gaussian(n, random, 0.02f * factor);
        Code code(it.encoded_bytes(n), 0);
        CHECK(it.compress_with_feedback(code.data(), x.data(), residual.data(), next.data(), factor, n) ==
              Encoded::kFinite);
        it.decode_set(out.data(), code.data(), n);
        for (std::size_t i = 0; i < n; ++i) CHECK(x[i] + factor * residual[i] == out[i] + factor * next[i]);
        residual = next;
      }
    }
  });
}

CASE("a block that is not finite leaves its residual and no other") {
  const std::size_t n = 1024;
  std::mt19937 random(5);
  for_every_codec([&](CodecId id) {
    const Codec& it = codec(id);
    Data x = gaussian(n, random, 1.0f), residual = gaussian(n, random, 0.1f), next(n, 77.0f);
    x[300] = std::numeric_limits<float>::infinity();
    Code code(it.encoded_bytes(n), 0);
    CHECK(it.compress_with_feedback(code.data(), x.data(), residual.data(), next.data(), 1.0f, n) ==
          Encoded::kNonFinite);
    const std::size_t begin = 300 / it.block * it.block;
    for (std::size_t i = 0; i < n; ++i) {
      const bool inside = i >= begin && i < begin + it.block;
      CHECK((next[i] == residual[i]) == inside);
    }
  });
}

// A loss scale that is a power of two changes scales alone.
CASE("codes do not change with a power of two") {
  std::mt19937 random(9);
  const std::size_t n = 2048;
  for_every_codec([&](CodecId id) {
    const Codec& it = codec(id);
    if (it.spec.scale_bytes == 0) return;
    const Data x = gaussian(n, random, 1e-3f);
    Data larger = x;
    for (float& v : larger) v *= 65536.0f;
    Code one(it.encoded_bytes(n), 0), other(it.encoded_bytes(n), 0);
    it.compress(one.data(), x.data(), n);
    it.compress(other.data(), larger.data(), n);
    const std::size_t scales = n / it.block * static_cast<std::size_t>(it.spec.scale_bytes);
    CHECK(std::memcmp(one.data() + scales, other.data() + scales, one.size() - scales) == 0);
    Data a(n), b(n);
    it.decode_set(a.data(), one.data(), n);
    it.decode_set(b.data(), other.data(), n);
    for (std::size_t i = 0; i < n; ++i) CHECK(a[i] * 65536.0f == b[i]);
  });
}

CASE("an element becomes the nearest level of its block") {
  constexpr int kLevels[] = {-127, -92, -68, -49, -34, -21, -11, 0, 8, 17, 27, 38, 51, 66, 85, 109};
  Data x(64, -127.0f), out(64);  // so the scale is 1
  Code code(codec(CodecId::kNf4).encoded_bytes(64), 0);
  for (int first = -127; first <= 127; first += 60) {
    for (int i = 0; i < 60; ++i) x[static_cast<std::size_t>(i)] = static_cast<float>(std::min(first + i, 126));
    on_every_isa([&](const std::string& isa) {
      codec(CodecId::kNf4).compress(code.data(), x.data(), 64);
      codec(CodecId::kNf4).decode_set(out.data(), code.data(), 64);
      for (std::size_t i = 0; i < 64; ++i) {
        float nearest = 127;
        for (const int level : kLevels) nearest = std::min(nearest, std::fabs(x[i] - static_cast<float>(level)));
        CHECK_MSG(std::fabs(x[i] - out[i]) == nearest, isa + ", " + std::to_string(x[i]));
      }
    });
  }
}

CASE("any bytes decode to something") {
  std::mt19937 random(13);
  for_every_codec([&](CodecId id) {
    on_every_isa([&](const std::string&) {
      const Codec& it = codec(id);
      for (const std::size_t n : kSizes) {
        Code code(it.encoded_bytes(n), 1);
        for (std::size_t i = 0; i < code.size(); ++i) code.data()[i] = static_cast<std::byte>(random());
        std::vector<float> out(n + 2, 123.0f);
        it.decode_set(out.data() + 1, code.data(), n);
        CHECK(out.front() == 123.0f && out.back() == 123.0f);
        const bool finite = std::all_of(out.begin(), out.end(), [](float value) { return std::isfinite(value); });
        CHECK(it.inspect(code.data(), n) == (finite ? Encoded::kFinite : Encoded::kNonFinite));
        it.decode_add(out.data() + 1, code.data(), n);
        CHECK(out.front() == 123.0f && out.back() == 123.0f);
      }
    });
  });
}

CASE("sizes are those of the wire format") {
  CHECK_EQ(codec(CodecId::kFloat16).encoded_bytes(1000), std::size_t{2000});
  CHECK_EQ(codec(CodecId::kInt8).encoded_bytes(65536), std::size_t{256 * 4 + 65536});
  CHECK_EQ(codec(CodecId::kInt8).encoded_bytes(257), std::size_t{2 * 4 + 257});
  CHECK_EQ(codec(CodecId::kInt4).encoded_bytes(65536), std::size_t{1024 * 2 + 32768});
  CHECK_EQ(codec(CodecId::kInt4).encoded_bytes(1), std::size_t{3});
  CHECK_EQ(codec(CodecId::kInt4).encoded_bytes(64 + 40), std::size_t{2 * 2 + 64});
  CHECK_EQ(codec(CodecId::kInt4).encoded_bytes(0), std::size_t{0});
  CHECK_EQ(codec(CodecId::kInt5).encoded_bytes(64 + 40), std::size_t{2 * 2 + 64 + 16});
  CHECK_EQ(codec(CodecId::kInt6).encoded_bytes(64 + 40), std::size_t{2 * 2 + 64 + 32});
  CHECK_EQ(codec(CodecId::kInt6).encoded_bytes(64 + 3), std::size_t{2 * 2 + 32 + 3 + 16 + 3});
  CHECK_EQ(codec(CodecId::kNf4).encoded_bytes(64 + 40), std::size_t{2 * 2 + 64});
  CHECK(codec_by_name("int4") == CodecId::kInt4);
  CHECK(codec_by_name("nf4") == CodecId::kNf4);
}

}  // namespace
}  // namespace ringdp
