#include "collective/choice.h"

#include <algorithm>
#include <iterator>

namespace ringdp {

std::string_view algorithm_name(Algorithm algorithm) {
  constexpr std::string_view kNames[] = {"exchange", "ring",      "fold",       "pairwise",
                                         "chain",    "two_level", "compressed", "elsewhere"};
  auto i = static_cast<std::size_t>(algorithm);
  return i < std::size(kNames) ? kNames[i] : "unknown";
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

namespace {

bool folds(const AlgorithmTable& table, int world, std::size_t bytes) {
  return bytes <= (world == 2 ? table.fold_two_ranks_bytes : table.fold_sent_bytes / std::max(1, world - 1));
}

}  // namespace

Algorithm choose_all_reduce(const AlgorithmTable& table, std::span<const int> hosts, DType dtype, std::size_t bytes) {
  if (folds(table, static_cast<int>(hosts.size()), bytes)) return Algorithm::kFold;
  if (layout_of(hosts) == Layout::kSeveralRanksPerHost) return Algorithm::kTwoLevel;
  bool half = dtype == DType::kFloat16 || dtype == DType::kBfloat16;
  return half ? Algorithm::kPairwise : Algorithm::kRing;
}

Algorithm choose_reduce(const AlgorithmTable& table, int world, std::size_t bytes) {
  return folds(table, world, bytes) ? Algorithm::kFold
                                    : Algorithm::kPairwise;  // a ring's sum would end at the wrong rank
}

Algorithm choose_reduce_scatter(const AlgorithmTable& table, std::span<const int> hosts, std::size_t bytes) {
  bool small = bytes * (hosts.size() - 1) <= table.fold_sent_bytes;
  return small || layout_of(hosts) != Layout::kSeveralRanksPerHost ? Algorithm::kPairwise : Algorithm::kTwoLevel;
}

Algorithm choose_broadcast(const AlgorithmTable& table, int world, std::size_t bytes) {
  return bytes <= table.flat_broadcast_bytes || world <= 2 ? Algorithm::kExchange : Algorithm::kChain;
}

Algorithm choose_all_gather(const AlgorithmTable& table, int world, std::size_t bytes) {
  return bytes <= table.direct_gather_bytes || world <= 2 ? Algorithm::kExchange : Algorithm::kRing;
}

}  // namespace ringdp
