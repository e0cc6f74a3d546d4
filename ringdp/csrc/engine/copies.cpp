// What the driver does about copies between devices and this process's memory: it asks for what is under way, starts and
// moves operations as their input comes, and lets go of buffers that nothing touches any more. It is never told: callbacks
// of a device would need a thread and its locks. So it sleeps in short stretches while input is under way.
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
  for (const GroupPtr& group : busy_) {
    if (group->doom) continue;
    for (Slot& slot : group->active) moved |= look_at_copies(*group, slot);
    for (Slot& slot : group->nested) moved |= look_at_copies(*group, slot);
  }
  landing_.look([this](std::shared_ptr<void> buffers) { completions_.push(0, 0, 0, [held = std::move(buffers)] {}); });
  if (moved) copies_moved_at_ = Clock::now();
  return moved;
}

bool Engine::look_at_copies(Group& group, Slot& slot) {
  Staging* staging = slot.operation->staging().get();
  if (staging == nullptr || staging->all_there()) return false;
  bool moved = false;
  try {
    moved = staging->poll();
    if (moved && slot.operation->started())
      slot.operation->more_came();
    else if (moved && slot.operation->can_start())
      start(group, slot);
  } catch (const Error& error) {
    fail_later(group.id, error);
  } catch (const std::exception& error) {  // what the device's libraries throw
    fail_later(group.id, Error(ErrorKind::kSystem, slot.operation->identity().text() + ": " + error.what()));
  }
  copying_ |= !staging->all_there();
  return moved;
}

// When a sleeping driver must look again, beside what its descriptors tell it.
void Engine::set_timer() {
  auto next = Clock::time_point::max();
  if (limiter_ && std::any_of(links_.begin(), links_.end(), [](auto& link) { return link && link->held_back(); }))
    next = limiter_->next();
  if (copying_) {
    const auto now = Clock::now();
    const auto pause = std::clamp<Clock::duration>((now - copies_moved_at_) / 4, kShortestPause, kLongestPause);
    next = std::min(next, now + pause);
  }
  if (next != Clock::time_point::max()) poller_.wake_at(next);
}

}  // namespace ringdp
