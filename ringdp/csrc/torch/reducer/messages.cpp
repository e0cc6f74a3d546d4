#include "torch/reducer/messages.h"

#include <algorithm>
#include <cstdio>
#include <functional>

namespace ringdp {
namespace {

constexpr std::size_t kNamesShown = 20;
constexpr std::size_t kWarnedBytes = 100;  // of names in a line of a warning
constexpr std::size_t kDescriptionBytes = 200;

// Names, those with the same ranks together, in the order in which they were added.
class RankTable {
 public:
  struct Row {
    std::vector<bool> ranks;
    std::vector<std::string> names;
  };
  void add(const std::vector<bool>& ranks, const std::string& name) {
    const auto row = std::find_if(rows_.begin(), rows_.end(), [&](const Row& known) { return known.ranks == ranks; });
    if (row == rows_.end()) {
      rows_.push_back({ranks, {name}});
    } else {
      row->names.push_back(name);
    }
  }
  const std::vector<Row>& rows() const { return rows_; }

 private:
  std::vector<Row> rows_;
};

uint32_t fnv1a(uint32_t hash, const std::string& text) {
  for (unsigned char c : text) hash = (hash ^ c) * 16777619u;
  return (hash ^ 0xffu) * 16777619u;
}

// Of DDP's error: the indices and names of missing parameters.
std::string missing_text(const UnfinishedBackward& backward, std::span<const std::string> names) {
  std::string indices;
  std::vector<std::string> shown;
  for (std::size_t i : backward.missing) {
    indices.append(" ").append(std::to_string(i));
    shown.push_back(names[i]);
  }
  const std::string rank = std::to_string(backward.rank);
  return "Parameter indices which did not receive grad for rank " + rank + ":" + indices +
         "\nParameters which did not receive grad for rank " + rank + ": " + listed(shown);
}

std::string interrupted_text(const UnfinishedBackward& backward) {
  const bool others_wait = backward.peer_report.empty() && backward.ranks > 1 && backward.sent < backward.sending;
  return "The backward of step " + std::to_string(backward.step) + " did not come to its end on rank " +
         std::to_string(backward.rank) + ": an exception left it, or another thread is in it. It had sent " +
         std::to_string(backward.sent) + " of " + std::to_string(backward.sending) + " buckets." +
         (others_wait ? " Ranks whose backward goes on wait for the others." : "") + backward.peer_report +
         "\nGradients are not averaged any more: leave the process group and restart from a checkpoint.";
}

}  // namespace

std::string listed(const std::vector<std::string>& names, std::size_t most_bytes) {
  std::string text;
  std::size_t shown = 0;
  for (; shown < std::min(names.size(), kNamesShown); ++shown) {
    if (shown > 0 && text.size() + names[shown].size() > most_bytes) break;
    text.append(shown > 0 ? ", " : "").append(names[shown]);
  }
  if (names.size() > shown) text.append(", … ").append(std::to_string(names.size() - shown)).append(" more");
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

std::string describe_names(std::span<const std::size_t> members, std::span<const std::string> names) {
  std::string text;
  uint32_t hash = 2166136261u;
  std::size_t shown = 0;
  for (std::size_t i = 0; i < members.size(); ++i) {
    const std::string& name = names[members[i]];
    hash = fnv1a(hash, name);
    if (shown != i || (i > 0 && text.size() + name.size() > kDescriptionBytes)) continue;
    if (i > 0) text += ", ";
    text += name.substr(0, kDescriptionBytes);
    ++shown;
  }
  if (shown < members.size()) {
    char rest[64];
    std::snprintf(rest, sizeof(rest), ", … %zu more [%08x]", members.size() - shown, hash);
    text += rest;
  }
  return text;
}

std::string describe_bucket(std::size_t index, std::span<const std::size_t> members,
                            std::span<const std::string> names) {
  return "bucket " + std::to_string(index) + ": " + describe_names(members, names);
}

std::string unused_here(const std::vector<std::size_t>& missing, const std::vector<bool>& somewhere,
                        std::span<const std::string> names) {
  std::vector<std::string> here;
  std::vector<std::string> everywhere;
  for (std::size_t i : missing) (somewhere.empty() || somewhere[i] ? here : everywhere).push_back(names[i]);
  std::string text;
  if (!here.empty())
    text += "Used on other ranks, so their mean counts zeros from this one: " + listed(here, kWarnedBytes) + ".";
  if (!everywhere.empty()) {
    text += std::string(text.empty() ? "" : "\n") +
            "Used on no rank, so their .grad stays None: " + listed(everywhere, kWarnedBytes) + ".";
  }
  return text;
}

std::string unused_by_ranks(const std::vector<std::vector<uint8_t>>& used, std::span<const std::string> names) {
  RankTable table;
  for (std::size_t i = 0; i < names.size(); ++i) {
    std::vector<bool> ranks;
    for (const auto& rank : used) ranks.push_back(rank[i] != 0);
    if (std::find(ranks.begin(), ranks.end(), false) != ranks.end()) table.add(ranks, names[i]);
  }
  std::string text;
  std::string nowhere;
  for (const RankTable::Row& row : table.rows()) {
    if (std::find(row.ranks.begin(), row.ranks.end(), true) == row.ranks.end()) {
      nowhere = "Used on no rank, so their .grad stays None: " + listed(row.names, kWarnedBytes) + ".";
      continue;
    }
    text += listed(row.names, kWarnedBytes) + " on " + describe_ranks(row.ranks, false) + "; used on " +
            describe_ranks(row.ranks, true) + ", and their mean counts zeros from the others.\n";
  }
  text += nowhere;
  if (nowhere.empty()) text.pop_back();
  return text;
}

TrainingDisagreement requires_grad_disagreement(const std::vector<std::vector<bool>>& trains,
                                                std::span<const std::string> names) {
  RankTable table;
  for (std::size_t i = 0; i < names.size(); ++i) {
    std::vector<bool> with;
    for (const auto& rank : trains) with.push_back(rank[i]);
    if (std::adjacent_find(with.begin(), with.end(), std::not_equal_to<>()) != with.end()) table.add(with, names[i]);
  }
  if (table.rows().empty()) return {};
  std::string text = "the ranks disagree about requires_grad:";
  for (const RankTable::Row& row : table.rows()) {
    text += " " + listed(row.names) + (row.names.size() == 1 ? " requires" : " require") + " grad on " +
            describe_ranks(row.ranks, true) + " and not on " + describe_ranks(row.ranks, false) + ".";
  }
  return {text, table.rows().front().names.front()};
}

std::string unfinished_text(const UnfinishedBackward& backward, std::span<const std::string> names) {
  const std::string head = "Expected to have finished reduction in the prior iteration before starting a new one. ";
  const std::string missing = missing_text(backward, names);
  if (!backward.ended_short && !backward.static_graph)
    return head + interrupted_text(backward) + (backward.missing.empty() ? "" : "\n" + missing);
  std::string tail = missing;
  if (!backward.ended_short) {
    tail += "\n" + interrupted_text(backward);
  } else if (!backward.peer_report.empty()) {
    tail += "\n" + backward.peer_report.substr(1);
  }
  if (backward.static_graph) {
    return head +
           "This error indicates that your training graph has changed in this iteration, e.g., one parameter is used "
           "in first iteration, but then got unused in the second iteration. this is not compatible with "
           "static_graph set to True.\n" +
           tail;
  }
  return head +
         "This error indicates that your module has parameters that were not used in producing loss. You can "
         "enable unused parameter detection by passing the keyword argument `find_unused_parameters=True` to "
         "`torch.nn.parallel.DistributedDataParallel`, and by \nmaking sure all `forward` function outputs "
         "participate in calculating loss. \nIf you already have done the above, then the distributed data "
         "parallel module wasn't able to locate the output tensors in the return value of your module's `forward` "
         "function. Please include the loss function and the structure of the return value of `forward` of your "
         "module when reporting this issue (e.g. list, dict, iterable).\n" +
         tail;
}

std::string unfinished_notice(int64_t step, const std::vector<std::size_t>& missing,
                              std::span<const std::string> names) {
  return "backward of step " + std::to_string(step) + " did not end" +
         (missing.empty() ? "" : ": no gradient for " + describe_names(missing, names));
}

std::string unexpected_text(const std::string& name) {
  return "Your training graph has changed in this iteration, e.g., one parameter is unused in first iteration, "
         "but then got used in the second iteration. this is not compatible with static_graph set to True. "
         "Parameter: " +
         name;
}

std::string marked_twice_text(std::size_t parameter, const std::string& name, const std::string& used_in) {
  return "Expected to mark a variable ready only once. This error is caused by one of the following reasons: "
         "1) Use of a module parameter outside the `forward` function. Please make sure model parameters are not "
         "shared across multiple concurrent forward-backward passes. or try to use _set_static_graph() as a "
         "workaround if this module graph does not change during training loop. "
         "2) Reused parameters in multiple reentrant backward passes. For example, if you use multiple `checkpoint` "
         "functions to wrap the same part of your model, it would result in the same set of parameters been used by "
         "different reentrant backward passes multiple times, and hence marking a variable ready multiple times. "
         "Pass static_graph=True if the graph stays the same during training, or use_reentrant=False.\n"
         "Parameter at index " +
         std::to_string(parameter) + " with name " + name +
         " has been marked as ready twice. This means that multiple autograd engine hooks have fired for this "
         "particular parameter during this iteration." +
         (used_in.empty() ? "" : " It is used in " + used_in + ".");
}

}  // namespace ringdp
