#include "engine/staged_copies.h"

#include <algorithm>
#include <exception>
#include <utility>

namespace ringdp {

PendingCopies::~PendingCopies() {
  if (under_way_.empty() && lost_.empty()) return;
  // A device that does not answer may still write there.
  [[maybe_unused]] auto* under_way = new std::vector<PendingCopy>(std::move(under_way_));
  [[maybe_unused]] auto* lost = new std::vector<PendingCopy>(std::move(lost_));
}

void PendingCopies::wait_for(std::shared_ptr<Staging> staging, std::shared_ptr<void> buffers) {
  under_way_.push_back({std::move(staging), std::move(buffers)});
}

void PendingCopies::look(const std::function<void(std::shared_ptr<void>)>& release) {
  std::erase_if(under_way_, [&](PendingCopy& copy) {
    try {
      if (!copy.staging->landed()) return false;
      release(std::make_shared<PendingCopy>(std::move(copy)));
    } catch (const std::exception&) {  // the operations that use the device now report it
      lost_.push_back(std::move(copy));
    }
    return true;
  });
}

namespace {

constexpr auto kShortestPause = std::chrono::microseconds(50);
constexpr auto kLongestPause = std::chrono::milliseconds(1);

}  // namespace

StagedCopies::StagedCopies(const DriverRole& role, const GroupTable& groups, FailureAgreement& failures,
                           CompletionQueue& completions, Start start)
    : role_(role), groups_(groups), failures_(failures), completions_(completions), start_(std::move(start)) {}

void StagedCopies::add(const Staging* staging) {
  role_.assert_held();
  if (staging == nullptr) return;
  ++staged_;
  moved_at_ = Clock::now();
}

void StagedCopies::retire(std::shared_ptr<Staging> staging, const std::shared_ptr<void>& buffers) {
  role_.assert_held();
  if (!staging) return;
  --staged_;
  pending_.wait_for(std::move(staging), buffers);
}

bool StagedCopies::under_way() const {
  role_.assert_held();
  return !pending_.empty();
}

bool StagedCopies::look() {
  role_.assert_held();
  if (staged_ == 0 && pending_.empty()) return false;
  bool moved = false;
  waiting_ = false;
  for (const GroupPtr& group : groups_.busy()) {
    if (group->failing) continue;
    for (InFlight& in_flight : group->active) moved |= look_at(*group, in_flight);
    for (InFlight& in_flight : group->nested) moved |= look_at(*group, in_flight);
  }
  pending_.look([this](std::shared_ptr<void> buffers) { completions_.push(0, 0, 0, [held = std::move(buffers)] {}); });
  if (moved) moved_at_ = Clock::now();
  return moved;
}

bool StagedCopies::look_at(GroupState& group, InFlight& in_flight) {
  Staging* staging = in_flight.operation->staging().get();
  if (staging == nullptr || staging->all_there()) return false;
  bool moved = false;
  try {
    moved = staging->poll();
    if (moved && in_flight.operation->started())
      in_flight.operation->more_came();
    else if (moved && in_flight.operation->can_start())
      start_(group, in_flight);
  } catch (const Error& error) {
    failures_.queue(group.id, error);
  } catch (const std::exception& error) {  // of the device's libraries
    failures_.queue(group.id, Error(ErrorKind::kSystem, in_flight.operation->identity().text() + ": " + error.what()));
  }
  waiting_ |= !staging->all_there();
  return moved;
}

Clock::time_point StagedCopies::next_look() {
  role_.assert_held();
  if (!waiting_) return Clock::time_point::max();
  const auto now = Clock::now();
  return now + std::clamp<Clock::duration>((now - moved_at_) / 4, kShortestPause, kLongestPause);
}

}  // namespace ringdp
