// Copies between devices and this process's memory, as the driver handles them: it polls the copies under way, starts and
// moves operations as their input comes, and releases buffers when their last copy is done. It polls because callbacks of a
// device would need a thread and its locks; while input is under way it sleeps in short stretches.
#include <algorithm>

#include "engine/engine.h"

namespace ringdp {
namespace {

constexpr auto kShortestPause = std::chrono::microseconds(50);
constexpr auto kLongestPause = std::chrono::milliseconds(1);

}  // namespace

bool Engine::look_at_copies() {
  bool moved = false;
  copying_ = false;
  for (const GroupPtr& group : groups_.busy()) {
    if (group->failing) continue;
    for (InFlight& in_flight : group->active) moved |= look_at_copies(*group, in_flight);
    for (InFlight& in_flight : group->nested) moved |= look_at_copies(*group, in_flight);
  }
  pending_copies_.look(
      [this](std::shared_ptr<void> buffers) { completions_.push(0, 0, 0, [held = std::move(buffers)] {}); });
  if (moved) copies_moved_at_ = Clock::now();
  return moved;
}

bool Engine::look_at_copies(GroupState& group, InFlight& in_flight) {
  Staging* staging = in_flight.operation->staging().get();
  if (staging == nullptr || staging->all_there()) return false;
  bool moved = false;
  try {
    moved = staging->poll();
    if (moved && in_flight.operation->started())
      in_flight.operation->more_came();
    else if (moved && in_flight.operation->can_start())
      start(group, in_flight);
  } catch (const Error& error) {
    failures_.queue(group.id, error);
  } catch (const std::exception& error) {  // what the device's libraries throw
    failures_.queue(group.id, Error(ErrorKind::kSystem, in_flight.operation->identity().text() + ": " + error.what()));
  }
  copying_ |= !staging->all_there();
  return moved;
}

// When a sleeping driver must look again, beside what its descriptors tell it.
void Engine::set_timer() {
  auto next = links_.next_send();
  if (copying_) {
    const auto now = Clock::now();
    const auto pause = std::clamp<Clock::duration>((now - copies_moved_at_) / 4, kShortestPause, kLongestPause);
    next = std::min(next, now + pause);
  }
  if (next != Clock::time_point::max()) poller_.wake_at(next);
}

}  // namespace ringdp
