// What the driver does when something goes wrong: a peer lost, a disagreement, a deadline. The first failure of a group is
// kept; everything queued or called later fails with it, and the other members are told.
#include <algorithm>

#include "engine/engine.h"

namespace ringdp {

Engine::GroupPtr Engine::find_group(uint64_t id) const {
  std::lock_guard lock(mutex_);
  auto found = groups_.find(id);
  return found == groups_.end() ? nullptr : found->second;
}

bool Engine::guarded(int peer, const std::function<bool(Link&)>& action) {
  Link& link = *links_[peer];
  if (link.broken()) return false;
  try {
    bool moved = action(link);
    if (link.departed()) poller_.remove(link.channel().poll_fd());
    return moved;
  } catch (const Error& error) {
    lose_link(peer, error);
    return true;
  }
}

void Engine::lose_link(int peer, const Error& error) {
  Link& link = *links_[peer];
  link.mark_broken();
  poller_.remove(link.channel().poll_fd());
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
void Engine::on_departed(int peer) {
  for (const GroupPtr& group : busy_) {
    bool needed = group->any_running([&](const Slot& slot) { return slot.operation->needs(peer); });
    if (needed) fail_later(group->id, explain_loss(*group, peer, Error(ErrorKind::kPeerLost, "it left the job")));
  }
}

void Engine::on_aborted(int peer, uint64_t group_id, const AbortNotice& notice) {
  GroupPtr group = find_group(group_id);
  ErrorContext context;
  context.rank = rank_;
  context.host = peers_[rank_].host;
  context.cause = notice.text;
  context.sequence = static_cast<int64_t>(notice.sequence);
  int guilty = notice.guilty_rank;
  if (guilty >= 0 && guilty < world()) {
    context.peer = guilty;
    context.peer_host = peers_[guilty].host;
    context.peer_pid = peers_[guilty].pid;
  }
  if (group && !group->active.empty()) {
    context.operation = group->active.front().work->text();
    context.name = group->active.front().operation->identity().name;
  }
  // Passed on as it is before this rank leaves: a member that hears this rank's goodbye first must not blame it.
  failures_.push_back(
      {group_id, Error(notice.kind, notice.text + " (as told by " + peers_[peer].text() + ")", context), notice});
}

void Engine::settle_failures() {
  while (!failures_.empty()) {
    std::vector<Failure> found;
    found.swap(failures_);
    for (const Failure& failure : found)
      if (GroupPtr group = find_group(failure.group)) fail_group(*group, failure.error, failure.notice);
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
  failures_.push_back({group, std::move(error), std::move(notice)});
}

void Engine::fail_group(Group& group, const Error& error, const AbortNotice& notice) {
  std::exception_ptr failure = std::make_exception_ptr(error);
  {
    std::lock_guard lock(mutex_);
    if (group.failure) return;
    group.failure = failure;
  }
  std::vector<Slot> slots;
  for (Slot& slot : group.nested) slots.push_back(std::move(slot));
  for (Slot& slot : group.active) slots.push_back(std::move(slot));
  std::size_t started = slots.size();
  for (Slot& slot : group.unbound) slots.push_back(std::move(slot));
  for (Slot& slot : group.queued) slots.push_back(std::move(slot));
  group.nested.clear();
  group.active.clear();
  group.unbound.clear();
  group.queued.clear();
  for (std::size_t i = 0; i < started; ++i) slots[i].operation->abandon();
  for (int member : group.view.members) {
    Link* link = links_[member].get();
    if (link == nullptr || link->broken() || link->departed()) continue;
    link->discard_group(group.id);
    link->send_abort(group.id, notice);
    guarded(member, [](Link& it) { return it.pump_send(); });
  }
  for (Slot& slot : slots) finish(slot, failure);
}

Error Engine::explain_loss(const Group& group, int peer, const Error& cause) const {
  ErrorContext context = cause.context();
  context.rank = rank_;
  context.host = peers_[rank_].host;
  context.peer = peer;
  context.peer_host = peers_[peer].host;
  context.peer_pid = peers_[peer].pid;
  if (context.cause.empty()) context.cause = cause.what();
  if (context.advice.empty()) context.advice = "look at that rank's own log for the reason";
  std::string during = "between operations";
  if (!group.active.empty()) {
    const Slot& slot = group.active.front();
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

Error Engine::explain_timeout(const Slot& slot) const {
  ErrorContext context;
  context.rank = rank_;
  context.host = peers_[rank_].host;
  context.operation = slot.work->text();
  context.sequence = static_cast<int64_t>(slot.work->sequence());
  context.name = slot.operation->identity().name;
  int missing = slot.operation->first_missing();
  if (missing >= 0) {
    context.peer = missing;
    context.peer_host = peers_[missing].host;
    context.peer_pid = peers_[missing].pid;
  }
  context.cause = "waiting for " + slot.operation->waiting_for();
  context.advice = "look at what that rank is doing; if it is only slow, give a longer timeout";
  return Error(ErrorKind::kTimeout,
               slot.work->text() + " on rank " + std::to_string(rank_) + " Timed out after " +
                   std::to_string(slot.timeout_ms) + " ms: " + context.cause + "; " + context.advice,
               context);
}

}  // namespace ringdp
