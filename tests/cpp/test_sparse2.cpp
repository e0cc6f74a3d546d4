// sparse2's codes against a plain sort: what is kept, with which magnitudes, what is left, and bytes that are no code.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "codec/sparse2.h"
#include "instruction_sets.h"
#include "kernels/half.h"
#include "testing.h"

namespace ringdp {
namespace {

using sparse2::kChunk;
using testing::on_every_isa;
using Bytes = std::vector<std::byte>;

struct Case {
  std::size_t count, kept;
};

constexpr Case kCases[] = {{0, 64},    {1, 64},    {63, 64},     {64, 64},  {65, 64},    {300, 64},   {4095, 64},
                           {4096, 64}, {4097, 64}, {20'000, 64}, {9000, 1}, {4096, 256}, {9000, 257}, {5003, kChunk}};

std::vector<float> numbers(std::size_t count, unsigned seed, float size = 1.0f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, size);
  std::vector<float> out(count);
  for (float& it : out) it = normal(random);
  return out;
}

struct Made {
  Bytes code;
  std::vector<float> left;
  Encoded encoded;
};

Made made(const std::vector<float>& x, const std::vector<float>& residual, float factor, float decay,
          std::size_t kept) {
  Made it{Bytes(sparse2::encoded_bytes(x.size(), kept)), std::vector<float>(x.size(), -7.0f), Encoded::kFinite};
  it.encoded =
      sparse2::encode(it.code.data(), {x.data(), residual.data(), it.left.data(), factor, decay}, x.size(), kept);
  return it;
}

Bytes code_of(const std::vector<float>& x, std::size_t kept) {
  Bytes code(sparse2::encoded_bytes(x.size(), kept));
  sparse2::encode(code.data(), {x.data()}, x.size(), kept);
  return code;
}

std::vector<float> sent_of(const Bytes& code, std::size_t count, std::size_t kept) {
  sparse2::check(code, count, kept);
  std::vector<float> out(count, 0.0f);
  sparse2::decode_add(out.data(), code.data(), 1.0f, count, kept);
  return out;
}

// By a sort of each chunk.
std::vector<float> expected(const std::vector<float>& v, std::size_t kept) {
  std::vector<float> out(v.size(), 0.0f);
  for (std::size_t at = 0; at < v.size(); at += kChunk) {
    const std::size_t n = std::min(kChunk, v.size() - at), k = std::min(kept, n);
    std::vector<std::size_t> order(n);
    std::iota(order.begin(), order.end(), at);
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return std::fabs(v[a]) > std::fabs(v[b]); });
    order.resize(k);
    std::sort(order.begin(), order.end());
    double total = 0, sums[2] = {};
    std::size_t terms[2] = {};
    for (const std::size_t i : order) total += std::fabs(v[i]);
    const double mean = total / static_cast<double>(k);
    for (const std::size_t i : order) {
      const bool high = std::fabs(v[i]) > mean;
      sums[high] += std::fabs(v[i]);
      ++terms[high];
    }
    for (const std::size_t i : order) {
      const bool high = std::fabs(v[i]) > mean;
      const auto level = static_cast<float>(sums[high] / static_cast<double>(terms[high]));
      out[i] = std::copysign(kernels::bfloat_to_float(kernels::float_to_bfloat(level)), v[i]);
    }
  }
  return out;
}

std::string refusal(const Bytes& code, std::size_t count, std::size_t kept = 64) {
  try {
    sparse2::check(code, count, kept);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

CASE("sparse2 keeps the largest of each chunk and leaves the rest") {
  for (const auto [count, kept] : kCases) {
    const std::vector<float> x = numbers(count, 1), residual = numbers(count, 2, 0.5f);
    for (const float factor : {1.0f, 1024.0f}) {
      for (const float decay : {1.0f, 0.95f}) {
        std::vector<float> v(count);
        for (std::size_t i = 0; i < count; ++i) v[i] = x[i] + factor * decay * residual[i];
        const std::vector<float> wanted = expected(v, kept);
        Bytes first;
        on_every_isa([&](const std::string&) {
          const Made it = made(x, residual, factor, decay, kept);
          CHECK(it.encoded == Encoded::kFinite);
          CHECK(sent_of(it.code, count, kept) == wanted);
          for (std::size_t i = 0; i < count; ++i) CHECK(it.left[i] == (v[i] - wanted[i]) * (1.0f / factor));
          if (first.empty()) first = it.code;
          CHECK(it.code == first);
        });
      }
    }
  }
}

CASE("sparse2 keeps the first of equal magnitudes and of chunks that grow and shrink") {
  for (const float step : {0.0f, 1e-6f, 0.25f, 1e4f}) {
    std::vector<float> x = numbers(30'000, 3);
    for (float& it : x) it = std::copysign(1.0f + step * std::floor(4 * std::fabs(it)), it);
    for (std::size_t i = 0; i < x.size(); ++i) x[i] *= std::ldexp(1.0f, static_cast<int>(i / kChunk * 37 % 11) - 5);
    std::fill(x.begin() + 2 * kChunk, x.begin() + 3 * kChunk, 0.0f);
    on_every_isa([&](const std::string&) { CHECK(sent_of(code_of(x, 64), x.size(), 64) == expected(x, 64)); });
  }
}

CASE("84 bytes of sparse2 stand for 16384") {
  CHECK(sparse2::encoded_bytes(kChunk, 64) == 84);
  CHECK(sparse2::encoded_bytes(10 * kChunk, 64) == 840);
  CHECK(sparse2::encoded_bytes(0, 64) == 0);
}

CASE("sparse2 adds times a weight and to what is there") {
  const std::vector<float> x = numbers(5000, 4);
  const Bytes code = code_of(x, 64);
  const std::vector<float> sent = sent_of(code, x.size(), 64);
  std::vector<float> sum = numbers(5000, 5);
  const std::vector<float> before = sum;
  sparse2::decode_add(sum.data(), code.data(), 0.3f, x.size(), 64);
  for (std::size_t i = 0; i < x.size(); ++i) CHECK(sum[i] == before[i] + sent[i] * 0.3f);
}

CASE("what is not finite marks its chunk of sparse2") {
  for (const float value : {std::numeric_limits<float>::infinity(), std::nanf("")}) {
    std::vector<float> x = numbers(9000, 6);
    for (std::size_t i = 0; i < 100; ++i) x[5000 + i] = value;  // more than are kept
    Bytes code(sparse2::encoded_bytes(x.size(), 64));
    CHECK(sparse2::encode(code.data(), {x.data()}, x.size(), 64) == Encoded::kNonFinite);
    CHECK(refusal(code, x.size()).empty());
    std::vector<float> out(x.size(), 0.0f);
    CHECK(sparse2::decode_add(out.data(), code.data(), 1.0f, x.size(), 64) == Encoded::kNonFinite);
    CHECK(std::count_if(out.begin(), out.end(), [](float it) { return std::isnan(it); }) == 64);
  }
}

CASE("sparse2 of the largest and the smallest floats") {
  std::vector<float> x(kChunk, 0.0f);
  x[5] = std::numeric_limits<float>::max();
  x[6] = -std::numeric_limits<float>::max();
  x[7] = std::numeric_limits<float>::denorm_min();
  const std::vector<float> sent = sent_of(code_of(x, 2), x.size(), 2);
  CHECK(std::isfinite(sent[5]) && sent[5] > 3.3e38f && sent[6] == -sent[5] && sent[7] == 0);
  x[5] = x[6] = 0.0f;
  CHECK(refusal(code_of(x, 2), x.size(), 2).empty());
}

CASE("bytes that are no sparse2 code are refused") {
  constexpr std::size_t kCount = 4096 + 1000;  // with 64 entries in 16 blocks behind the first chunk
  const std::vector<float> x = numbers(kCount, 7);
  const Bytes good = code_of(x, 64);
  const std::size_t map = 84 + 4, entries = map + 10;
  CHECK(refusal(good, kCount).empty());
  CHECK(refusal(good, kCount + 1000).find("which take") != std::string::npos);
  CHECK(refusal({}, kCount).find("which take") != std::string::npos);
  const auto changed = [&](std::size_t at, std::byte value) {
    Bytes bytes = good;
    bytes[at] = value;
    return refusal(bytes, kCount);
  };
  CHECK(changed(1, std::byte{0xbf}).find("negative or not finite") != std::string::npos);
  CHECK(changed(3, std::byte{0x7f}).empty() == (std::to_integer<int>(good[2]) < 128));
  CHECK(!changed(map, std::byte{0xff}).empty());
  CHECK(!changed(map + 9, std::byte{0xff}).empty());
  CHECK(!changed(map, std::byte{0}).empty());
  CHECK(changed(entries + 63, std::byte{63}).find("out of range or order") !=
        std::string::npos);  // 1000 = 15 · 64 + 40
  CHECK(changed(entries + 1, good[entries]).find("order") != std::string::npos);

  // Whatever the bytes are, what passes can be decoded without leaving its memory (AddressSanitizer looks).
  std::mt19937 random(8);
  std::vector<float> out(kCount);
  std::size_t passed = 0;
  for (int round = 0; round < 20'000; ++round) {
    Bytes bytes = good;
    const std::size_t from = round % 2 == 0 ? 84 : 0, upto = round % 3 == 0 ? entries : bytes.size();
    for (unsigned changes = 1 + random() % 4; changes > 0; --changes)
      bytes[from + random() % (upto - from)] = static_cast<std::byte>(random());
    if (!refusal(bytes, kCount).empty()) continue;
    ++passed;
    sparse2::decode_add(out.data(), bytes.data(), 1.0f, kCount, 64);
  }
  CHECK(passed > 10);
}

}  // namespace
}  // namespace ringdp
