// The CUDA kernels, run by the emulation in emulated_cuda/: codes, sums and residuals are to the bit what the
// references of tests/core make of them, whatever the length and the alignment, and nothing beside the buffers is
// touched.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "at_once.h"
#include "codec/codec.h"
#include "cuda/kernels.h"
#include "guarded.h"
#include "kernels/elements.h"
#include "references.h"
#include "testing.h"

namespace ringdp {
namespace {

using kernels::one_nan;
using kernels::Sum;
using testing::Guarded;
using Data = std::vector<float>;
using Code = std::vector<std::byte>;

constexpr std::size_t kSizes[] = {0,   1,   2,   31,  32,   33,   63,   64,   65,   96,   127,  255,
                                  256, 257, 300, 511, 1021, 2047, 4095, 4096, 4097, 8191, 8192, 8193};
constexpr float kInfinite = std::numeric_limits<float>::infinity();
constexpr float kFactor = 8.0f;

template <class Body>
void for_every_codec(Body&& body) {
  for (int id = 0; id < kCodecCount; ++id) body(static_cast<CodecId>(id), codec_reference(static_cast<CodecId>(id)));
}

// Stretches of 64 elements of every kind there is; infinities and NaNs with payloads only where asked for.
Data mixture(std::size_t count, std::mt19937& random, bool finite) {
  std::normal_distribution<float> normal;
  Data x(count);
  unsigned kind = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (i % 64 == 0) kind = static_cast<unsigned>(random()) % (finite ? 8 : 10);
    const float v = normal(random);
    switch (kind) {
      case 0:
        x[i] = std::copysign(0.0f, v);
        break;
      case 1:
        x[i] = v * 1e-36f;
        break;
      case 2:
        x[i] = std::ldexp(v, -140);
        break;
      case 3:
        x[i] = std::round(v * 40.0f) + 0.5f;
        break;
      case 4:
        x[i] = v * 60000.0f;  // about where float16 ends
        break;
      case 5:
        x[i] = std::clamp(v, -1.0f, 1.0f) * 3.3e38f;
        break;
      case 8:
        x[i] = random() % 16 == 0 ? std::copysign(kInfinite, v) : v;
        break;
      case 9:
        x[i] = random() % 16 == 0 ? bits_as<float>(static_cast<uint32_t>(random()) | 0x7f800001u) : v;
        break;
      default:
        x[i] = v * 1e-3f;
    }
  }
  return x;
}

// Of no bytes, too, there is an address.
Code code_of(std::size_t bytes) {
  Code code;
  code.reserve(bytes + 1);
  code.resize(bytes);
  return code;
}

Code random_bytes(std::size_t count, std::mt19937& random) {
  Code bytes(count);
  for (std::byte& it : bytes) it = static_cast<std::byte>(random());
  return bytes;
}

// Where the parts of a run begin, after an aligned address: elements and bytes.
struct Offsets {
  std::size_t floats, residuals, code;
};
constexpr Offsets kOffsets[] = {{0, 0, 0}, {4, 8, 16}, {0, 0, 2}, {1, 0, 0}, {0, 3, 4}, {0, 0, 1}, {2, 1, 3}};

// Every size at two or three places, every place with eight sizes.
template <class Body>
void for_every_place(Body&& body) {
  for (std::size_t at = 0; at < std::size(kOffsets); ++at)
    for (std::size_t size = at % 3; size < std::size(kSizes); size += 3) body(kOffsets[at], kSizes[size]);
}

std::string where(const Codec& codec, std::size_t count, const Offsets& at) {
  return std::string(codec.name) + ", " + std::to_string(count) + " elements, floats at " + std::to_string(at.floats) +
         ", residuals at " + std::to_string(at.residuals) + ", code at " + std::to_string(at.code);
}

struct FeedbackBuffers {
  Data old;
  Guarded<float> both[2];
  Guarded<int32_t> which;

