#include "collective/algorithm_table.h"

#include <algorithm>
#include <iterator>
#include <limits>

#include "collective/all_reduce.h"

namespace ringdp {

namespace {

constexpr AlgorithmInfo kAlgorithms[] = {
#define RINGDP_ALL_REDUCE(algorithm, number, name) {Algorithm::k##algorithm, name, true},
#define RINGDP_ALGORITHM(algorithm, number, name) {Algorithm::k##algorithm, name, false},
#include "collective/algorithms.def"
};

const AllReduceAlgorithm* const kAllReduces[] = {
#define RINGDP_ALL_REDUCE(algorithm, number, name) &k##algorithm##AllReduce,
#define RINGDP_ALGORITHM(algorithm, number, name)
#include "collective/algorithms.def"
};

}  // namespace

std::span<const AlgorithmInfo> algorithms() { return kAlgorithms; }

std::string_view algorithm_name(Algorithm algorithm) {
  for (const AlgorithmInfo& it : kAlgorithms)
    if (it.id == algorithm) return it.name;
  return "unknown";
}

const AllReduceAlgorithm& find_all_reduce(const AllReduceRequest& request) {
  return **std::find_if(std::begin(kAllReduces), std::end(kAllReduces) - 1,
                        [&](const AllReduceAlgorithm* it) { return it->fits(request); });  // the last one always fits
}

std::string_view layout_name(Layout layout) {
  constexpr std::string_view kNames[] = {"one_host", "one_rank_per_host", "several_ranks_per_host"};
  return kNames[static_cast<std::size_t>(layout)];
}

Layout layout_of(std::span<const int> hosts) {
  auto count = hosts.empty() ? 0 : static_cast<std::size_t>(*std::max_element(hosts.begin(), hosts.end())) + 1;
  if (count <= 1) return Layout::kOneHost;
  return count == hosts.size() ? Layout::kOneRankPerHost : Layout::kSeveralRanksPerHost;
}

const AlgorithmTable& AlgorithmTables::of(Layout layout) const {
  if (layout == Layout::kOneHost) return one_host;
  return layout == Layout::kOneRankPerHost ? one_rank_per_host : several_ranks_per_host;
}

AlgorithmTables tables_for(const AlgorithmTables& tables, int64_t round_trip_us) {
  AlgorithmTables out = tables;
  constexpr auto kAnySize = std::numeric_limits<std::size_t>::max();
  auto far = [&](const AlgorithmTable& table) {
    return round_trip_us > 0 && static_cast<std::size_t>(round_trip_us) >= table.far_round_trip_us;
  };
  if (far(tables.one_rank_per_host)) out.one_rank_per_host.pairwise_bytes = kAnySize;
  if (far(tables.one_rank_per_host)) out.one_rank_per_host.direct_gather_bytes = kAnySize;
  if (far(tables.several_ranks_per_host)) out.several_ranks_per_host.pairwise_bytes = kAnySize;
  return out;
}

namespace {

// In a tree ceil(log2 n) messages of the whole buffer follow one another each way, in a ring 2(n-1) of n-ths of it. By
// the cost model both take as long at 0.85 to 1.25 times `fold_sent_bytes` · n/64 for 17 to 128 ranks, on one host or
// on as many.
constexpr std::size_t kTreeRanks = 64;

}  // namespace

bool goes_direct(const AlgorithmTable& table, int world) {
  return static_cast<std::size_t>(world) <= std::max<std::size_t>(2, table.direct_ranks);
}

bool fits_tree(const AlgorithmTable& table, int world, std::size_t bytes) {
  return !goes_direct(table, world) && bytes <= table.fold_sent_bytes / kTreeRanks * static_cast<std::size_t>(world);
}

bool fits_fold(const AlgorithmTable& table, int world, std::size_t bytes) {
  const auto others = static_cast<std::size_t>(std::max(1, world - 1));
  return goes_direct(table, world) &&
         bytes <= (world == 2 ? table.fold_two_ranks_bytes : table.fold_sent_bytes / others);
}

Algorithm choose_all_reduce(const AlgorithmTable& table, std::span<const int> hosts, DType dtype, std::size_t bytes,
                            bool rank_order) {
  return find_all_reduce({table, hosts, dtype, bytes, rank_order}).id;
}

Algorithm choose_reduce(const AlgorithmTable& table, int world, std::size_t bytes) {
  if (fits_tree(table, world, bytes)) return Algorithm::kTree;
  // A ring's sum would end at the wrong rank.
  return fits_fold(table, world, bytes) ? Algorithm::kFold : Algorithm::kPairwise;
}

Algorithm choose_reduce_scatter(const AlgorithmTable& table, std::span<const int> hosts, std::size_t bytes) {
  bool small = bytes * (hosts.size() - 1) <= table.fold_sent_bytes;
  return small || layout_of(hosts) != Layout::kSeveralRanksPerHost ? Algorithm::kPairwise : Algorithm::kTwoLevel;
}

Algorithm choose_broadcast(const AlgorithmTable& table, int world, std::size_t bytes) {
  if (bytes > table.flat_broadcast_bytes && world > 2) return Algorithm::kChain;
  return goes_direct(table, world) ? Algorithm::kDirectTransfer : Algorithm::kTree;
}

Algorithm choose_all_gather(const AlgorithmTable& table, int world, std::size_t bytes) {
  if (!goes_direct(table, world)) return Algorithm::kRing;
  return bytes <= table.direct_gather_bytes || world <= 2 ? Algorithm::kDirectTransfer : Algorithm::kRing;
}

}  // namespace ringdp
