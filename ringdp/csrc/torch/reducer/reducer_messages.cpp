// The reducer's messages about parameters with no gradient, with several, and about a backward that did not end.
#include <ATen/ops/zeros.h>

#include <utility>

#include "base/error.h"
#include "base/naming.h"
#include "torch/reducer/list_format.h"
#include "torch/reducer/reducer.h"
#include "torch/reducer/reducer_errors.h"

namespace ringdp {
namespace {

constexpr std::chrono::seconds kTellTimeout{30};

}  // namespace

void Reducer::throw_if_failed() const {
  if (failed_.empty()) return;
  ErrorContext context;
  context.cause = failed_;
  context.advice = "the ranks no longer agree: leave the process group and restart from a checkpoint";
  throw Error(ErrorKind::kState, "reducing gradients failed in step " + std::to_string(step_) + ": " + failed_,
              context);
}

// The ranks exchange once which gradients each of them lacks; a rank that lacks some warns with the whole list.
void Reducer::warn_unused(const std::vector<std::size_t>& missing) {
  if (options_.unused != UnusedParameters::kFinish || static_graph_) return;
  std::vector<std::vector<uint8_t>> ranks;
  if (looks_for_others() && used_.some_rank_lacks) {
    ranks_named_ = true;
    std::vector<uint8_t> mine;
    for (const GradientState& gradient_state : gradient_states_) mine.push_back(gradient_state.used ? 1 : 0);
    ranks = gather_bytes(*bucket_reducer_.group(), mine, control_device(), "which ranks lack gradients");
  }
  if (missing.empty() || std::exchange(warned_, true)) return;
  for (std::size_t i : missing) unused_names_.push_back(names_[i]);
  TORCH_WARN(
      "parameters without gradient in step ", step_, " on rank ", bucket_reducer_.group()->getRank(), ". ",
      ranks.empty() ? unused_here(missing) : unused_by_ranks(ranks),
      " This warning appears once; find_unused_parameters=True declares that it is intended, False makes it an error.");
}

std::string Reducer::unused_here(const std::vector<std::size_t>& missing) const {
  std::vector<std::string> here;
  std::vector<std::string> everywhere;
  for (std::size_t i : missing)
    (used_.somewhere.empty() || used_.somewhere[i] ? here : everywhere).push_back(names_[i]);
  std::string text;
  if (!here.empty()) text += "Used on other ranks, so their mean counts zeros from this one: " + listed(here) + ".";
  if (!everywhere.empty()) {
    text += std::string(text.empty() ? "" : " ") + "Used on no rank, so their .grad stays None: " + listed(everywhere) +
            ".";
  }
  return text;
}

std::string Reducer::unused_by_ranks(const std::vector<std::vector<uint8_t>>& used) const {
  RankTable table;
  for (std::size_t i = 0; i < gradient_states_.size(); ++i) {
    std::vector<bool> ranks;
    for (const auto& rank : used) ranks.push_back(rank[i] != 0);
    if (std::find(ranks.begin(), ranks.end(), false) != ranks.end()) table.add(ranks, names_[i]);
  }
  std::string text;
  std::string nowhere;
  for (const RankTable::Row& row : table.rows()) {
    if (std::find(row.ranks.begin(), row.ranks.end(), true) == row.ranks.end()) {
      nowhere = "Used on no rank, so their .grad stays None: " + listed(row.names) + ".";
      continue;
    }
    text += listed(row.names) + " on " + describe_ranks(row.ranks, false) + "; used on " +
            describe_ranks(row.ranks, true) + ", and their mean counts zeros from the others. ";
  }
  text += nowhere;
  if (nowhere.empty()) text.pop_back();
  return text;
}

// Ranks that wait for this one's buckets learn why they do not come: from an operation with another name, which fails there.
// Returns a sentence on the result, for this rank's own error.
std::string Reducer::notify_others(const std::string& what) {
  if (!options_.names_compared || group_size_ == 1) return {};
  try {
    const NamedScope scope(what);
    std::vector<at::Tensor> tensors{at::zeros({1}, at::TensorOptions().dtype(at::kInt).device(control_device()))};
    c10d::AllreduceOptions options;
    options.timeout = kTellTimeout;
    bucket_reducer_.group()->allreduce(tensors, options)->wait();
    return " The other ranks' backwards stopped at the same place, and none of them waits.";
  } catch (...) {
    return " The other ranks were notified, but are in another operation:\n" + current_error_text();
  }
}

std::vector<std::size_t> Reducer::unfinished() const {
  std::vector<std::size_t> result;
  for (std::size_t i = 0; i < gradient_states_.size(); ++i) {
    const GradientState& gradient_state = gradient_states_[i];
    if (!gradient_state.ready || (learned_graph_ && gradient_state.arrivals_left > 0)) result.push_back(i);
  }
  return result;
}

std::string Reducer::missing_text() const {
  std::string indices;
  std::vector<std::string> names;
  for (std::size_t i : unfinished()) {
    indices.append(" ").append(std::to_string(i));
    names.push_back(names_[i]);
  }
  const std::string rank = std::to_string(bucket_reducer_.group()->getRank());
  return "Parameter indices which did not receive grad for rank " + rank + ":" + indices +
         "\nParameters which did not receive grad for rank " + rank + ": " + listed(names);
}

// The message about a backward that did not come to its end.
std::string Reducer::left_text() const {
  const bool others_wait = peer_report_.empty() && group_size_ > 1 && next_bucket_ < sending_;
  return "The backward of step " + std::to_string(step_) + " did not come to its end on rank " +
         std::to_string(bucket_reducer_.group()->getRank()) +
         ": an exception left it, or another thread is in it. It had sent " + std::to_string(next_bucket_) + " of " +
         std::to_string(sending_) + " buckets." +
         (others_wait ? " Ranks whose backward goes on wait for the others." : "") + peer_report_ +
         "\nGradients are not averaged any more: leave the process group and restart from a checkpoint.";
}

void Reducer::throw_if_unfinished(bool notify) {
  if (!active_) return;
  const bool forbidden = options_.unused == UnusedParameters::kForbidden;
  if (!static_graph_ && !forbidden && next_bucket_ == 0) {
    active_ = false;  // nothing had left: as if it had never begun
    return;
  }
  if (notify && peer_report_.empty()) {
    const std::vector<std::size_t> missing = unfinished();
    peer_report_ = notify_others("backward of step " + std::to_string(step_) + " did not end" +
                                 (missing.empty() ? "" : ": no gradient for " + describe_names(missing, names_)));
  }
  const std::string head = "Expected to have finished reduction in the prior iteration before starting a new one. ";
  if (!ended_short_ && !static_graph_)
    TORCH_CHECK(false, head, left_text(), unfinished().empty() ? "" : "\n" + missing_text());
  std::string tail = missing_text();
  if (!ended_short_) {
    tail += "\n" + left_text();
  } else if (!peer_report_.empty()) {
    tail += "\n" + peer_report_.substr(1);
  }
  if (static_graph_) {
    TORCH_CHECK(
        false, head,
        "This error indicates that your training graph has changed in this iteration, e.g., one parameter is used "
        "in first iteration, but then got unused in the second iteration. this is not compatible with "
        "static_graph set to True.\n",
        tail);
  }
  TORCH_CHECK(false, head,
              "This error indicates that your module has parameters that were not used in producing loss. You can "
              "enable unused parameter detection by passing the keyword argument `find_unused_parameters=True` to "
              "`torch.nn.parallel.DistributedDataParallel`, and by \nmaking sure all `forward` function outputs "
              "participate in calculating loss. \nIf you already have done the above, then the distributed data "
              "parallel module wasn't able to locate the output tensors in the return value of your module's `forward` "
              "function. Please include the loss function and the structure of the return value of `forward` of your "
              "module when reporting this issue (e.g. list, dict, iterable).\n",
              tail);
}

void Reducer::throw_marked_twice(std::size_t parameter) const {
  const ModuleParameter& described = module_parameters_[gradient_states_[parameter].param_index];
  TORCH_CHECK(
      false,
      "Expected to mark a variable ready only once. This error is caused by one of the following reasons: "
      "1) Use of a module parameter outside the `forward` function. Please make sure model parameters are not "
      "shared across multiple concurrent forward-backward passes. or try to use _set_static_graph() as a "
      "workaround if this module graph does not change during training loop. "
      "2) Reused parameters in multiple reentrant backward passes. For example, if you use multiple `checkpoint` "
      "functions to wrap the same part of your model, it would result in the same set of parameters been used by "
      "different reentrant backward passes multiple times, and hence marking a variable ready multiple times. "
      "Pass static_graph=True if the graph stays the same during training, or use_reentrant=False.\n"
      "Parameter at index ",
      parameter, " with name ", names_[parameter],
      " has been marked as ready twice. This means that multiple autograd engine hooks have fired for this "
      "particular parameter during this iteration.",
      described.used_in.empty() ? "" : " It is used in ", described.used_in, described.used_in.empty() ? "" : ".");
}

}  // namespace ringdp
