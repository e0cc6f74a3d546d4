// Sparse codes against a plain list of entries: what is selected, what is left, what is merged, and bytes that are no
// code.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "codec/sparse.h"
#include "codec/sparse_scan.h"
#include "instruction_sets.h"
#include "kernels/half.h"
#include "testing.h"

namespace ringdp {
namespace {

using sparse::Code;
using sparse::Selected;
using testing::on_every_isa;

constexpr std::size_t kSizes[] = {0, 1, 7, 8, 63, 255, 256, 257, 1000, 4096, 5003};
constexpr float kInfinite = std::numeric_limits<float>::infinity();

std::vector<float> gaussian(std::size_t count, unsigned seed, float size = 1.0f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, size);
  std::vector<float> out(count);
  for (float& it : out) it = normal(random);
  return out;
}

std::vector<float> decoded(const Code& code, std::size_t count) {
  sparse::check(code, count);
  std::vector<float> out(count, -7.0f);
  sparse::decode_set(out.data(), code, count);
  return out;
}

std::string refusal(const Code& code, std::size_t count) {
  try {
    sparse::check(code, count);
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

CASE("what is large is sent and the rest is left") {
  for (const std::size_t count : kSizes) {
    const std::vector<float> x = gaussian(count, 1), residual = gaussian(count, 2, 0.3f);
    for (const float factor : {1.0f, 1024.0f}) {
      on_every_isa([&](const std::string&) {
        std::vector<float> left(count, -7.0f);
        const Selected it = sparse::select(x.data(), residual.data(), left.data(), factor, 1.5f * factor, count, count);
        const std::vector<float> sent = decoded(it.code, count);
        std::size_t large = 0;
        for (std::size_t i = 0; i < count; ++i) {
          const float v = x[i] + factor * residual[i];
          const bool selected = std::fabs(v) >= 1.5f * factor;
          large += selected;
          CHECK(selected ? std::fabs(sent[i] - v) <= std::fabs(v) * 0x1p-11f : sent[i] == 0);
          CHECK(left[i] == (v - sent[i]) * (1.0f / factor));
        }
        CHECK(it.found == large && it.entries == large && sparse::entries(it.code) == large);
      });
    }
  }
}

CASE("every instruction set gives the same bytes") {
  const std::size_t count = 5003;
  const std::vector<float> x = gaussian(count, 3), residual = gaussian(count, 4);
  std::vector<Code> codes;
  std::vector<std::vector<float>> lefts;
  on_every_isa([&](const std::string&) {
    std::vector<float> left(count);
    codes.push_back(sparse::select(x.data(), residual.data(), left.data(), 2.0f, 3.0f, 100, count).code);
    lefts.push_back(left);
  });
  for (std::size_t i = 1; i < codes.size(); ++i) {
    CHECK(codes[i] == codes[0]);
    CHECK(lefts[i] == lefts[0]);
  }
}

CASE("no more than the cap and nothing is lost by it") {
  const std::vector<float> x = gaussian(4096, 5), zeros(4096, 0.0f);
  std::vector<float> left(4096);
  const Selected it = sparse::select(x.data(), zeros.data(), left.data(), 1.0f, 1.0f, 50, 4096);
  CHECK(it.entries == 50 && it.found > 1000);
  const std::vector<float> sent = decoded(it.code, 4096);
  for (std::size_t i = 0; i < x.size(); ++i) CHECK(left[i] == x[i] - sent[i]);
}

CASE("dense where that is shorter or a block is full") {
  for (const std::size_t count : {std::size_t{256}, std::size_t{1000}, std::size_t{70'000}}) {
    const std::vector<float> x = gaussian(count, 6);
    const Selected all = sparse::select(x.data(), nullptr, nullptr, 1.0f, 0.0f, count, count);
    CHECK(all.code.size() == 16 + 2 * count);
    const std::vector<float> sent = decoded(all.code, count);
    for (std::size_t i = 0; i < count; ++i) CHECK(std::fabs(sent[i] - x[i]) <= std::fabs(x[i]) * 0x1p-11f);
  }
  // One full block among empty ones: sparse would be shorter, but a byte does not count to 256.
  std::vector<float> x(100 * 256, 0.0f);
  std::fill(x.begin() + 512, x.begin() + 768, 1.0f);
  const Selected block = sparse::select(x.data(), nullptr, nullptr, 1.0f, 0.5f, x.size(), x.size());
  CHECK(block.entries == 256 && decoded(block.code, x.size()) == x);
}

CASE("what is not finite spoils all of it even behind the cap") {
  for (const float value : {kInfinite, -kInfinite, std::numeric_limits<float>::quiet_NaN()}) {
    std::vector<float> x = gaussian(1000, 7);
    x[900] = value;
    const Selected it = sparse::select(x.data(), nullptr, nullptr, 1.0f, 1.0f, 3, x.size());
    for (const float each : decoded(it.code, x.size())) CHECK(std::isnan(each));
    x[900] = 0;
    const Code fine = sparse::select(x.data(), nullptr, nullptr, 1.0f, 1.0f, 3, x.size()).code;
    const std::span<const std::byte> both[] = {fine, it.code};
    for (const float each : decoded(sparse::merge(both, 2.0f, nullptr, 1.0f, x.size()), x.size()))
      CHECK(std::isnan(each));
  }
}

CASE("large and small values in one code") {
  std::vector<float> x(300, 0.0f), zeros(300, 0.0f), left(300);
  x[7] = 3e38f;
  x[8] = 1e31f;
  x[9] = 1e-3f;
  const Selected it = sparse::select(x.data(), zeros.data(), left.data(), 1.0f, 1e-3f, 300, 300);
  const std::vector<float> sent = decoded(it.code, 300);
  CHECK(it.entries == 3 && std::fabs(sent[7] - x[7]) < 2e35f && std::fabs(sent[8] - x[8]) < 1e28f && sent[9] == 0);
  for (const std::size_t i : {7, 8, 9}) CHECK(sent[i] + left[i] == x[i]);
  for (float& each : x) each *= 0x1p-125f * 0x1p-125f;
  CHECK(sparse::select(x.data(), nullptr, nullptr, 1.0f, 0.0f, 300, 300).entries == 0);
}

CASE("a merge is the mean in order with what it loses") {
  for (const std::size_t count : kSizes) {
    for (int ranks = 1; ranks <= 5; ++ranks) {
      std::vector<Code> codes;
      std::vector<float> sum(count, 0.0f);
      for (int rank = 0; rank < ranks; ++rank) {
        const std::vector<float> x = gaussian(count, 10 + static_cast<unsigned>(rank));
        // One of them dense.
        codes.push_back(sparse::select(x.data(), nullptr, nullptr, 1.0f, rank == 1 ? 0.0f : 1.2f, count, count).code);
        const std::vector<float> sent = decoded(codes.back(), count);
        for (std::size_t i = 0; i < count; ++i) sum[i] += sent[i];
      }
      const std::vector<std::span<const std::byte>> views(codes.begin(), codes.end());
      std::vector<float> lost(count, 1.0f);
      const Code merged = sparse::merge(views, static_cast<float>(ranks), lost.data(), 3.0f, count);
      const std::vector<float> mean = decoded(merged, count);
      for (std::size_t i = 0; i < count; ++i) {
        const float exact = sum[i] / static_cast<float>(ranks);
        CHECK(std::fabs(mean[i] - exact) <= std::max(std::fabs(exact) * 0x1p-11f, 0x1p-36f));
        CHECK(lost[i] == 1.0f + (exact - mean[i]) * 3.0f);
      }
    }
  }
}

CASE("the estimate is near what is wanted") {
  for (const std::size_t count : {std::size_t{1000}, std::size_t{50'000}, std::size_t{2'000'000}}) {
    std::vector<float> x = gaussian(count, 20);
    const std::vector<float> sizes = gaussian(count, 21);
    for (std::size_t i = 0; i < count; ++i) x[i] *= std::exp(2.0f * sizes[i]);  // heavy tails
    for (const double fraction : {0.1, 0.01}) {
      const auto wanted = static_cast<std::size_t>(fraction * static_cast<double>(count));
      const float threshold = sparse::estimate_threshold({x.data(), nullptr, 1.0f, count}, wanted);
      const std::size_t found = sparse::select(x.data(), nullptr, nullptr, 1.0f, threshold, count, count).found;
      const double off = static_cast<double>(found) / static_cast<double>(wanted);
      CHECK(off > 0.8 && off < 1.25);
    }
  }
  const std::vector<float> zeros(5000, 0.0f);
  CHECK(sparse::estimate_threshold({zeros.data(), nullptr, 1.0f, zeros.size()}, 50) == 0.0f);
  CHECK(sparse::estimate_threshold({nullptr, nullptr, 1.0f, 0}, 50) == 0.0f);
}

CASE("a cut divides the largest from the others to the element") {
  for (const std::size_t count : {std::size_t{1}, std::size_t{255}, std::size_t{5003}}) {
    for (const float step : {0.0f, 1e-6f, 0.25f, 1e4f}) {  // magnitudes of all, between some, and far apart
      std::vector<float> x = gaussian(count, 40), sorted;
      for (float& it : x) it = std::copysign(1.0f + step * std::floor(4 * std::fabs(it)), it);
      for (const float it : x) sorted.push_back(2 * std::fabs(it));
      std::sort(sorted.rbegin(), sorted.rend());
      for (const std::size_t wanted : {std::size_t{1}, count / 2 + 1, count}) {
        const sparse::Cut cut = sparse::exact_cut({x.data(), x.data(), 1.0f, count}, wanted);
        CHECK(cut.threshold == sorted[wanted - 1]);
        std::vector<float> left(count);
        on_every_isa([&](const std::string&) {
          const Selected it =
              sparse::select(x.data(), x.data(), left.data(), 1.0f, cut.threshold, count, count, cut.equals);
          CHECK(it.entries == wanted && it.found >= wanted);
          for (const float value : left) CHECK(std::fabs(value) <= cut.threshold + sorted[0] * 0x1p-11f);
        });
      }
    }
  }
  const std::vector<float> both{1.0f, kInfinite, kInfinite, std::nanf("")};
  CHECK(sparse::exact_cut({both.data(), nullptr, 1.0f, 4}, 2).equals == 0);
  CHECK(sparse::exact_cut({both.data(), nullptr, 1.0f, 4}, 4).threshold == 1.0f);
}

CASE("bytes that are no code are refused") {
  const std::vector<float> x = gaussian(1000, 30);
  const Code good = sparse::select(x.data(), nullptr, nullptr, 1.0f, 1.5f, 1000, 1000).code;
  CHECK(refusal(good, 1000).empty());
  CHECK(refusal(good, 1256).find("which take") != std::string::npos);
  CHECK(refusal({}, 1000).find("not a header") != std::string::npos);
  Code shorter(good.begin(), good.end() - 1);
  CHECK(refusal(shorter, 1000).find("which take") != std::string::npos);
  Code beyond = good;
  const std::size_t places = 16 + 4;
  const auto last = static_cast<std::size_t>(std::to_integer<int>(good[16]) + std::to_integer<int>(good[17]) +
                                             std::to_integer<int>(good[18]) + std::to_integer<int>(good[19])) -
                    1;
  beyond[places + last] = std::byte{255};  // the last block has 232 elements
  CHECK(refusal(beyond, 1000).find("out of range or order") != std::string::npos);
  Code twice = good;
  twice[places + 1] = twice[places];
  CHECK(refusal(twice, 1000).find("out of range or order") != std::string::npos);
  Code more = good;
  more[16] = std::byte{255};
  CHECK(refusal(more, 1000).find("entries") != std::string::npos);

  // Whatever the bytes are, what passes can be decoded and merged without leaving its memory (AddressSanitizer looks).
  std::mt19937 random(31);
  std::vector<float> out(1000);
  for (int round = 0; round < 20'000; ++round) {
    Code bytes = good;
    for (unsigned changes = 1 + random() % 4; changes > 0; --changes)
      bytes[random() % (round % 2 == 0 ? 20 : bytes.size())] = static_cast<std::byte>(random());
    if (!refusal(bytes, 1000).empty()) continue;
    sparse::decode_set(out.data(), bytes, 1000);
    const std::span<const std::byte> views[] = {bytes, good};
    sparse::check(sparse::merge(views, 2.0f, nullptr, 1.0f, 1000), 1000);
  }
}

}  // namespace
}  // namespace ringdp
