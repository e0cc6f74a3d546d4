// What the driver does when something goes wrong: a peer lost, a disagreement, a deadline. The first failure of a group is
// kept; everything queued or called later fails with it, and the other members are told.
#include <algorithm>
#include <cstdint>
#include <utility>

#include "engine/engine.h"

namespace ringdp {
namespace {

constexpr int64_t kListenMs = 20;                // for an earlier cause from another rank
constexpr int64_t kNameMs = 1000;                // for the other side's name of an operation
constexpr std::size_t kMostEarlyFailures = 256;  // of groups that this rank has not made yet

bool earlier(const AbortNotice& a, const AbortNotice& b) {
  auto key = [](const AbortNotice& it) {
    return std::pair(it.sequence == 0 ? UINT64_MAX : it.sequence, it.guilty_rank < 0 ? INT32_MAX : it.guilty_rank);
  };
  return key(a) < key(b);
}

}  // namespace

Engine::GroupPtr Engine::find_group(uint64_t id) const {
  std::lock_guard lock(mutex_);
  auto found = groups_.find(id);
  return found == groups_.end() ? nullptr : found->second;
}

void Engine::listen(uint64_t id, std::weak_ptr<const FailureListener> listener) {
  std::exception_ptr failure;
  {
    std::lock_guard lock(mutex_);
    const auto found = groups_.find(id);
    if (found == groups_.end()) return;
    failure = found->second->failure;
    if (!failure) found->second->listeners.push_back(listener);
  }
  const auto told = failure ? listener.lock() : nullptr;
  if (told) (*told)(failure);
}

std::exception_ptr Engine::failure_of(uint64_t id) const {
  const GroupPtr group = find_group(id);
  std::lock_guard lock(mutex_);
  return group ? group->failure : nullptr;
}

bool Engine::guarded(int peer, const std::function<bool(Link&)>& action) {
  Link& link = *links_[peer];
  if (link.broken()) return false;
  try {
    bool moved = action(link);
    if (link.departed()) stop_polling(link);
    return moved;
  } catch (const Error& error) {
    lose_link(peer, error);
    return true;
  }
}

void Engine::stop_polling(Link& link) {
  poller_.remove(link.channel().poll_fd());
  if (link.channel().bell_fd() >= 0) poller_.remove(link.channel().bell_fd());
}

void Engine::lose_link(int peer, const Error& error) {
  Link& link = *links_[peer];
  // Closed, so that a peer which lives after all hears of it.
  stop_polling(link);
  link.close();
  std::vector<GroupPtr> concerned;
  {
    std::lock_guard lock(mutex_);
    for (auto& [id, group] : groups_) {
      const auto& members = group->view.members;
      if (std::find(members.begin(), members.end(), peer) != members.end()) concerned.push_back(group);
    }
  }
  for (const GroupPtr& group : concerned) fail_later(group->id, explain_loss(*group, peer, error));
}

// A peer that said goodbye is no failure by itself: only operations that still need it fail.
void Engine::on_departed(int peer, const std::string& reason) {
  farewells_[peer] = reason;
  for (const GroupPtr& group : busy_) {
    bool needed = group->any_running([&](const Slot& slot) { return slot.operation->needs(peer); });
    if (needed) fail_later(group->id, explain_departure(*group, peer));
  }
}

void Engine::on_mismatched(Link::Disagreement disagreement) {
  Error error = disagreement.explain(peers_[rank_], peers_[disagreement.peer], "");
  GroupPtr group = find_group(disagreement.mine.group);
  if (!group) return;
  if (!disagreement.name_unknown()) return fail_later(group->id, std::move(error));
  if (group->doom) return;  // what is known already says as much
  {
    std::lock_guard lock(mutex_);
    if (group->failure) return;
  }
  links_[disagreement.peer]->send_ping(disagreement.mine.group, disagreement.mine.sequence);
  Failure failure{group->id, error, notice_of(error), false};
  group->doom = Doom{std::move(failure), Deadline::after_ms(kNameMs), std::move(disagreement)};
  doomed_.push_back(group);
}

void Engine::on_aborted(int peer, uint64_t group_id, const AbortNotice& notice) {
  GroupPtr group = find_group(group_id);
  ErrorContext context;
  peers_[rank_].fill_self(context);
  context.cause = notice.text;
  context.sequence = static_cast<int64_t>(notice.sequence);
  int guilty = notice.guilty_rank;
  if (guilty == rank_ && notice.kind == ErrorKind::kMismatch) guilty = peer;  // seen from here it is the other one
  if (guilty >= 0 && guilty < world()) peers_[guilty].fill_peer(context);
  if (const Slot* oldest = group ? group->oldest() : nullptr; oldest != nullptr) {
    context.operation = oldest->work->text();
    context.name = oldest->operation->identity().name;
  }
  // Passed on as it is before this rank leaves: a member that hears this rank's goodbye first must not blame it.
  Error error(notice.kind, notice.text + " (as told by " + peers_[peer].text() + ")", context);
  if (group) {
    group->told_by.insert(peer);
    return failures_.push_back({group_id, std::move(error), notice, true});
  }
  std::lock_guard lock(mutex_);
  if (early_failures_.size() >= kMostEarlyFailures) early_failures_.erase(early_failures_.begin());
  early_failures_[group_id] = std::make_exception_ptr(error);
}

void Engine::settle_failures() {
  while (!failures_.empty()) {
    std::vector<Failure> found;
    found.swap(failures_);
    for (Failure& failure : found)
      if (GroupPtr group = find_group(failure.group)) condemn(group, std::move(failure));
  }
}

// The ranks of a group shall tell the same story: of all failures the one of the earliest operation, then of the lowest
// rank. Each tells the others what it has found at once, and listens for a moment before it lets its callers know.
void Engine::condemn(const GroupPtr& group, Failure failure) {
  {
    std::lock_guard lock(mutex_);
    if (group->failure) return;
  }
  if (group->doom) {
    // Who has told of a failure leaves because of it: that is no cause of its own.
    if (failure.notice.kind == ErrorKind::kPeerLost && group->told_by.contains(failure.notice.guilty_rank)) return;
    Doom& doom = *group->doom;
    bool better = doom.unnamed
                      ? failure.notice.kind == ErrorKind::kMismatch || earlier(failure.notice, doom.failure.notice)
                      : earlier(failure.notice, doom.failure.notice);
    if (!better) return;
    doom.failure = std::move(failure);
    if (std::exchange(doom.unnamed, std::nullopt)) doom.end = Deadline::after_ms(kListenMs);
    tell_members(*group, doom.failure.notice);
    return;
  }
  tell_members(*group, failure.notice);
  int listening = 0;
  for (int member : group->view.members)
    if (Link* link = links_[member].get(); link != nullptr && !link->broken() && !link->departed()) ++listening;
  bool both_know = group->view.size == 2 && (failure.told || failure.notice.kind == ErrorKind::kMismatch);
  if (listening == 0 || both_know) return fail_quietly(*group, failure.error, failure.notice);
  group->doom = Doom{std::move(failure), Deadline::after_ms(kListenMs), std::nullopt};
  doomed_.push_back(group);
}

void Engine::settle_doomed() {
  for (const GroupPtr& group : std::vector<GroupPtr>(doomed_)) {
    if (!group->doom || !group->doom->end.expired()) continue;
    Failure failure = std::move(group->doom->failure);
    if (group->doom->unnamed) tell_members(*group, failure.notice);
    fail_quietly(*group, failure.error, failure.notice);
  }
}

AbortNotice Engine::notice_of(const Error& error) {
  AbortNotice notice;
  notice.kind = error.kind();
  notice.guilty_rank = error.context().peer;
  notice.sequence = error.context().sequence >= 0 ? static_cast<uint64_t>(error.context().sequence) : 0;
  notice.text = error.what();
  return notice;
}

void Engine::fail_later(uint64_t group, Error error) {
  AbortNotice notice = notice_of(error);
  failures_.push_back({group, std::move(error), std::move(notice), false});
}

void Engine::tell_members(const Group& group, const AbortNotice& notice) {
  for (int member : group.view.members) {
    Link* link = links_[member].get();
    if (link == nullptr || link->broken() || link->departed()) continue;
    link->send_abort(group.id, notice);
    guarded(member, [](Link& it) { return it.pump_send(); });
  }
}

void Engine::fail_group(Group& group, const Error& error, const AbortNotice& notice) {
  {
    std::lock_guard lock(mutex_);
    if (group.failure) return;
  }
  tell_members(group, notice);
  fail_quietly(group, error, notice);
}

// The members know it already.
void Engine::fail_quietly(Group& group, const Error& error, const AbortNotice& notice) {
  std::exception_ptr failure = std::make_exception_ptr(error);
  std::vector<std::weak_ptr<const FailureListener>> listeners;
  {
    std::lock_guard lock(mutex_);
    if (group.failure) return;
    group.failure = failure;
    listeners.swap(group.listeners);
  }
  for (const auto& listener : listeners)
    if (const auto told = listener.lock()) (*told)(failure);
  group.doom.reset();
  std::erase_if(doomed_, [](const GroupPtr& it) { return !it->doom; });
  // Earlier operations that have all their bytes were not touched by what went wrong.
  auto survives = [&](const Slot& slot) {
    bool before = notice.sequence == 0 || slot.work->sequence() < notice.sequence;  // 0: the cause is no operation
    return before && slot.operation->complete();
  };
  std::vector<Slot> done, failed;
  for (Slot& slot : group.active) (survives(slot) ? done : failed).push_back(std::move(slot));
  for (Slot& slot : group.nested) failed.push_back(std::move(slot));
  for (Slot& slot : failed) slot.operation->abandon();
  for (Slot& slot : group.unbound) failed.push_back(std::move(slot));
  for (Slot& slot : group.queued) failed.push_back(std::move(slot));
  group.nested.clear();
  group.active.clear();
  group.unbound.clear();
  group.queued.clear();
  for (int member : group.view.members)
    if (Link* link = links_[member].get(); link != nullptr && !link->broken() && !link->departed())
      link->discard_group(group.id);
  for (Slot& slot : done) conclude(slot);
  for (Slot& slot : failed) finish(slot, failure);
}

Error Engine::explain_loss(const Group& group, int peer, const Error& cause) const {
  ErrorContext context = cause.context();
  peers_[rank_].fill_self(context);
  peers_[peer].fill_peer(context);
  if (context.cause.empty()) context.cause = cause.what();
  if (context.advice.empty()) context.advice = "look at that rank's own log for the reason";
  std::string during = "between operations";
  if (const Slot* oldest = group.oldest(); oldest != nullptr) {
    const Slot& slot = *oldest;
    context.operation = slot.work->text();
    context.sequence = static_cast<int64_t>(slot.work->sequence());
    context.name = slot.operation->identity().name;
    during = "during " + slot.work->text();
    if (std::string waiting = slot.operation->waiting_for(); !waiting.empty()) during += ", waiting for " + waiting;
  }
  return Error(ErrorKind::kPeerLost,
               "rank " + std::to_string(rank_) + " (host " + context.host + ") lost " + peers_[peer].text() + " " +
                   during + ": Connection closed by peer: " + context.cause + "; " + context.advice,
               context);
}

Error Engine::explain_departure(const Group& group, int peer) const {
  const std::string& reason = farewells_[peer];
  return explain_loss(group, peer,
                      Error(ErrorKind::kPeerLost, "it left the job" + (reason.empty() ? "" : ": " + reason)));
}

Error Engine::explain_timeout(const Slot& slot) const {
  ErrorContext context;
  peers_[rank_].fill_self(context);
  context.operation = slot.work->text();
  context.sequence = static_cast<int64_t>(slot.work->sequence());
  context.name = slot.operation->identity().name;
  std::vector<Missing> missing = find_missing(slot);
  std::vector<int> open = slot.operation->missing();
  int guilty = !missing.empty() ? missing.front().rank : !open.empty() ? open.front() : -1;
  if (guilty >= 0) peers_[guilty].fill_peer(context);
  context.cause = "waiting for " + (missing.empty() ? slot.operation->waiting_for() : tell_missing(missing));
  context.advice = "look at what that rank is doing; if it is only slow, give a longer timeout";
  return Error(ErrorKind::kTimeout,
               slot.work->text() + " on rank " + std::to_string(rank_) + " Timed out after " +
                   std::to_string(slot.timeout_ms) + " ms: " + context.cause + "; " + context.advice,
               context);
}

}  // namespace ringdp
