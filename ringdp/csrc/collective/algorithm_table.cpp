#include "collective/algorithm_table.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <set>
#include <vector>

#include "base/error.h"
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

std::span<const AllReduceAlgorithm* const> all_reduces() { return kAllReduces; }

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

namespace {

constexpr auto kAnySize = std::numeric_limits<std::size_t>::max();

}  // namespace

AlgorithmTable AlgorithmTables::of(std::span<const int> hosts, const Weights& weights) const {
  AlgorithmTable out = of(layout_of(hosts));
  if (weights.empty()) return out;
  out.pairwise_bytes = kAnySize;
  if (layout_of(hosts) == Layout::kSeveralRanksPerHost) out.halving_rank_bytes = 0;
  return out;
}

AlgorithmTables tables_for(const AlgorithmTables& tables, int64_t round_trip_us) {
  AlgorithmTables out = tables;
  auto far = [&](const AlgorithmTable& table) {
    return round_trip_us > 0 && static_cast<std::size_t>(round_trip_us) >= table.far_round_trip_us;
  };
  if (far(tables.one_rank_per_host)) out.one_rank_per_host.pairwise_bytes = kAnySize;
  if (far(tables.one_rank_per_host)) out.one_rank_per_host.direct_gather_bytes = kAnySize;
  if (far(tables.several_ranks_per_host)) {
    out.several_ranks_per_host.pairwise_bytes = kAnySize;
    out.several_ranks_per_host.halving_rank_bytes = 0;  // two levels take two steps between hosts then
  }
  return out;
}