  FeedbackBuffers(const Data& residual, std::size_t offset, int32_t current)
      : old(residual),
        both{Guarded<float>(residual.size(), offset), Guarded<float>(residual.size(), offset)},
        which(1) {
    which[0] = current;
    std::copy(old.begin(), old.end(), both[current].data());
  }
  cuda::Feedback feedback() { return {{both[0].data(), both[1].data()}, which.data()}; }
  bool wrote(const Data& next) {
    const int32_t current = which[0];
    return both[current].holds(old) && both[1 - current].holds(next) && both[0].intact() && both[1].intact() &&
           which.intact();
  }
};

struct EncodeCase {
  Offsets at;
  Data values;
  Guarded<float> x;
  Guarded<std::byte> code;
  std::unique_ptr<FeedbackBuffers> fed;

  EncodeCase(const Codec& codec, Data v, const Offsets& offsets)
      : at(offsets), values(std::move(v)), x(values, at.floats), code(codec.encoded_bytes(values.size()), at.code) {}

  // Against the reference; whether it found all finite.
  bool check_results(const Codec& codec) {
    const std::size_t n = values.size();
    const std::string here = where(codec, n, at) + (fed ? ", feedback" : "");
    Code wanted = code_of(code.size());
    Encoded seen;
    if (fed) {
      Data next(n);
      seen = codec.compress_with_feedback(wanted.data(), values.data(), fed->old.data(), next.data(), kFactor, n);
      CHECK_MSG(fed->wrote(next), here + ": residuals");
    } else {
      seen = codec.compress(wanted.data(), values.data(), n);
    }
    CHECK_MSG(code.holds(wanted), here + ": code");
    CHECK_MSG(x.holds(values) && x.intact() && code.intact(), here + ": beside it");
    return seen == Encoded::kFinite;
  }
};

CASE("encode gives the bits of the reference, with and without feedback, all runs in one call") {
  std::mt19937 random(1);
  for_every_codec([&](CodecId id, const Codec& codec) {
    std::vector<EncodeCase> cases;
    int turn = 0;
    for_every_place([&](const Offsets& at, std::size_t n) {
      EncodeCase& it = cases.emplace_back(codec, mixture(n, random, turn % 3 != 0), at);
      if (++turn % 2 == 0)
        it.fed = std::make_unique<FeedbackBuffers>(mixture(n, random, true), at.residuals, turn / 2 % 2);
    });
    std::vector<cuda::EncodeRun> runs;
    for (EncodeCase& it : cases)
      runs.push_back({it.x.data(), it.code.data(), it.values.size(), it.fed ? it.fed->feedback() : cuda::Feedback{}});
    Guarded<int32_t> flag(1);
    flag[0] = 0;
    const std::size_t before = emulated::launches;
    cuda::encode(id, runs, kFactor, flag.data(), nullptr);
    CHECK(emulated::launches - before < runs.size() / 10);
    bool finite = true;
    for (EncodeCase& it : cases) finite &= it.check_results(codec);
    CHECK_EQ(flag[0], finite ? 0 : 1);
    CHECK(flag.intact());
  });
}

CASE("decode gives the bits of the reference") {
  std::mt19937 random(2);
  for_every_codec([&](CodecId id, const Codec& codec) {
    std::vector<Data> wanted;
    std::vector<Guarded<float>> out;
    std::vector<Guarded<std::byte>> codes;
    std::vector<cuda::DecodeRun> runs;
    std::vector<Offsets> places;
    for_every_place([&](const Offsets& at, std::size_t n) {
      const Data x = mixture(n, random, n % 2 == 0);
      Code code = code_of(codec.encoded_bytes(n));
      codec.compress(code.data(), x.data(), n);
      codes.emplace_back(code, at.code);
      places.push_back(at);
      runs.push_back({out.emplace_back(n, at.floats).data(), codes.back().data(), n});
      codec.decode_set(wanted.emplace_back(n).data(), code.data(), n);
    });
    cuda::decode_set(id, runs, nullptr, nullptr);
    for (std::size_t i = 0; i < runs.size(); ++i) {
      const std::string here = where(codec, runs[i].count, places[i]);
      CHECK_MSG(out[i].holds(wanted[i]), here);
      CHECK_MSG(out[i].intact() && codes[i].intact(), here + ": beside it");
    }
  });
}

CASE("the flag says what inspect says") {
  std::mt19937 random(3);
  Guarded<int32_t> flag(1);
  for_every_codec([&](CodecId id, const Codec& codec) {
    for (const std::size_t n : {1, 257, 1000})
      for (int turn = 0; turn < 12; ++turn) {
        Data x = mixture(n, random, true);
        if (turn % 3 == 1) x[n - 1] = turn % 2 == 0 ? kInfinite : -std::nanf("");
        if (turn % 3 == 2) x[n / 2] = std::numeric_limits<float>::max();  // some scales are rounded up
        Code code = code_of(codec.encoded_bytes(n));
        flag[0] = 0;
        const cuda::EncodeRun encode{x.data(), code.data(), n, {}};
        cuda::encode(id, {&encode, 1}, 1.0f, flag.data(), nullptr);
        CHECK_EQ(flag[0], codec.compress(code.data(), x.data(), n) == Encoded::kFinite ? 0 : 1);
        if (turn % 4 == 3) code = random_bytes(code.size(), random);
        flag[0] = 0;
        const cuda::DecodeRun decode{x.data(), code.data(), n};
        cuda::decode_set(id, {&decode, 1}, flag.data(), nullptr);
        CHECK_EQ(flag[0], codec.inspect(code.data(), n) == Encoded::kFinite ? 0 : 1);
      }
  });
}

CASE("every whole number has the reference's code, and what is half-way between two") {
  constexpr float kScale = 0x1p-10f;
  Data x;
  for (int twice = -254; twice <= 254; ++twice) {
    if (x.size() % 64 == 0) x.push_back(-127 * kScale);  // the block's extreme: the scale of nf4 and int8 is kScale
    x.push_back(static_cast<float>(twice) / 2 * kScale);
  }
  for_every_codec([&](CodecId id, const Codec& codec) {
    Code code = code_of(codec.encoded_bytes(x.size())), wanted = code_of(code.size());
    codec.compress(wanted.data(), x.data(), x.size());
    const cuda::EncodeRun run{x.data(), code.data(), x.size(), {}};
    cuda::encode(id, {&run, 1}, 1.0f, nullptr, nullptr);
    CHECK_MSG(code == wanted, std::string(codec.name));
  });
}

// A code that no encoder writes: its NaN is not specified.
CASE("any bytes decode as in the reference") {
  std::mt19937 random(4);
  for_every_codec([&](CodecId id, const Codec& codec) {
    for (const std::size_t n : kSizes) {
      Guarded<std::byte> code(random_bytes(codec.encoded_bytes(n), random), n % 4);
      Guarded<float> out(n, n % 3);
      Data wanted(n);
      codec.decode_set(wanted.data(), code.data(), n);
      const cuda::DecodeRun run{out.data(), code.data(), n};
      cuda::decode_set(id, {&run, 1}, nullptr, nullptr);
      bool same = true;
      for (std::size_t i = 0; i < n; ++i)
        same &= bits_as<uint32_t>(one_nan(out[i])) == bits_as<uint32_t>(one_nan(wanted[i]));
      CHECK_MSG(same && out.intact() && code.intact(), where(codec, n, {n % 3, 0, n % 4}));
    }
  });
}

struct FoldCase {
  Offsets at;
  std::size_t stride;
  Data values;
  Guarded<float> x;
  Guarded<std::byte> codes, code;
  std::unique_ptr<FeedbackBuffers> fed;

