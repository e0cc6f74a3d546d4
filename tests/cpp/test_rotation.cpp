// The rotation of blocks: the same bits with every instruction set, the matrix that it says, and back.
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "codec/rotation.h"
#include "instruction_sets.h"
#include "testing.h"

namespace ringdp {
namespace {

using rotation::kBlock;
using testing::on_every_isa;
using Floats = std::vector<float>;

struct Drawn {
  explicit Drawn(std::size_t count) : x(count) {
    std::mt19937 random(static_cast<unsigned>(count));
    std::normal_distribution<float> normal;
    for (float& it : x) it = normal(random);
    for (uint8_t& it : bits) it = static_cast<uint8_t>(random());
  }
  rotation::Signs signs() const { return rotation::Signs(bits); }
  double sign(std::size_t i) const { return (bits[i / 8] >> i % 8 & 1) != 0 ? -1 : 1; }

  Floats x;
  uint8_t bits[kBlock / 8];
};

bool same_bits(const Floats& a, const Floats& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

CASE("every instruction set gives the same bits, in place too") {
  for (const std::size_t count : {0, 1, 255, 256, 257, 1000, 4096}) {
    const Drawn drawn(count);
    std::vector<Floats> all;
    on_every_isa([&](const std::string&) {
      Floats there(count), back(count), in_place = drawn.x;
      rotation::rotate(there.data(), drawn.x.data(), count, drawn.signs());
      rotation::rotate_back(back.data(), there.data(), count, drawn.signs());
      rotation::rotate(in_place.data(), in_place.data(), count, drawn.signs());
      CHECK(same_bits(there, in_place));
      all.push_back(there);
      all.push_back(back);
    });
    for (std::size_t i = 2; i < all.size(); ++i) CHECK(same_bits(all[i], all[i % 2]));
    for (std::size_t i = 0; i < count; ++i) CHECK(std::fabs(all[1][i] - drawn.x[i]) < 1e-5f);
    for (std::size_t i = count / kBlock * kBlock; i < count; ++i) CHECK(all[0][i] == drawn.x[i]);
  }
}

CASE("it is the Hadamard matrix times the signs, by 16") {
  const Drawn drawn(kBlock);
  Floats y(kBlock);
  rotation::rotate(y.data(), drawn.x.data(), kBlock, drawn.signs());
  for (std::size_t row = 0; row < kBlock; ++row) {
    double sum = 0;
    for (std::size_t i = 0; i < kBlock; ++i) {
      const double entry = __builtin_popcountll(row & i) % 2 != 0 ? -1 : 1;
      sum += entry * drawn.sign(i) * static_cast<double>(drawn.x[i]) / 16;
    }
    CHECK(std::fabs(y[row] - sum) < 1e-5);
  }
}

}  // namespace
}  // namespace ringdp
