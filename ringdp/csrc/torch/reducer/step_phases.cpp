#include "torch/reducer/step_phases.h"

#include <algorithm>
#include <atomic>

namespace ringdp {
namespace {

std::atomic<StepPhases::Clock::time_point> optimizer_ended{};

float seconds_between(StepPhases::Clock::time_point from, StepPhases::Clock::time_point to) {
  return std::max(0.0F, std::chrono::duration<float>(to - from).count());
}

}  // namespace

void StepPhases::note_optimizer() { optimizer_ended.store(Clock::now(), std::memory_order_relaxed); }

void StepPhases::enter(StepField next, Clock::time_point now, int64_t waited_ns) {
  if (began_) {
    const float spent = seconds_between(since_, now);
    const float waited = std::clamp(static_cast<float>(waited_ns - waited_ns_) * 1e-9F, 0.0F, spent);
    row_[phase_] += spent - waited;
    row_[kOtherWait] += waited;
  }
  began_ = true;
  phase_ = next;
  since_ = now;
  probe_.sample();
  waited_ns_ = waited_ns;
}

void StepPhases::forward_began(Clock::time_point now, int64_t waited_ns) {
  if (phase_ == kForward) return;
  // The end of the phase before: of a backward its last gradient, of the phase after the step the optimizer.
  const Clock::time_point ended =
      phase_ == kBackward ? last_gradient_ : optimizer_ended.load(std::memory_order_relaxed);
  if (began_ && ended > since_ && ended <= now) {
    row_[phase_] += seconds_between(since_, ended);
    since_ = ended;
  }
  phase_ = kBetween;
  enter(kForward, now, waited_ns);
}

void StepPhases::backward_began(Clock::time_point now, int64_t waited_ns) {
  if (phase_ != kBackward) enter(kBackward, now, waited_ns);
}

void StepPhases::computed(Clock::time_point now, int64_t waited_ns, RunDelay delay) {
  enter(kExposed, now, waited_ns);
  const float own = row_[kBetween] + row_[kForward] + row_[kBackward] + row_[kAfter];
  row_[kOffCore] = std::min(own, static_cast<float>(delay.since(delay_)) * 1e-9F);
}

StepRow StepPhases::finished(Clock::time_point now, int64_t waited_ns, RunDelay delay) {
  row_[kExposed] = seconds_between(since_, now);
  row_[kProbe] = probe_.take_mean();
  phase_ = kAfter;
  since_ = now;
  waited_ns_ = waited_ns;
  delay_ = delay;
  const StepRow row = row_;
  row_ = {};
  return row;
}

}  // namespace ringdp
