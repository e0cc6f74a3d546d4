// How much of a buffer the ranks of each host own, where the hosts' links differ: a function of the job's map of
// uplinks, which all ranks have from the same file (RINGDP_TUNING), and never of a measurement. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace ringdp {

// What of a whole is each part's; parts of weight 0 have nothing. Their sum is at most 2^20.
using Weights = std::vector<uint32_t>;

// Each rank sends its values of every part to the part's owner, who sends the sum to all. So a host whose ranks own the
// share w of a buffer sends and receives 1 + (h-2)·w of it, h hosts in all, over a link of rate r: the linear program
//   minimize t  with  1 + (h-2)·w_i <= t·r_i,  w_i >= 0,  sum of w_i = 1.
// Equal shares take (2 - 2/h) / (the lowest rate); no share 1 / (the lowest rate), which nothing is below.
//
// The solution for hosts of these rates, of which only the ratios count; of several, the one that also takes least on
// the other hosts. Empty, for equal shares, where those take at most 1.1 times as long.
Weights owner_weights(std::span<const std::size_t> rates);

// The first of `units` equal units that part `part` owns: the units of the parts before it. `shift` says to which parts
// remainders go. Part `weights.size()` ends the last one.
std::vector<std::size_t> weighted_bounds(std::size_t units, std::span<const uint32_t> weights, uint32_t shift);

}  // namespace ringdp
