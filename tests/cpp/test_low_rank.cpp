// Products with thin factors: the same bits with every instruction set, sums in their order, vectors made orthonormal.
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "codec/low_rank.h"
#include "instruction_sets.h"
#include "testing.h"

namespace ringdp {
namespace {

using low_rank::Shape;
using testing::on_every_isa;
using Floats = std::vector<float>;

constexpr Shape kShapes[] = {{1, 1, 1},   {2, 3, 1},   {5, 16, 2},   {4, 17, 3},
                             {33, 31, 4}, {7, 130, 5}, {64, 257, 9}, {3, 1000, 4}};

Floats gaussian(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Floats out(count);
  for (float& it : out) it = normal(random);
  return out;
}

bool same_bits(const Floats& a, const Floats& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

struct Results {
  Floats v, left, right, matrix, kept, orthonormal;
};

Results results(const Shape& shape) {
  const Floats x = gaussian(shape.rows * shape.columns, 1), residual = gaussian(x.size(), 2);
  const Floats with = gaussian(shape.rank * shape.columns, 3);
  Results out{Floats(x.size()), Floats(shape.rank * shape.rows), Floats(with.size()), Floats(x.size()), {}, with};
  low_rank::project(out.left.data(), out.v.data(), x.data(), residual.data(), 3.0f, with.data(), shape);
  low_rank::project_back(out.right.data(), out.v.data(), out.left.data(), shape);
  out.kept = out.v;
  low_rank::expand(out.matrix.data(), out.kept.data(), 3.0f, out.left.data(), out.right.data(), shape);
  low_rank::orthonormalise(out.orthonormal.data(), shape.columns, shape.rank);
  return out;
}

CASE("every instruction set gives the same bits") {
  for (const Shape& shape : kShapes) {
    std::vector<Results> all;
    on_every_isa([&](const std::string&) { all.push_back(results(shape)); });
    for (const Results& one : all) {
      CHECK(same_bits(one.v, all[0].v));
      CHECK(same_bits(one.left, all[0].left));
      CHECK(same_bits(one.right, all[0].right));
      CHECK(same_bits(one.matrix, all[0].matrix));
      CHECK(same_bits(one.kept, all[0].kept));
      CHECK(same_bits(one.orthonormal, all[0].orthonormal));
    }
  }
}

CASE("products are sums of products") {
  for (const Shape& shape : kShapes) {
    const Results it = results(shape);
    const Floats with = gaussian(shape.rank * shape.columns, 3);
    const auto close = [](double got, double wanted, double size) { return std::fabs(got - wanted) <= 1e-6 * size; };
    for (std::size_t k = 0; k < shape.rank; ++k) {
      for (std::size_t i = 0; i < shape.rows; ++i) {
        double sum = 0, size = 0;
        for (std::size_t j = 0; j < shape.columns; ++j) {
          const double term = static_cast<double>(it.v[i * shape.columns + j]) * with[k * shape.columns + j];
          sum += term;
          size += std::fabs(term);
        }
        CHECK(close(it.left[k * shape.rows + i], sum, size));
      }
      for (std::size_t j = 0; j < shape.columns; ++j) {
        double sum = 0, size = 0;
        for (std::size_t i = 0; i < shape.rows; ++i) {
          const double term = static_cast<double>(it.v[i * shape.columns + j]) * it.left[k * shape.rows + i];
          sum += term;
          size += std::fabs(term);
        }
        CHECK(close(it.right[k * shape.columns + j], sum, size));
      }
    }
    for (std::size_t i = 0; i < shape.rows; ++i) {
      for (std::size_t j = 0; j < shape.columns; ++j) {
        float sum = it.left[i] * it.right[j];
        for (std::size_t k = 1; k < shape.rank; ++k)
          sum += it.left[k * shape.rows + i] * it.right[k * shape.columns + j];
        const std::size_t at = i * shape.columns + j;
        CHECK(std::bit_cast<uint32_t>(it.matrix[at]) == std::bit_cast<uint32_t>(sum));
        CHECK(std::bit_cast<uint32_t>(it.kept[at]) == std::bit_cast<uint32_t>((it.v[at] - sum) * (1.0f / 3.0f)));
      }
    }
  }
}

CASE("without a residual the sum is the elements, and the mean may take their place") {
  const Shape shape{10, 50, 2};
  const Floats x = gaussian(500, 1), with = gaussian(100, 2);
  Floats left(20), other(20), v(500), in_place = x;
  low_rank::project(left.data(), v.data(), x.data(), nullptr, 1.0f, with.data(), shape);
  CHECK(same_bits(v, x));
  low_rank::project(other.data(), in_place.data(), in_place.data(), nullptr, 1.0f, with.data(), shape);
  CHECK(same_bits(left, other));
  low_rank::expand(in_place.data(), nullptr, 1.0f, left.data(), with.data(), shape);
  low_rank::expand(v.data(), nullptr, 1.0f, left.data(), with.data(), shape);
  CHECK(same_bits(in_place, v));
}

CASE("what rounding alone left becomes zero, and what is not finite NaN") {
  Floats vectors = gaussian(3 * 100, 4);
  for (std::size_t i = 0; i < 100; ++i) vectors[100 + i] = 3 * vectors[i];
  low_rank::orthonormalise(vectors.data(), 100, 3);
  double first = 0, third = 0, across = 0;
  for (std::size_t i = 0; i < 100; ++i) {
    CHECK(vectors[100 + i] == 0.0f);
    first += static_cast<double>(vectors[i]) * vectors[i];
    third += static_cast<double>(vectors[200 + i]) * vectors[200 + i];
    across += static_cast<double>(vectors[i]) * vectors[200 + i];
  }
  CHECK(std::fabs(first - 1) < 1e-6);
  CHECK(std::fabs(third - 1) < 1e-6);
  CHECK(std::fabs(across) < 1e-6);
  for (const float value : {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
    Floats spoilt = gaussian(100, 5);
    spoilt[7] = value;
    low_rank::orthonormalise(spoilt.data(), 100, 1);
    CHECK(std::isnan(spoilt[7]));
  }
}

}  // namespace
}  // namespace ringdp