namespace {

// In a tree ceil(log2 n) messages of the whole buffer follow one another each way, in a ring 2(n-1) of n-ths of it. By
// the cost model both take as long at 0.85 to 1.25 times `fold_sent_bytes` · n/64 for 17 to 128 ranks, on one host or
// on as many.
constexpr std::size_t kTreeRanks = 64;

// Up to here a tree takes as long as halving, simulated, and sends a fraction of the messages.
constexpr std::size_t kSmallTreeBytes = 1024;

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

namespace {

bool as_many_on_each(std::span<const int> hosts, std::size_t count) {
  if (hosts.size() % count != 0) return false;
  std::vector<std::size_t> ranks(count);
  for (const int host : hosts) ++ranks[static_cast<std::size_t>(host)];
  return std::all_of(ranks.begin(), ranks.end(), [&](std::size_t it) { return it == hosts.size() / count; });
}

}  // namespace

// By halving half types send more bytes than in pairs, and up to `direct_ranks` hosts can go in pairs.
// Between hosts with unequal numbers of ranks it would send the same bytes several times.
bool fits_halving(const AlgorithmTable& table, std::span<const int> hosts, DType dtype, std::size_t bytes) {
  const std::size_t ranks = hosts.size();
  const int world = static_cast<int>(ranks);
  if (ranks < 2 || table.halving_rank_bytes == 0 || (bytes + ranks - 1) / ranks > table.halving_rank_bytes)
    return false;
  const bool half = dtype == DType::kFloat16 || dtype == DType::kBfloat16;
  const int count = 1 + *std::max_element(hosts.begin(), hosts.end());
  if ((half && goes_direct(table, count)) || !as_many_on_each(hosts, static_cast<std::size_t>(count))) return false;
  if (goes_direct(table, world)) return !fits_fold(table, world, bytes) && bytes > table.pairwise_bytes;
  return bytes > kSmallTreeBytes || !fits_tree(table, world, bytes);
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

namespace {

struct Limit {
  std::string_view name;
  std::size_t AlgorithmTable::* value;
};

constexpr Limit kLimits[] = {
    {"fold_two_ranks_bytes", &AlgorithmTable::fold_two_ranks_bytes},
    {"fold_sent_bytes", &AlgorithmTable::fold_sent_bytes},
    {"flat_broadcast_bytes", &AlgorithmTable::flat_broadcast_bytes},
    {"direct_gather_bytes", &AlgorithmTable::direct_gather_bytes},
    {"direct_ranks", &AlgorithmTable::direct_ranks},
    {"far_round_trip_us", &AlgorithmTable::far_round_trip_us},
    {"halving_rank_bytes", &AlgorithmTable::halving_rank_bytes},
    {"pairwise_bytes", &AlgorithmTable::pairwise_bytes},
    {"exact_bucket_bytes", &AlgorithmTable::exact_bucket_bytes},
};

constexpr std::string_view kUplink = "uplink.";

std::string limit_name(Layout layout, const Limit& limit) {
  return std::string(layout_name(layout)) + "." + std::string(limit.name);
}

AlgorithmTable& table_of(AlgorithmTables& tables, Layout layout) {
  if (layout == Layout::kOneHost) return tables.one_host;
  return layout == Layout::kOneRankPerHost ? tables.one_rank_per_host : tables.several_ranks_per_host;
}

template <typename Visit>
void for_each_limit(Visit visit) {
  for (int i = 0; i < kLayoutCount; ++i)
    for (const Limit& limit : kLimits) visit(static_cast<Layout>(i), limit);
}

std::string size_text(std::size_t bytes) {
  for (auto [unit, name] : {std::pair<std::size_t, const char*>{1 << 20, " MiB"}, {1 << 10, " KiB"}})
    if (bytes >= unit && bytes % unit == 0) return std::to_string(bytes / unit) + name;
  return std::to_string(bytes) + " B";
}

// "fold up to 1 MiB, ring above": finds the sizes at which the choice changes by bisection over the choosing function
// itself, so the text cannot differ from it.
std::string describe_ranges(const AlgorithmTable& table, std::span<const int> hosts, DType dtype) {
  auto choice = [&](std::size_t bytes) { return choose_all_reduce(table, hosts, dtype, bytes); };
  constexpr std::size_t kTop = std::size_t{1} << 50;
  std::string out;
  for (std::size_t from = 0; choice(from) != choice(kTop);) {
    std::size_t low = from, high = kTop;  // the choice at `low` equals that at `from`, the choice at `high` differs
    while (high - low > 1) {
      std::size_t middle = low + (high - low) / 2;
      (choice(middle) == choice(from) ? low : high) = middle;
    }
    out += std::string(algorithm_name(choice(from))) + " up to " + size_text(low) + ", ";
    from = high;
  }
  return out + std::string(algorithm_name(choice(kTop))) + (out.empty() ? "" : " above");
}

}  // namespace

AlgorithmTables tables_from(const TuningLimits& limits) {
  AlgorithmTables tables;
  for (const auto& [name, value] : limits) {
    if (name.starts_with(kUplink)) {
      if (value == 0) throw Error(ErrorKind::kValue, name + " is 0 bytes a second");
      tables.uplinks[name.substr(kUplink.size())] = value;
      continue;
    }
    bool known = false;
    for_each_limit([&](Layout layout, const Limit& limit) {
      if (name != limit.name && name != limit_name(layout, limit)) return;
      table_of(tables, layout).*limit.value = value;
      known = true;
    });
    if (!known) throw Error(ErrorKind::kValue, "the algorithm table has no '" + name + "'");
  }
  return tables;
}

TuningLimits limits_of(const AlgorithmTables& tables) {
  TuningLimits limits;
  for_each_limit(
      [&](Layout layout, const Limit& limit) { limits[limit_name(layout, limit)] = tables.of(layout).*limit.value; });
  for (const auto& [host, rate] : tables.uplinks) limits[std::string(kUplink) + host] = rate;
  return limits;
}

std::string tables_text(const AlgorithmTables& tables) {
  std::string text;
  for (const auto& [name, value] : limits_of(tables))
    text += (text.empty() ? "" : " ") + name + "=" + std::to_string(value);
  return text;
}

std::string describe_all_reduce(const AlgorithmTables& tables, std::span<const int> hosts, const std::string& source) {
  Layout layout = layout_of(hosts);
  int ranks = static_cast<int>(hosts.size());
  std::string where = std::to_string(std::set<int>(hosts.begin(), hosts.end()).size());
  std::string place = layout == Layout::kOneHost          ? "on one host"
                      : layout == Layout::kOneRankPerHost ? "on as many hosts"
                                                          : "on " + where + " hosts";
  std::string exact = describe_ranges(tables.of(layout), hosts, DType::kFloat32);
  std::string half = describe_ranges(tables.of(layout), hosts, DType::kBfloat16);
  std::string out = "all-reduce of " + std::to_string(ranks) + " ranks " + place + " (layout " +
                    std::string(layout_name(layout)) + "): " + exact;
  if (half != exact) out += "; float16 and bfloat16: " + half;
  return out + "; table: " + source;
}

}  // namespace ringdp
