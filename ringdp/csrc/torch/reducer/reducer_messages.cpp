// The reducer's messages about parameters with no gradient, with several, and about a backward that did not end.
#include <ATen/ops/zeros.h>

#include <utility>

#include "base/error.h"
#include "base/naming.h"
#include "torch/reducer/messages.h"
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
  throw Error(ErrorKind::kState,
              "reducing gradients failed in step " + std::to_string(backward_.step()) + ": " + failed_, context);
}

// The ranks exchange once which gradients each of them lacks; a rank that lacks some warns with the whole list.
void Reducer::warn_unused(const std::vector<std::size_t>& missing) {
  if (options_.unused != UnusedParameters::kFinish || arrivals_.static_graph()) return;
  std::vector<std::vector<uint8_t>> ranks;
  if (looks_for_others() && used_.some_rank_lacks) {
    ranks_named_ = true;
    std::vector<uint8_t> mine;
    for (std::size_t i = 0; i < arrivals_.size(); ++i) mine.push_back(arrivals_.used(i) ? 1 : 0);
    ranks = gather_bytes(*bucket_reducer_.group(), mine, control_device(), "which ranks lack gradients");
  }
  if (missing.empty() || std::exchange(warned_, true)) return;
  TORCH_WARN(
      "parameters without gradient in step ", backward_.step(), " on rank ", bucket_reducer_.group()->getRank(), ". ",
      ranks.empty() ? unused_here(missing, used_.somewhere, parameters_.names())
                    : unused_by_ranks(ranks, parameters_.names()),
      " This warning appears once; find_unused_parameters=True declares that it is intended, False makes it an error.");
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

void Reducer::throw_if_unfinished(bool notify) {
  if (!backward_.active()) return;
  const bool forbidden = options_.unused == UnusedParameters::kForbidden;
  if (!arrivals_.static_graph() && !forbidden && arrivals_.sent() == 0) {
    backward_.end();  // nothing had left: as if it had never begun
    return;
  }
  UnfinishedBackward backward;
  backward.missing = arrivals_.unfinished();
  if (notify && peer_report_.empty())
    peer_report_ = notify_others(unfinished_notice(backward_.step(), backward.missing, parameters_.names()));
  backward.step = backward_.step();
  backward.rank = bucket_reducer_.group()->getRank();
  backward.ranks = group_size_;
  backward.sent = arrivals_.sent();
  backward.sending = arrivals_.sending();
  backward.ended_short = backward_.ended_short();
  backward.static_graph = arrivals_.static_graph();
  backward.peer_report = peer_report_;
  TORCH_CHECK(false, unfinished_text(backward, parameters_.names()));
}

void Reducer::throw_marked_twice(std::size_t parameter) const {
  const ModuleParameter& described = parameters_[parameter];
  TORCH_CHECK(false, marked_twice_text(parameter, described.name, described.used_in));
}

}  // namespace ringdp
