// The reducer's messages about parameters with no gradient, with several, and about a backward that did not end.
#include <utility>

#include "base/error.h"
#include "torch/reducer/messages.h"
#include "torch/reducer/reducer.h"

namespace ringdp {
void Reducer::throw_if_unfinished(bool notify) {
  if (!backward_.active()) return;
  const bool forbidden = options_.unused == UnusedParameters::kForbidden;
  if (!arrivals_.static_graph() && !forbidden && arrivals_.sent() == 0) {
    backward_.end();  // nothing had left: as if it had never begun
    return;
  }
  UnfinishedBackward backward;
  backward.missing = arrivals_.unfinished();
  if (notify && backward_.peer_report().empty()) {
    backward_.set_peer_report(
        group_.notify_others(unfinished_notice(backward_.step(), backward.missing, parameters_.names()),
                             group_.control_device(parameters_.tensors().front())));
  }
  backward.step = backward_.step();
  backward.rank = group_.rank();
  backward.ranks = group_.ranks();
  backward.sent = arrivals_.sent();
  backward.sending = arrivals_.sending();
  backward.ended_short = backward_.ended_short();
  backward.static_graph = arrivals_.static_graph();
  backward.peer_report = backward_.peer_report();
  TORCH_CHECK(false, unfinished_text(backward, parameters_.names()));
}

void Reducer::throw_marked_twice(std::size_t parameter) const {
  const ModuleParameter& described = parameters_[parameter];
  TORCH_CHECK(false, marked_twice_text(parameter, described.name, described.used_in));
}

}  // namespace ringdp
