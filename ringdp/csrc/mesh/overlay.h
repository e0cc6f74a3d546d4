// Which pairs of ranks are connected from the start. In a small job all are. In a large one a rank starts with
// connections to a few others, over which a failure reaches every rank in some log2(n) steps, and connects to the rest
// when it needs them. Pure functions, any thread.
#pragma once

#include <vector>

namespace ringdp {

inline constexpr int kFullMeshRanks = 16;  // up to so many ranks, all pairs are connected

// The members of a group of `size` at distance 1, 2, 4, … on either side of `place`, modulo `size`; ascending.
std::vector<int> overlay_neighbours(int place, int size);

// Symmetric in `a` and `b`. In jobs of more than `full_mesh_ranks` ranks: overlay neighbours, and those of ReadyTree.
bool connected_from_start(int a, int b, int world, int full_mesh_ranks);

}  // namespace ringdp
