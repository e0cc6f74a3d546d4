// Which algorithm runs for which collective, size, dtype, number of ranks and layout of hosts. A table, fixed here or
// read from a file (TuningLimits), not timing: the order of summation, and so the bits, depend on it. The cost model
// behind the numbers is ringdp/costs.py. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>

#include "base/types.h"
#include "collective/owner_weights.h"

namespace ringdp {

enum class Algorithm : uint8_t {
#define RINGDP_ALL_REDUCE(algorithm, number, name) k##algorithm = number,
#define RINGDP_ALGORITHM(algorithm, number, name) k##algorithm = number,
#include "collective/algorithms.def"
};

struct AlgorithmInfo {
  Algorithm id;
  std::string_view name;
  bool reduces_all;  // it can be an all-reduce
};
std::span<const AlgorithmInfo> algorithms();  // in the order of algorithms.def
std::string_view algorithm_name(Algorithm algorithm);

// How the ranks of a group are spread over hosts.
enum class Layout : uint8_t { kOneHost = 0, kOneRankPerHost = 1, kSeveralRanksPerHost = 2 };
inline constexpr int kLayoutCount = 3;

std::string_view layout_name(Layout layout);
// `hosts[i]`: the number of member i's host, from 0 without gaps. Several ranks on any of several hosts make
// kSeveralRanksPerHost.
Layout layout_of(std::span<const int> hosts);

// Sizes in bytes up to which an algorithm is taken; of `direct_ranks`, members.
struct AlgorithmTable {
  std::size_t fold_two_ranks_bytes = 1024 * 1024;  // two ranks: a fold sends as much as a ring, in one step
  std::size_t fold_sent_bytes = 128 * 1024;        // more ranks: what each would send, (n-1)·S
  std::size_t flat_broadcast_bytes = 64 * 1024;
  std::size_t direct_gather_bytes = 64 * 1024;  // of one rank's block
  // Largest group in which small collectives use a direct exchange or a flat broadcast. In larger ones they use few
  // pairs, because a connection is made when a pair first needs it (docs/reference/algorithms.md).
  std::size_t direct_ranks = 16;
  // If the round trip between hosts takes so many microseconds or more, collectives that would be rings are direct
  // exchanges instead, at any size (`tables_for`).
  std::size_t far_round_trip_us = 5000;
  // Largest all-reduce by halving, in place of a ring or of two levels: of the buffer, for each rank. 0: none.
  std::size_t halving_rank_bytes = 4 * 1024;
  // Largest pairwise all-reduce of types other than half types, in groups that are not large.
  std::size_t pairwise_bytes = 0;
  // Largest bucket of gradients that is sent exactly where a codec was chosen for it: on a fast link the codec takes
  // longer than the bytes that it saves. 0: codes are used at any size.
  std::size_t exact_bucket_bytes = 0;

  bool operator==(const AlgorithmTable&) const = default;
};

// One for each layout.
struct AlgorithmTables {
  AlgorithmTables() = default;
  AlgorithmTables(const AlgorithmTable& all) : one_host(all), one_rank_per_host(all), several_ranks_per_host(all) {}

  const AlgorithmTable& of(Layout layout) const;
  // The table of a group on these hosts: where they have weights, in pairs in place of rings, as between far hosts.
  AlgorithmTable of(std::span<const int> hosts, const Weights& weights) const;
  bool operator==(const AlgorithmTables&) const = default;

  AlgorithmTable one_host;
  // Folds measured at 1 Gbit; the other limits cost least over 1 to 100 Gbit and 10 to 100 us, simulated
  // (docs/lab/simulation.md).
  AlgorithmTable one_rank_per_host{
      .fold_sent_bytes = 48 * 1024, .halving_rank_bytes = 512 * 1024, .pairwise_bytes = 256 * 1024};
  // A fold sends the same to a host several times.
  AlgorithmTable several_ranks_per_host{.fold_sent_bytes = 24 * 1024, .halving_rank_bytes = 64 * 1024};
  // Bytes a second of hosts' links, or of sites' lines, by name: owner_weights. Empty: all are taken to be alike.
  std::map<std::string, std::size_t> uplinks;
};

// The tables for a job whose longest round trip between hosts takes `round_trip_us`, the same on all ranks: unchanged,
// or with pairwise exchanges in place of rings, whose steps would each take half a round trip.
AlgorithmTables tables_for(const AlgorithmTables& tables, int64_t round_trip_us);

// Whether small collectives of that many members are direct. Always for two.
bool goes_direct(const AlgorithmTable& table, int world);
// Whether a buffer of that many bytes is reduced along a tree, or by a fold; at most one of the two.
bool fits_tree(const AlgorithmTable& table, int world, std::size_t bytes);
bool fits_fold(const AlgorithmTable& table, int world, std::size_t bytes);
// Whether it is reduced by halving, in place of a tree and of what is for large ones.
bool fits_halving(const AlgorithmTable& table, std::span<const int> hosts, DType dtype, std::size_t bytes);

// `bytes`: of the whole buffer; of an all-gather or reduce-scatter, of one rank's block.
// `hosts` as in layout_of, one entry for each rank.
// `rank_order` as in GroupView.
Algorithm choose_all_reduce(const AlgorithmTable& table, std::span<const int> hosts, DType dtype, std::size_t bytes,
                            bool rank_order = false);
Algorithm choose_reduce(const AlgorithmTable& table, int world, std::size_t bytes);
Algorithm choose_reduce_scatter(const AlgorithmTable& table, std::span<const int> hosts, std::size_t bytes);
Algorithm choose_broadcast(const AlgorithmTable& table, int world, std::size_t bytes);
Algorithm choose_all_gather(const AlgorithmTable& table, int world, std::size_t bytes);

// The algorithm tables as names and numbers: what a file of RINGDP_TUNING overrides (ringdp/config/tuning.py reads
// it), what ranks compare in the rendezvous, and what is logged. Value types, any thread.

// "one_host.fold_sent_bytes" to bytes, "one_host.direct_ranks" to ranks; without a layout in front, for all layouts.
// "uplink.NAME" to bytes a second.
using TuningLimits = std::map<std::string, std::size_t>;

// The built-in tables with the values of `limits`. Throws Error(kValue) for an unknown name.
AlgorithmTables tables_from(const TuningLimits& limits);
TuningLimits limits_of(const AlgorithmTables& tables);

// All limits as "name=number" items, always in the same order: equal exactly when the tables are.
std::string tables_text(const AlgorithmTables& tables);

// One line for the log: the algorithms of an all-reduce of these ranks, and the source of the table.
std::string describe_all_reduce(const AlgorithmTables& tables, std::span<const int> hosts, const std::string& source);

}  // namespace ringdp
