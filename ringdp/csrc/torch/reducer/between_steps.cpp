#include "torch/reducer/between_steps.h"

#include <c10/util/Exception.h>

#include <utility>
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

BetweenSteps::BetweenSteps(GradientLayout& layout, ArrivalTracker& arrivals, BackwardState& backward, UsedMap& used,
                           StepFailure& failure, StepGuard& guard, StepTimes& times)
    : layout_(layout),
      arrivals_(arrivals),
      backward_(backward),
      used_(used),
      failure_(failure),
      guard_(guard),
      times_(times) {
  note_other_parameters();
}

// The new parameters have no arrivals.
void BetweenSteps::note_other_parameters() {
  arrivals_.start(layout_.parameters.size());
  times_.count_kept(layout_.plan);
}

void BetweenSteps::follow_requires_grad() {
  if (failure_.keeping([&] { return layout_.follow_requires_grad(); })) note_other_parameters();
}

void BetweenSteps::announce_weight(double weight, bool sync, std::optional<bool> training) {
  if (layout_.parameters.size() == 0) return;
  layout_.repair.follow_members();
  const bool discarded = layout_.weights.accumulated() && layout_.left_over.none();
  const std::string note = training && !layout_.repair.on() ? backward_.forwards().note_of(*training) : std::string();
  const auto announce = [&] { layout_.weights.announce(weight, sync, discarded, note); };
  sync ? failure_.keeping(announce) : announce();
}

bool BetweenSteps::follow_learned_order() {
  if (!layout_.follow_learned_order()) return false;
  times_.count_kept(layout_.plan);
  return true;
}

ReductionPlan BetweenSteps::replace_parameters(std::vector<ModuleParameter> parameters) {
  guard_.throw_if_failed();
  guard_.throw_if_unfinished(/*notify=*/false);
  ReductionPlan before = layout_.replace_parameters(std::move(parameters));
  used_.warn_again();
  note_other_parameters();
  return before;
}

void BetweenSteps::set_reductions(ReductionPlan& reductions) {
  guard_.refuse_change_of_compression();
  layout_.check_reductions(reductions);
  reductions = layout_.set_reductions(std::move(reductions));
  times_.count_kept(layout_.plan);
}

void BetweenSteps::choose(const std::vector<int>& reduction_of_bucket) {
  guard_.throw_if_failed();
  guard_.refuse_in_backward("reductions of buckets cannot be chosen during a backward");
  layout_.choose(reduction_of_bucket);
}

void BetweenSteps::register_hook(std::unique_ptr<c10d::CommHookInterface>&& hook) {
  TORCH_CHECK(!backward_.active(), "communication hooks are registered between steps, not during backward");
  layout_.set_hook(std::move(hook));
}

void BetweenSteps::set_static_graph() {
  TORCH_CHECK(backward_.step() == 0,
              "set_static_graph() should be called before training loop starts and after DistributedDataParallel is "
              "constructed.");
  arrivals_.set_static_graph();
}

void BetweenSteps::set_group(c10::intrusive_ptr<c10d::ProcessGroup> group, bool average, bool names_compared) {
  const bool compressed = !layout_.reductions.none();
  if (compressed) guard_.refuse_change_of_compression();
  backward_.forwards().settle();
  layout_.set_group(std::move(group), average, names_compared);
  if (compressed) times_.count_kept(layout_.plan);
}

GradientCompression& BetweenSteps::compression(const char* refusal) {
  guard_.refuse_in_backward(refusal);
  layout_.repair.follow_members();
  return layout_.compression;
}

}  // namespace ringdp
