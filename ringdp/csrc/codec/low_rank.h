// A matrix as the product of two thin ones, which PowerSGD exchanges: left [rank][rows] and right [rank][columns], a
// factor's vectors one after the other, and the matrix row by row. Stateless, any thread. Every instruction set gives
// the same bits: dot products add in 16 lanes, which are then added in halves.
#pragma once

#include <cstddef>

namespace ringdp::low_rank {

struct Shape {
  std::size_t rows;
  std::size_t columns;
  std::size_t rank;
};

// v = x + factor·residual, and left = v·rightᵀ, in one pass. residual may be null; v may be x then, or a copy is made.
void project(float* left, float* v, const float* x, const float* residual, float factor, const float* right,
             const Shape& shape);

// right = left·v.
void project_back(float* right, const float* v, const float* left, const Shape& shape);

// matrix[i][j] = Σ_k left[k][i]·right[k][j], each product rounded, added in the order of k. Where `kept` is not null
// it is v on entry and (v - matrix) / factor on return. `matrix` may be anything but an operand.
void expand(float* matrix, float* kept, float factor, const float* left, const float* right, const Shape& shape);

// Makes each of the `rank` vectors of `count` elements, from the first to the last, orthogonal to those before it and
// of length 1. A vector of which only rounding errors remain becomes zero. Modified Gram-Schmidt in double, twice; dot
// products add in halves. A vector with an element that is not finite becomes NaN.
void orthonormalise(float* vectors, std::size_t count, std::size_t rank);

}  // namespace ringdp::low_rank
