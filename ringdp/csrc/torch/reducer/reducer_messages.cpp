// What the reducer says about parameters without gradient, with too many, and about a backward that did not end.
#include <ATen/ops/zeros.h>

#include <utility>

#include "base/error.h"
#include "base/naming.h"
#include "torch/reducer.h"
#include "torch/reducer_errors.h"
#include "torch/reducer_text.h"

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

// The ranks look together, once, at who lacks what; a rank that lacks something says it all.
void Reducer::tell_unused(const std::vector<std::size_t>& missing) {
  if (options_.unused != UnusedParameters::kFinish || static_graph_) return;
  std::vector<std::vector<uint8_t>> ranks;
  if (looks_for_others() && used_.somebody_lacks) {
    ranks_named_ = true;
    std::vector<uint8_t> mine;
    for (const Slot& slot : slots_) mine.push_back(slot.used ? 1 : 0);
    ranks = gather_bytes(*exchange_.group(), mine, control_device(), "which ranks lack gradients");
  }
  if (missing.empty() || std::exchange(warned_, true)) return;
  for (std::size_t i : missing) unused_names_.push_back(names_[i]);
  TORCH_WARN("parameters without gradient in step ", step_, " on rank ", exchange_.group()->getRank(), ". ",
             ranks.empty() ? unused_here(missing) : unused_by_ranks(ranks),
             " Said once; find_unused_parameters=True says that this is meant, False makes it an error.");
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
  for (std::size_t i = 0; i < slots_.size(); ++i) {
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

// Whoever waits for buckets of this rank learns why they do not come: an operation with another name. What came of it.
std::string Reducer::tell_others(const std::string& what) {
  if (!options_.names_compared || group_size_ == 1) return {};
  try {
    const NamedScope scope(what);
    std::vector<at::Tensor> tensors{at::zeros({1}, at::TensorOptions().dtype(at::kInt).device(control_device()))};
    c10d::AllreduceOptions options;
    options.timeout = kTellTimeout;
    exchange_.group()->allreduce(tensors, options)->wait();
    return "\nIt is the same on all ranks.";
  } catch (...) {
    return "\n" + current_error_text();
  }
}

std::vector<std::size_t> Reducer::unfinished() const {
  std::vector<std::size_t> result;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    if (!slot.ready || (learned_graph_ && slot.arrivals_left > 0)) result.push_back(i);
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
  const std::string rank = std::to_string(exchange_.group()->getRank());
  return "Parameter indices which did not receive grad for rank " + rank + ":" + indices +
         "\nParameters which did not receive grad for rank " + rank + ": " + listed(names);
}

void Reducer::throw_if_unfinished(bool tell) {
  if (!active_) return;
  const bool forbidden = options_.unused == UnusedParameters::kForbidden;
  if (!static_graph_ && !forbidden && next_bucket_ == 0) {
    active_ = false;  // nothing had left: as if it had never begun
    return;
  }
  if (tell && told_.empty()) {
    told_ = tell_others("backward of step " + std::to_string(step_) + " did not end: no gradient for " +
                        describe_names(unfinished(), names_));
  }
  const std::string tail = missing_text() + told_;
  const std::string head = "Expected to have finished reduction in the prior iteration before starting a new one. ";
  if (static_graph_) {
    TORCH_CHECK(
        false, head,
        "This error indicates that your training graph has changed in this iteration, e.g., one parameter is used "
        "in first iteration, but then got unused in the second iteration. this is not compatible with "
        "static_graph set to True.\n",
        tail);
  }
  if (forbidden) {
    TORCH_CHECK(
        false, head,
        "This error indicates that your module has parameters that were not used in producing loss. You can "
        "enable unused parameter detection by passing the keyword argument `find_unused_parameters=True` to "
        "`torch.nn.parallel.DistributedDataParallel`, and by \nmaking sure all `forward` function outputs "
        "participate in calculating loss. \nIf you already have done the above, then the distributed data "
        "parallel module wasn't able to locate the output tensors in the return value of your module's `forward` "
        "function. Please include the loss function and the structure of the return value of `forward` of your "
        "module when reporting this issue (e.g. list, dict, iterable).\n",
        tail);
  }
  TORCH_CHECK(false, head, "A backward was left by an exception after ", next_bucket_, " of ", buckets_.size(),
              " buckets had been sent; the other ranks wait for the rest.\n", tail);
}

void Reducer::throw_marked_twice(std::size_t parameter) const {
  const WatchedParameter& watched = watch_[slots_[parameter].watched];
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
      watched.used_in.empty() ? "" : " It is used in ", watched.used_in, watched.used_in.empty() ? "" : ".");
}

}  // namespace ringdp
