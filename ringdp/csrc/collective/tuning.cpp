#include "collective/tuning.h"

#include <set>
#include <vector>

#include "base/error.h"

namespace ringdp {
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
    {"pairwise_bytes", &AlgorithmTable::pairwise_bytes},
    {"exact_bucket_bytes", &AlgorithmTable::exact_bucket_bytes},
};

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
