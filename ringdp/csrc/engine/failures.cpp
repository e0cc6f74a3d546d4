// Failures, as the driver handles them: a lost peer, a disagreement, a deadline. A group keeps its first failure; all its
// queued and later operations fail with it, and the other members are told. A failure goes through three steps: `queue_failure`
// notes it while a link is being pumped, `defer_failure` makes it the group's PendingFailure and tells the members, and, when
// no earlier cause has come for a moment, `end_pending_failures` ends the group's operations.
#include <algorithm>
#include <cstdint>
#include <tuple>
#include <utility>

#include "engine/engine.h"

namespace ringdp {
namespace {

constexpr int64_t kListenMs = 20;            // for an earlier cause from another rank
constexpr int64_t kListenForReasonMs = 100;  // why a connection ended
constexpr int64_t kNameMs = 1000;            // for the other side's name of an operation

bool earlier(const AbortNotice& a, const AbortNotice& b) {
  auto key = [](const AbortNotice& it) {
    return std::tuple(it.unexplained, it.sequence == 0 ? UINT64_MAX : it.sequence,
                      it.guilty_rank < 0 ? INT32_MAX : it.guilty_rank);
  };
  return key(a) < key(b);
}

}  // namespace

void Engine::lose_link(int peer, const Error& error) {
  Link& link = *links_[peer];
  losses_[peer] = error;
  const std::vector<GroupPtr> concerned = groups_.with(peer);
  if (link.damaged()) {
    // The other direction may be sound, and the peer then knows nothing of the damage: it is told for each group, also for
    // those that it makes later.
    for (const GroupPtr& group : concerned) {
      Error explained = explain_damage(*group, peer, error);
      link.send_abort(group->id, notice_of(explained));
      queue_failure(group->id, std::move(explained));
    }
    link.send_bye("it gave this connection up: " + error.context().cause);
    links_.send_to(peer);
    return;
  }
  links_.drop(peer);
  for (const GroupPtr& group : concerned) queue_failure(group->id, explain_loss(*group, peer, error));
}

// A goodbye is not a failure by itself: only operations that still need the peer fail.
void Engine::on_departed(int peer, const std::string& reason) {
  farewells_[peer] = reason;
  for (const GroupPtr& group : groups_.busy()) {
    bool needed = group->any_running([&](const InFlight& in_flight) { return in_flight.operation->needs(peer); });
    if (needed) queue_failure(group->id, explain_departure(*group, peer));
  }
}

void Engine::on_mismatched(Link::Disagreement disagreement) {
  Error error = disagreement.explain(links_.self(), links_.info(disagreement.peer), "");
  GroupPtr group = groups_.find(disagreement.mine.group);
  if (!group) return;
  if (!disagreement.name_unknown()) return queue_failure(group->id, std::move(error));
  if (group->pending_failure) return;  // what is known already says as much
  if (groups_.failure_of(*group)) return;
  links_[disagreement.peer]->send_ping(disagreement.mine.group, disagreement.mine.sequence);
  Failure failure{group->id, error, notice_of(error), false};
  group->pending_failure = PendingFailure{std::move(failure), Deadline::after_ms(kNameMs), std::move(disagreement)};
  failing_groups_.push_back(group);
}

void Engine::on_aborted(int peer, uint64_t group_id, const AbortNotice& notice) {
  GroupPtr group = groups_.find(group_id);
  ErrorContext context;
  links_.self().fill_self(context);
  context.cause = notice.text;
  context.sequence = static_cast<int64_t>(notice.sequence);
  int guilty = notice.guilty_rank;
  const bool of_two = notice.kind == ErrorKind::kMismatch || notice.kind == ErrorKind::kDamaged;
  if (guilty == rank() && of_two) guilty = notice.found_by;  // seen from here it is the other one
  if (guilty >= 0 && guilty < world()) links_.info(guilty).fill_peer(context);
  if (const InFlight* oldest = group ? group->oldest() : nullptr; oldest != nullptr) {
    context.operation = oldest->work->text();
    context.name = oldest->operation->identity().name;
  }
  // The notice is passed on unchanged before this rank leaves: a member that gets this rank's goodbye first must not blame
  // this rank.
  Error error(notice.kind, notice.text + " (reported by " + links_.info(peer).text() + ")", context);
  if (!group) group = groups_.fail_early(group_id, std::make_exception_ptr(error));
  if (!group) return;
  group->reported_by.insert(peer);
  failures_.push_back({group_id, std::move(error), notice, true});
}

void Engine::report_failures() {
  while (!failures_.empty()) {
    std::vector<Failure> found;
    found.swap(failures_);
    for (Failure& failure : found)
      if (GroupPtr group = groups_.find(failure.group)) defer_failure(group, std::move(failure));
  }
}

// All ranks of a group shall report the same failure: that of the earliest operation, then of the lowest rank. So a rank tells
// the others at once what it has found, and waits a moment for an earlier cause before it fails its operations.
void Engine::defer_failure(const GroupPtr& group, Failure failure) {
  if (groups_.failure_of(*group)) return;
  if (group->pending_failure) {
    // A rank that has reported a failure leaves because of it: its loss is not a cause of its own.
    if (failure.notice.kind == ErrorKind::kPeerLost && group->reported_by.contains(failure.notice.guilty_rank)) return;
    PendingFailure& pending_failure = *group->pending_failure;
    bool better = pending_failure.unnamed ? failure.notice.kind == ErrorKind::kMismatch ||
                                                earlier(failure.notice, pending_failure.failure.notice)
                                          : earlier(failure.notice, pending_failure.failure.notice);
    if (!better) return;
    pending_failure.failure = std::move(failure);
    if (std::exchange(pending_failure.unnamed, std::nullopt)) pending_failure.end = Deadline::after_ms(kListenMs);
    notify_members(*group, pending_failure.failure.notice);
    return;
  }
  notify_members(*group, failure.notice);
  int listening = 0;
  for (int member : group->view.members)
    if (Link* link = links_[member]; link != nullptr && link->usable() && link->connected()) ++listening;
  bool both_know = group->view.size == 2 && (failure.told || failure.notice.kind == ErrorKind::kMismatch);
  if (listening == 0 || both_know) return fail_quietly(*group, failure.error, failure.notice);
  const int64_t listen_ms = failure.notice.unexplained ? kListenForReasonMs : kListenMs;
  group->pending_failure = PendingFailure{std::move(failure), Deadline::after_ms(listen_ms), std::nullopt};
  failing_groups_.push_back(group);
}

void Engine::end_pending_failures() {
  for (const GroupPtr& group : std::vector<GroupPtr>(failing_groups_)) {
    if (!group->pending_failure || !group->pending_failure->end.expired()) continue;
    Failure failure = std::move(group->pending_failure->failure);
    if (group->pending_failure->unnamed) notify_members(*group, failure.notice);
    fail_quietly(*group, failure.error, failure.notice);
  }
}

AbortNotice Engine::notice_of(const Error& error) {
  AbortNotice notice;
  notice.kind = error.kind();
  notice.guilty_rank = error.context().peer;
  notice.found_by = error.context().rank;
  notice.unexplained = error.context().unexplained;
  notice.sequence = error.context().sequence >= 0 ? static_cast<uint64_t>(error.context().sequence) : 0;
  notice.text = error.what();
  return notice;
}

void Engine::queue_failure(uint64_t group, Error error) {
  AbortNotice notice = notice_of(error);
  failures_.push_back({group, std::move(error), std::move(notice), false});
}

bool Engine::notifies(const GroupState& group, int member) const {
  const Link* link = links_[member];
  if (link == nullptr || !link->usable()) return false;
  if (link->connected()) return true;
  return std::find(group.neighbours.begin(), group.neighbours.end(), member) != group.neighbours.end();
}

// Each member that receives the notice passes it on.
void Engine::notify_members(const GroupState& group, const AbortNotice& notice) {
  for (int member : group.view.members) {
    if (!notifies(group, member)) continue;
    links_[member]->send_abort(group.id, notice);
    links_.send_to(member);
  }
}

void Engine::fail_group(GroupState& group, const Error& error, const AbortNotice& notice) {
  if (groups_.failure_of(group)) return;
  notify_members(group, notice);
  fail_quietly(group, error, notice);
}

// The members know it already.
void Engine::fail_quietly(GroupState& group, const Error& error, const AbortNotice& notice) {
  std::exception_ptr failure = std::make_exception_ptr(error);
  if (!groups_.fail(group, failure)) return;
  group.pending_failure.reset();
  std::erase_if(failing_groups_, [](const GroupPtr& it) { return !it->pending_failure; });
  // The failure did not touch earlier operations that have all their bytes.
  auto survives = [&](const InFlight& in_flight) {
    bool before = notice.sequence == 0 || in_flight.sequence() < notice.sequence;  // 0: no operation is the cause
    return before && in_flight.operation->complete();
  };
  std::vector<InFlight> done, failed;
  for (InFlight& in_flight : group.active) (survives(in_flight) ? done : failed).push_back(std::move(in_flight));
  for (InFlight& in_flight : group.nested) failed.push_back(std::move(in_flight));
  for (InFlight& in_flight : failed) in_flight.operation->abandon();
  for (InFlight& in_flight : group.unbound) failed.push_back(std::move(in_flight));
  for (InFlight& in_flight : group.queued) failed.push_back(std::move(in_flight));
  group.nested.clear();
  group.active.clear();
  group.unbound.clear();
  group.queued.clear();
  links_.discard_group(group.id, group.view.members);
  for (InFlight& in_flight : done) conclude(in_flight);
  for (InFlight& in_flight : failed) finish(in_flight, failure);
}

Error Engine::explain_loss(const GroupState& group, int peer, const Error& cause) const {
  ErrorContext context = cause.context();
  links_.self().fill_self(context);
  links_.info(peer).fill_peer(context);
  if (context.cause.empty()) context.cause = cause.what();
  if (context.advice.empty()) context.advice = "look at that rank's own log for the reason";
  std::string during = "between operations";
  if (const InFlight* oldest = group.oldest(); oldest != nullptr) {
    const InFlight& in_flight = *oldest;
    context.operation = in_flight.work->text();
    context.sequence = static_cast<int64_t>(in_flight.sequence());
    context.name = in_flight.operation->identity().name;
    during = "during " + in_flight.work->text();
    if (std::string waiting = in_flight.operation->waiting_for(); !waiting.empty())
      during += ", waiting for " + waiting;
  }
  return Error(ErrorKind::kPeerLost,
               "rank " + std::to_string(rank()) + " (host " + context.host + ") lost " + links_.info(peer).text() +
                   " " + during + ": Connection closed by peer: " + context.cause + "; " + context.advice,
               context);
}

Error Engine::explain_damage(const GroupState& group, int peer, const Error& cause) const {
  ErrorContext context = cause.context();
  std::string during = "between operations";
  if (const InFlight* oldest = group.oldest(); oldest != nullptr) {
    context.operation = oldest->work->text();
    context.sequence = static_cast<int64_t>(oldest->work->sequence());
    context.name = oldest->operation->identity().name;
    during = "during " + oldest->work->text();
  }
  return Error(ErrorKind::kDamaged,
               "rank " + std::to_string(rank()) + " (host " + context.host + ") received damaged bytes from " +
                   links_.info(peer).text() + " " + during + ": " + context.cause + "; " + context.advice,
               context);
}

// The peer left in good order, or was lost before this operation began.
Error Engine::explain_departure(const GroupState& group, int peer) const {
  if (const auto& loss = losses_[peer]) {
    if (loss->kind() == ErrorKind::kDamaged) return explain_damage(group, peer, *loss);
    const bool told = loss->kind() == ErrorKind::kHandshake && links_[peer]->broken();  // there never was a connection
    return told ? *loss : explain_loss(group, peer, *loss);
  }
  const std::string& reason = farewells_[peer];
  return explain_loss(group, peer,
                      Error(ErrorKind::kPeerLost, "it left the job" + (reason.empty() ? "" : ": " + reason)));
}

Error Engine::explain_timeout(const InFlight& in_flight) const {
  ErrorContext context;
  links_.self().fill_self(context);
  context.operation = in_flight.work->text();
  context.sequence = static_cast<int64_t>(in_flight.sequence());
  context.name = in_flight.operation->identity().name;
  std::vector<MissingRank> missing = find_missing(in_flight);
  std::vector<int> open = in_flight.operation->missing();
  int guilty = !missing.empty() ? missing.front().rank : !open.empty() ? open.front() : -1;
  if (guilty >= 0) links_.info(guilty).fill_peer(context);
  context.cause = "waiting for " + (missing.empty() ? in_flight.operation->waiting_for() : format_missing(missing));
  context.advice = "check what that rank is doing; if it is only slow, give a longer timeout";
  return Error(ErrorKind::kTimeout,
               in_flight.work->text() + " on rank " + std::to_string(rank()) + " Timed out after " +
                   std::to_string(in_flight.timeout_ms) + " ms: " + context.cause + "; " + context.advice,
               context);
}

}  // namespace ringdp
