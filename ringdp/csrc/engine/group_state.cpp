#include "engine/group_state.h"

#include <algorithm>
#include <utility>

#include "base/bytes.h"

namespace ringdp {
namespace {

constexpr std::size_t kHistory = 64;  // ended operations of a group that are remembered

}  // namespace

uint64_t MessageNumbers::peek(const PointToPoint& ends) const {
  auto met = met_.find({ends.from, ends.to, ends.tag});
  uint64_t count = met == met_.end() ? 0 : met->second;
  uint64_t parties = static_cast<uint64_t>(static_cast<uint32_t>(ends.from)) << 32 | static_cast<uint32_t>(ends.to);
  uint64_t hash = hash_mix(hash_mix(parties, static_cast<uint32_t>(ends.tag)), count);
  return (hash & (kMessageBit - 1)) | kMessageBit;
}

uint64_t MessageNumbers::next(const PointToPoint& ends) {
  uint64_t number = peek(ends);
  ++met_[{ends.from, ends.to, ends.tag}];
  return number;
}

GroupState::GroupState(uint64_t group, GroupView members, std::vector<int> around, std::string called)
    : id(group), view(std::move(members)), neighbours(std::move(around)), name(std::move(called)) {}

const InFlight* GroupState::oldest() const {
  if (!active.empty()) return &active.front();
  if (!nested.empty()) return &nested.front();
  return unbound.empty() ? nullptr : &unbound.front();
}

bool GroupState::any_running(const std::function<bool(const InFlight&)>& look) const {
  return std::any_of(active.begin(), active.end(), look) || std::any_of(nested.begin(), nested.end(), look) ||
         std::any_of(unbound.begin(), unbound.end(), look);
}

const InFlight* GroupState::in_the_way(const InFlight& later) const {
  if (!later.callback) return nullptr;
  for (const InFlight& earlier : nested) {
    if (&earlier == &later) break;
    if (earlier.callback == later.callback && later.operation->conflicts(*earlier.operation)) return &earlier;
  }
  return nullptr;
}

void GroupState::remember(const FlowIdentity& identity) {
  if (!in_order(identity.sequence)) {
    if (nested_history_.size() == kHistory) nested_history_.pop_front();
    nested_history_.push_back(identity);
    nested_history_.back().group = id;
    return;
  }
  history_.resize(kHistory);
  FlowIdentity& kept = history_[identity.sequence % kHistory];
  kept = identity;
  kept.group = id;
  started_upto_ = std::max(started_upto_, identity.sequence);
}

StartedOperation GroupState::find_started(uint64_t sequence) const {
  if (!in_order(sequence)) {
    for (const FlowIdentity& identity : nested_history_)
      if (identity.sequence == sequence) return {true, &identity};
    return {};
  }
  if (sequence > started_upto_) return {};
  for (const InFlight& in_flight : active)  // still waiting for its input, while a later one has started
    if (in_flight.sequence() == sequence && !in_flight.operation->started()) return {};
  const FlowIdentity& kept = history_[sequence % kHistory];
  return {true, kept.sequence == sequence ? &kept : nullptr};
}

std::string GroupState::last_called() const {
  if (!queued.empty()) return queued.back().work->text();
  return started_upto_ > 0 ? history_[started_upto_ % kHistory].text() : "";
}

}  // namespace ringdp