  FoldCase(const Codec& codec, std::size_t n, int sources, int own, const Offsets& offsets, bool finite,
           std::mt19937& random)
      : at(offsets),
        stride(codec.encoded_bytes(n) + offsets.code),
        values(mixture(n, random, finite)),
        x(values, at.floats),
        codes(static_cast<std::size_t>(sources) * stride, at.code),
        code(codec.encoded_bytes(n), at.code) {
    for (int s = 0; s < sources; ++s)
      if (s != own)
        codec.compress(codes.data() + static_cast<std::size_t>(s) * stride, mixture(n, random, finite).data(), n);
  }

  bool check_results(const Codec& codec, int sources, int own, float divisor) {
    const std::size_t n = values.size();
    Data v(n), term(n), next(n);
    for (int s = 0; s < sources; ++s) {
      if (s != own) codec.decode_set(term.data(), codes.data() + static_cast<std::size_t>(s) * stride, n);
      for (std::size_t i = 0; i < n; ++i) {
        const float it = s == own ? values[i] : term[i];
        v[i] = s == 0 ? it : Sum::apply(v[i], it);
      }
    }
    for (float& it : v) it = one_nan(divisor > 1 ? it / divisor : it);
    Code wanted = code_of(code.size());
    const Encoded seen =
        fed ? codec.compress_with_feedback(wanted.data(), v.data(), fed->old.data(), next.data(), kFactor, n)
            : codec.compress(wanted.data(), v.data(), n);
    const std::string here = where(codec, n, at) + ", rank " + std::to_string(own) + " of " + std::to_string(sources);
    CHECK_MSG(code.holds(wanted), here + ": code");
    if (fed) CHECK_MSG(fed->wrote(next), here + ": residuals");
    CHECK_MSG(x.holds(values) && x.intact() && codes.intact() && code.intact(), here + ": beside it");
    return seen == Encoded::kFinite;
  }
};

CASE("reduce_codes adds in order of rank, divides and encodes, to the bit") {
  std::mt19937 random(5);
  for_every_codec([&](CodecId id, const Codec& codec) {
    for (auto [sources, own] : {std::pair(1, 0), {2, 1}, {3, 0}, {5, 2}, {5, 4}}) {
      const bool finite = (sources + own) % 3 != 0;
      const float divisor = own % 2 == 0 ? static_cast<float>(sources) : 1.0f;
      std::vector<FoldCase> cases;
      for (const Offsets& at : kOffsets)
        for (const std::size_t n : {std::size_t{0}, std::size_t{65}, std::size_t{511 + random() % 700}}) {
          FoldCase& it = cases.emplace_back(codec, n, sources, own, at, finite, random);
          if (random() % 2 == 0)
            it.fed = std::make_unique<FeedbackBuffers>(mixture(n, random, true), at.residuals, random() % 2);
        }
      std::vector<cuda::ReduceRun> runs;
      for (FoldCase& it : cases)
        runs.push_back({it.x.data(), it.codes.data(), it.stride, it.code.data(), it.values.size(),
                        it.fed ? it.fed->feedback() : cuda::Feedback{}});
      int32_t flag = 0;
      cuda::reduce_codes(id, runs, sources, own, divisor, kFactor, &flag, nullptr);
      bool all_finite = true;
      for (FoldCase& it : cases) all_finite &= it.check_results(codec, sources, own, divisor);
      CHECK_EQ(flag, all_finite ? 0 : 1);
    }
  });
  CHECK_THROWS(ErrorKind::kValue, cuda::reduce_codes(CodecId::kInt8, {}, 2, 2, 1.0f, 1.0f, nullptr, nullptr));
}

template <class Bits>
void find_everywhere(DType dtype, Bits infinity, Bits nan, Bits largest) {
  for (const std::size_t n : {0, 1, 3, 17, 1000, 9000})
    for (const std::size_t offset : {0, 1, 7}) {
      Guarded<Bits> x(std::vector<Bits>(n, largest), offset);
      int32_t found = 0;
      cuda::find_non_finite(x.data(), n, dtype, &found, nullptr);
      CHECK_EQ(found, 0);
      for (const std::size_t at : {std::size_t{0}, n / 3, n / 2, n - 1}) {
        if (at >= n) continue;
        x[at] = at % 2 == 0 ? infinity : nan;
        found = 0;
        cuda::find_non_finite(x.data(), n, dtype, &found, nullptr);
        CHECK_MSG(found == 1, std::string(dtype_name(dtype)) + " " + std::to_string(at) + " of " + std::to_string(n));
        x[at] = largest;
      }
      CHECK(x.intact());
    }
}

CASE("what is not finite is found, wherever it is, and nothing else") {
  find_everywhere<uint16_t>(DType::kFloat16, 0xfc00, 0x7c01, 0xfbff);
  find_everywhere<uint16_t>(DType::kBfloat16, 0x7f80, 0xff81, 0x7f7f);
  find_everywhere<uint32_t>(DType::kFloat32, 0x7f800000, 0xff800001, 0xff7fffff);
  find_everywhere<uint64_t>(DType::kFloat64, 0xfff0000000000000, 0x7ff0000000000001, 0x7fefffffffffffff);
  CHECK_THROWS(ErrorKind::kValue, cuda::find_non_finite(nullptr, 0, DType::kInt32, nullptr, nullptr));
}

CASE("select finds in ascending order all that is large enough") {
  std::mt19937 random(7);
  for (const std::size_t n : {0, 1, 31, 33, 8191, 8192, 8193, 20000})
    for (const float threshold : {0.0f, 0.5f, kInfinite})
      for (const bool all_fit : {true, false}) {
        const bool finite = all_fit == (n % 2 == 0);
        Data values(n);
        for (float& v : values) v = std::normal_distribution<float>()(random);
        if (!finite && n > 0) values[n / 2] = std::nanf(""), values[n - 1] = -kInfinite;
        std::vector<uint32_t> index;
        Data wanted;
        for (std::size_t i = 0; i < n; ++i)
          if (!(std::fabs(values[i]) < threshold))
            index.push_back(static_cast<uint32_t>(i)), wanted.push_back(values[i]);
        const auto found = static_cast<uint32_t>(index.size());
        if (!all_fit) index.resize(found / 2), wanted.resize(found / 2);
        Guarded<float> x(values, n % 4), value(wanted.size());
        Guarded<uint32_t> places(index.size()), selected(1);
        Guarded<uint32_t> scratch(cuda::select_scratch_bytes(n) / sizeof(uint32_t));
        cuda::select(x.data(), n, threshold, places.data(), value.data(), index.size(), selected.data(), scratch.data(),
                     nullptr);
        const std::string here = std::to_string(n) + " elements, threshold " + std::to_string(threshold);
        CHECK_MSG(selected[0] == found && places.holds(index) && value.holds(wanted), here);
        CHECK_MSG(x.intact() && value.intact() && places.intact() && selected.intact() && scratch.intact(), here);
        CHECK_MSG(cuda::select_scratch_bytes(n) <= n / 8 + n / 2048 + 4 * 257, here);
      }
}

CASE("commit changes sides, unless something was not finite") {
  for (const std::size_t n : {0, 1, 300, 481, 1000}) {
    std::vector<int32_t> which(n);
    std::vector<int32_t*> all;
    for (std::size_t i = 0; i < n; ++i) which[i] = i % 3 == 0, all.push_back(&which[i]);
    const std::vector<int32_t> before = which;
    int32_t non_finite = 1;
    cuda::commit(all, &non_finite, nullptr);
    CHECK(which == before);
    non_finite = 0;
    cuda::commit(all, &non_finite, nullptr);
    for (std::size_t i = 0; i < n; ++i) CHECK(which[i] == 1 - before[i]);
    cuda::commit(all, nullptr, nullptr);
    CHECK(which == before);
  }
}

CASE("a launch that fails is an error in words") {
  const float x = 1;
  std::byte code[8];
  const cuda::EncodeRun run{&x, code, 1, {}};
  emulated::fail_next_launch = true;
  const std::string said =
      CHECK_THROWS(ErrorKind::kSystem, cuda::encode(CodecId::kInt8, {&run, 1}, 1.0f, nullptr, nullptr));
  CHECK_EQ(said, std::string("cuda: cannot encode: cudaErrorEmulated: asked for by a test"));
  CHECK(cuda::available());
}

}  // namespace
}  // namespace ringdp
