#include "mesh/overlay.h"

#include <algorithm>
#include <bit>
#include <set>

#include "mesh/ready_tree.h"

namespace ringdp {

std::vector<int> overlay_neighbours(int place, int size) {
  std::set<int> out;
  for (int distance = 1; distance < size; distance *= 2) {
    out.insert((place + distance) % size);
    out.insert((place + size - distance) % size);
  }
  out.erase(place);
  return {out.begin(), out.end()};
}

bool connected_from_start(int a, int b, int world, int full_mesh_ranks) {
  if (a == b) return false;
  if (world <= full_mesh_ranks) return true;
  auto one_way = static_cast<unsigned>(a > b ? a - b : b - a);
  if (std::has_single_bit(one_way) || std::has_single_bit(static_cast<unsigned>(world) - one_way)) return true;
  return ReadyTree::parent_of(a) == b || ReadyTree::parent_of(b) == a;
}

}  // namespace ringdp
