#include "engine/group_table.h"

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

namespace {

constexpr std::size_t kMostEarlyFailures = 256;  // of groups that this rank has not made yet

}  // namespace

GroupPtr GroupTable::add(uint64_t key, const GroupView& view, std::vector<int> neighbours, const std::string& name) {
  MutexLock lock(mutex_);
  const uint64_t id = hash_mix(key, ++made_[key]);
  auto group = std::make_shared<GroupState>(id, view, std::move(neighbours), name);
  if (auto early = early_failures_.extract(id)) group->failure_ = early.mapped();
  return groups_[id] = std::move(group);
}

void GroupTable::remove(uint64_t id) {
  GroupPtr removed;  // destroyed without the lock
  MutexLock lock(mutex_);
  if (auto found = groups_.extract(id)) removed = std::move(found.mapped());
}

GroupPtr GroupTable::find(uint64_t id) const {
  MutexLock lock(mutex_);
  auto found = groups_.find(id);
  return found == groups_.end() ? nullptr : found->second;
}

std::vector<GroupPtr> GroupTable::all() const {
  std::vector<GroupPtr> found;
  MutexLock lock(mutex_);
  for (const auto& [id, group] : groups_) found.push_back(group);
  return found;
}

std::vector<GroupPtr> GroupTable::with(int peer) const {
  std::vector<GroupPtr> found = all();
  std::erase_if(found, [&](const GroupPtr& group) {
    const auto& members = group->view.members;
    return std::find(members.begin(), members.end(), peer) == members.end();
  });
  return found;
}

uint64_t GroupTable::next_sequence(GroupState& group) {
  MutexLock lock(mutex_);
  return ++group.next_sequence_;
}

uint64_t GroupTable::called_upto(const GroupState& group) const {
  MutexLock lock(mutex_);
  return group.next_sequence_;
}

bool GroupTable::fail(GroupState& group, const std::exception_ptr& failure) {
  std::vector<std::weak_ptr<const FailureListener>> listeners;
  {
    MutexLock lock(mutex_);
    if (group.failure_) return false;
    group.failure_ = failure;
    listeners.swap(group.listeners_);
  }
  for (const auto& listener : listeners)
    if (const auto callback = listener.lock()) (*callback)(failure);
  return true;
}

std::exception_ptr GroupTable::failure_of(const GroupState& group) const {
  MutexLock lock(mutex_);
  return group.failure_;
}

void GroupTable::listen(uint64_t id, const std::weak_ptr<const FailureListener>& listener) {
  std::exception_ptr failure;
  {
    MutexLock lock(mutex_);
    const auto found = groups_.find(id);
    if (found == groups_.end()) return;
    failure = found->second->failure_;
    if (!failure) found->second->listeners_.push_back(listener);
  }
  const auto callback = failure ? listener.lock() : nullptr;
  if (callback) (*callback)(failure);
}

GroupPtr GroupTable::fail_early(uint64_t id, const std::exception_ptr& failure) {
  MutexLock lock(mutex_);
  if (const auto found = groups_.find(id); found != groups_.end()) return found->second;
  if (early_failures_.size() >= kMostEarlyFailures) early_failures_.erase(early_failures_.begin());
  early_failures_[id] = failure;
  return nullptr;
}

void GroupTable::make_busy(const GroupPtr& group) {
  role_.assert_held();
  if (std::find(busy_.begin(), busy_.end(), group) == busy_.end()) busy_.push_back(group);
}

}  // namespace ringdp
