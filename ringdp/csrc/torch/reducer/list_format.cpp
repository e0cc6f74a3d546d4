#include "torch/reducer/list_format.h"

#include <algorithm>
#include <cstddef>

namespace ringdp {
namespace {

constexpr std::size_t kNamesShown = 20;

}  // namespace

std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (std::size_t i = 0; i < std::min(names.size(), kNamesShown); ++i) {
    if (i > 0) text.append(", ");
    text.append(names[i]);
  }
  if (names.size() > kNamesShown)
    text.append(", … ").append(std::to_string(names.size() - kNamesShown)).append(" more");
  return text;
}

std::string describe_ranks(const std::vector<bool>& ranks, bool which) {
  std::string text;
  std::size_t count = 0;
  for (std::size_t first = 0; first < ranks.size(); ++first) {
    if (ranks[first] != which) continue;
    std::size_t last = first;
    while (last + 1 < ranks.size() && ranks[last + 1] == which) ++last;
    count += last - first + 1;
    text += (text.empty() ? "" : ", ") + std::to_string(first);
    if (last == first + 1) text += ", " + std::to_string(last);
    if (last > first + 1) text += "-" + std::to_string(last);
    first = last;
  }
  if (count == 0) return "no rank";
  return (count == 1 ? "rank " : "ranks ") + text;
}

void RankTable::add(const std::vector<bool>& ranks, const std::string& name) {
  const auto row = std::find_if(rows_.begin(), rows_.end(), [&](const Row& known) { return known.ranks == ranks; });
  if (row == rows_.end()) {
    rows_.push_back({ranks, {name}});
  } else {
    row->names.push_back(name);
  }
}

}  // namespace ringdp
