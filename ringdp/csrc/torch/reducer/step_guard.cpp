#include "torch/reducer/step_guard.h"

#include <c10/util/Exception.h>

#include <vector>

#include "base/error.h"
#include "torch/reducer/messages.h"

namespace ringdp {

void StepGuard::throw_if_failed() const {
  const std::string& failed = failure_.text();
  if (failed.empty()) return;
  ErrorContext context;
  context.cause = failed;
  context.advice = "the ranks no longer agree: leave the process group and restart from a checkpoint";
  throw Error(ErrorKind::kState,
              "reducing gradients failed in step " + std::to_string(backward_.step()) + ": " + failed, context);
}

void StepGuard::throw_if_unfinished(bool notify) {
  if (!backward_.active()) return;
  const bool forbidden = layout_.options.unused == UnusedParameters::kForbidden;
  if (!arrivals_.static_graph() && !forbidden && arrivals_.sent() == 0) return backward_.abandon();
  const std::vector<std::string>& names = layout_.parameters.names();
  UnfinishedBackward unfinished;
  unfinished.missing = arrivals_.unfinished();
  if (notify && backward_.peer_report().empty()) {
    backward_.set_peer_report(
        layout_.group.notify_others(unfinished_notice(backward_.step(), unfinished.missing, names),
                                    layout_.group.control_device(layout_.parameters.tensors().front())));
  }
  unfinished.step = backward_.step();
  unfinished.rank = layout_.group.rank();
  unfinished.ranks = layout_.group.ranks();
  unfinished.sent = arrivals_.sent();
  unfinished.sending = arrivals_.sending();
  unfinished.ended_short = backward_.ended_short();
  unfinished.static_graph = arrivals_.static_graph();
  unfinished.peer_report = backward_.peer_report();
  TORCH_CHECK(false, unfinished_text(unfinished, names));
}

void StepGuard::refuse_in_backward(const char* refusal) const {
  if (backward_.active()) throw Error(ErrorKind::kState, refusal);
}

void StepGuard::refuse_change_of_compression() const {
  throw_if_failed();
  refuse_in_backward(
      "compression cannot change during a backward, nor after one that an exception left: change it between steps");
  if (!backward_.due()) return;
  throw Error(
      ErrorKind::kState,
      "compression cannot change between a forward and its backward: change it after backward, or let go of the "
      "forward's output");
}

}  // namespace ringdp
