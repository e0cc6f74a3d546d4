#include "engine/failure_agreement.h"

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <utility>

namespace ringdp {
namespace {

constexpr int64_t kListenForReasonMs = 100;  // for the reason of an ended connection
constexpr int64_t kNameMs = 1000;            // for the other side's name of an operation
constexpr const char* kLookAtItsLog = "look at that rank's own log for the reason";

bool earlier(const AbortNotice& a, const AbortNotice& b) {
  auto key = [](const AbortNotice& it) {
    return std::tuple(it.unexplained, it.sequence == 0 ? UINT64_MAX : it.sequence,
                      it.guilty_rank < 0 ? INT32_MAX : it.guilty_rank);
  };
  return key(a) < key(b);
}

AbortNotice notice_of(const Error& error) {
  AbortNotice notice;
  notice.kind = error.kind();
  notice.guilty_rank = error.context().peer;
  notice.found_by = error.context().rank;
  notice.unexplained = error.context().unexplained;
  notice.sequence = error.context().sequence >= 0 ? static_cast<uint64_t>(error.context().sequence) : 0;
  notice.text = error.what();
  return notice;
}

std::string departure_text(const std::string& reason) {
  return "it left the job" + (reason.empty() ? "" : ": " + reason);
}

// The group's oldest operation as text, with its fields in the context.
std::string note_oldest(const GroupState& group, ErrorContext& context) {
  const InFlight* oldest = group.oldest();
  if (oldest == nullptr) return "between operations";
  context.operation = oldest->work->text();
  context.sequence = static_cast<int64_t>(oldest->sequence());
  context.name = oldest->operation->identity().name;
  return "during " + context.operation;
}

}  // namespace

FailureAgreement::FailureAgreement(const DriverRole& role, GroupTable& groups, PeerLinks& links, int64_t listen_ms,
                                   EndOperations end_operations, Noticed noticed)
    : role_(role),
      groups_(groups),
      links_(links),
      peers_(links.peers()),
      listen_ms_(listen_ms),
      end_operations_(std::move(end_operations)),
      noticed_(std::move(noticed)),
      farewells_(links.peers().world()),
      losses_(links.peers().world()) {}

void FailureAgreement::queue(uint64_t group, Error error) {
  role_.assert_held();
  if (error.kind() == ErrorKind::kSystem) {
    if (const GroupPtr found = groups_.find(group)) queued_.push_back(own_failure(*found, error));
    return;
  }
  AbortNotice notice = notice_of(error);
  queued_.push_back({group, std::move(error), std::move(notice), false});
}

void FailureAgreement::forget_queued() {
  role_.assert_held();
  queued_.clear();
}

void FailureAgreement::on_lost(int peer, const Error& error) {
  role_.assert_held();
  Link& link = *links_[peer];
  losses_[peer] = error;
  const std::vector<GroupPtr> concerned = groups_.with(peer);
  if (link.damaged()) {
    // The other direction may be intact, and the peer does not see the damage: it gets an abort for each group, also
    // for later ones.
    for (const GroupPtr& group : concerned) {
      Error explained = explain_damage(*group, peer, error);
      link.send_abort(group->id, notice_of(explained));
      queue(group->id, std::move(explained));
    }
    link.send_bye("it closed this connection: " + error.context().cause);
    links_.send_to(peer);
    return;
  }
  links_.drop(peer);
  for (const GroupPtr& group : concerned)
    queue(group->id, error.kind() == ErrorKind::kSystem ? error : explain_loss(*group, peer, error));
}

void FailureAgreement::on_unreachable(int peer, const Error& error, bool gone) {
  role_.assert_held();
  losses_[peer] = error;
  if (gone) {
    links_[peer]->depart();
    return on_departed(peer, error.context().cause);
  }
  links_.drop(peer);
  for (const GroupPtr& group : groups_.with(peer)) queue(group->id, error);
}

// A goodbye is not a failure by itself: only operations that still need the peer fail.
void FailureAgreement::on_departed(int peer, const std::string& reason) {
  role_.assert_held();
  farewells_[peer] = reason;
  for (const GroupPtr& group : groups_.busy()) {
    bool needed = group->any_running([&](const InFlight& in_flight) { return in_flight.operation->needs(peer); });
    if (needed) queue(group->id, explain_departure(*group, peer));
  }
}

void FailureAgreement::on_mismatched(Disagreement disagreement) {
  role_.assert_held();
  Error error = disagreement.explain(peers_.self(), peers_.info(disagreement.peer), "");
  GroupPtr group = groups_.find(disagreement.mine.group);
  if (!group) return;
  if (!disagreement.name_unknown()) return queue(group->id, std::move(error));
  if (group->failing) return;  // the pending failure includes it
  if (groups_.failure_of(*group)) return;
  links_[disagreement.peer]->send_ping(disagreement.mine.group, disagreement.mine.sequence);
  Failure failure{group->id, error, notice_of(error), false};
  make_pending(group, std::move(failure), kNameMs, std::move(disagreement));
}

bool FailureAgreement::on_named(int peer, uint64_t group_id, uint64_t sequence, const std::string& name) {
  role_.assert_held();
  const GroupPtr group = groups_.find(group_id);
  const Pending* pending = group ? pending_of(*group) : nullptr;
  if (pending == nullptr || !pending->unnamed) return false;
  const Disagreement& it = *pending->unnamed;
  if (it.peer != peer || it.mine.sequence != sequence) return false;
  queue(group_id, it.explain(peers_.self(), peers_.info(peer), name));
  return true;
}

void FailureAgreement::on_aborted(int peer, uint64_t group_id, const AbortNotice& notice) {
  role_.assert_held();
  GroupPtr group = groups_.find(group_id);
  ErrorContext context;
  peers_.self().fill_self(context);
  context.cause = notice.text;
  context.sequence = static_cast<int64_t>(notice.sequence);
  int guilty = notice.guilty_rank;
  const bool of_two = notice.kind == ErrorKind::kMismatch || notice.kind == ErrorKind::kDamaged;
  if (guilty == peers_.rank() && of_two) guilty = notice.found_by;  // from this rank's side it is the other one
  if (guilty >= 0 && guilty < peers_.world()) peers_.info(guilty).fill_peer(context);
  if (const InFlight* oldest = group ? group->oldest() : nullptr; oldest != nullptr) {
    context.operation = oldest->work->text();
    context.name = oldest->operation->identity().name;
  }
  // The notice is forwarded unchanged before this rank leaves: a member that gets this rank's goodbye first must not
  // blame this rank. The sender may have forwarded it too.
  const int reporter = notice.found_by >= 0 && notice.found_by < peers_.world() ? notice.found_by : peer;
  Error error(notice.kind, notice.text + " (reported by " + peers_.info(reporter).text() + ")", context);
  if (!group) group = groups_.fail_early(group_id, std::make_exception_ptr(error));
  if (!group) return;
  group->reported_by.insert(peer);
  queued_.push_back({group_id, std::move(error), notice, true});
}

void FailureAgreement::report() {
  role_.assert_held();
  while (!queued_.empty()) {
    std::vector<Failure> found;
    found.swap(queued_);
    for (Failure& failure : found)
      if (GroupPtr group = groups_.find(failure.group)) defer(group, std::move(failure));
  }
}

// All ranks of a group shall report the same failure: that of the earliest operation, then of the lowest rank. So a
// rank sends its failure to the others at once, and waits a moment for an earlier one before it fails its operations.
void FailureAgreement::defer(const GroupPtr& group, Failure failure) {
  if (groups_.failure_of(*group)) return;
  if (failure.own && group->outlives_losses) return end_own(*group, failure);
  if (Pending* pending = pending_of(*group)) {
    // A rank that has reported a failure leaves because of it: its loss is not a cause of its own.
    if (failure.notice.kind == ErrorKind::kPeerLost && group->reported_by.contains(failure.notice.guilty_rank)) return;
    const bool named = pending->unnamed && failure.notice.kind == ErrorKind::kMismatch;
    if (!named && !earlier(failure.notice, pending->failure.notice)) return;
    noticed_(*group, failure.error, failure.notice.sequence);
    pending->failure = std::move(failure);
    if (std::exchange(pending->unnamed, std::nullopt)) pending->end = Deadline::after_ms(listen_ms_);
    return notify_members(*group, pending->failure.notice);
  }
  noticed_(*group, failure.error, failure.notice.sequence);
  notify_members(*group, failure.notice);
  int listening = 0;
  for (int member : group->view.members)
    if (Link* link = links_[member]; link != nullptr && link->usable() && link->connected()) ++listening;
  bool both_know = group->view.size == 2 && (failure.received || failure.notice.kind == ErrorKind::kMismatch);
  if (listening == 0 || both_know) return fail_quietly(*group, failure.error, failure.notice);
  const int64_t listen_ms = failure.notice.unexplained ? std::max(kListenForReasonMs, listen_ms_) : listen_ms_;
  make_pending(group, std::move(failure), listen_ms, std::nullopt);
}

FailureAgreement::Pending* FailureAgreement::pending_of(const GroupState& group) {
  for (Pending& pending : pending_)
    if (pending.group.get() == &group) return &pending;
  return nullptr;
}

void FailureAgreement::make_pending(const GroupPtr& group, Failure failure, int64_t ms,
                                    std::optional<Disagreement> unnamed) {
  Pending pending{group, std::move(failure), Deadline::after_ms(ms), std::move(unnamed)};
  if (Pending* other = pending_of(*group))  // came while the members were informed
    *other = std::move(pending);
  else
    pending_.push_back(std::move(pending));
  group->failing = true;
}

void FailureAgreement::end_pending() {
  role_.assert_held();
  std::vector<GroupPtr> over;
  for (const Pending& pending : pending_)
    if (pending.end.expired()) over.push_back(pending.group);
  for (const GroupPtr& group : over) {
    const Pending* pending = pending_of(*group);
    if (pending == nullptr) continue;
    const Failure failure = pending->failure;
    if (pending->unnamed) notify_members(*group, failure.notice);
    fail_quietly(*group, failure.error, failure.notice);
  }
}

Deadline FailureAgreement::next_deadline() const {
  role_.assert_held();
  Deadline first = Deadline::never();
  for (const Pending& pending : pending_) first = std::min(first, pending.end);
  return first;
}

// Whether this rank sends a failure of the group to that member: over usable connections, and to the neighbours in a
// group whose members are not all connected.
bool FailureAgreement::notifies(const GroupState& group, int member) const {
  const Link* link = links_[member];
  if (link == nullptr || !link->usable()) return false;
  if (link->connected() || link->healing()) return true;
  return std::find(group.neighbours.begin(), group.neighbours.end(), member) != group.neighbours.end();
}

// Each member that receives the notice passes it on.
void FailureAgreement::notify_members(const GroupState& group, const AbortNotice& notice) {
  for (int member : group.view.members) {
    if (!notifies(group, member)) continue;
    links_[member]->send_abort(group.id, notice);
    links_.send_to(member);
  }
}

void FailureAgreement::fail(GroupState& group, const Error& error) { fail(group, error, notice_of(error)); }

void FailureAgreement::fail(GroupState& group, const Error& error, const AbortNotice& notice) {
  role_.assert_held();
  if (groups_.failure_of(group)) return;
  notify_members(group, notice);
  fail_quietly(group, error, notice);
}

void FailureAgreement::fail_all(const std::vector<GroupPtr>& groups, const Error& error) {
  for (const GroupPtr& group : groups) fail(*group, error);
}

void FailureAgreement::leave(const std::vector<GroupPtr>& groups, const Error& error, const std::string& reason) {
  for (const GroupPtr& group : groups) fail(*group, error, notice_of(lost_here(*group, reason)));
}

void FailureAgreement::end_by(const std::vector<GroupPtr>& groups, const Error& error) {
  for (const GroupPtr& group : groups) end_own(*group, own_failure(*group, error));
}

Error FailureAgreement::lost_here(const GroupState& group, const std::string& reason) const {
  const PeerInfo& self = peers_.self();
  ErrorContext context;
  self.fill_self(context);
  self.fill_peer(context);
  const std::string during = note_oldest(group, context);
  const std::string text = "lost " + self.text() + " " + during + ": " + departure_text(reason);
  return Error(ErrorKind::kPeerLost, text + "; " + kLookAtItsLog, context);
}

FailureAgreement::Failure FailureAgreement::own_failure(const GroupState& group, const Error& error) const {
  const PeerInfo& self = peers_.self();
  ErrorContext context = error.context();
  const std::string text = context.rank >= 0 ? error.what() : self.text() + ": " + error.what();
  if (context.cause.empty()) context.cause = error.what();
  note_oldest(group, context);
  self.fill_self(context);
  context.peer = -1;
  context.peer_host.clear();
  context.peer_pid = -1;
  const Error mine(ErrorKind::kSystem, text, context);
  if (group.outlives_losses) return {group.id, mine, notice_of(lost_here(group, error.what())), false, true};
  self.fill_peer(context);
  return {group.id, mine, notice_of(Error(ErrorKind::kSystem, text, context)), false, true};
}

// At once: no rank has an earlier failure. The program may run on for long, so the survivors do not wait for the end
// of this process.
void FailureAgreement::end_own(GroupState& group, const Failure& failure) {
  fail(group, failure.error, failure.notice);
  if (!group.outlives_losses) return;
  for (const int member : group.view.members) {
    Link* link = links_[member];
    if (link == nullptr) continue;  // this rank
    link->send_bye(failure.error.what());
    links_.send_to(member);
  }
}

// The members have it already.
void FailureAgreement::fail_quietly(GroupState& group, const Error& error, const AbortNotice& notice) {
  std::exception_ptr failure = std::make_exception_ptr(error);
  if (!groups_.fail(group, failure)) return;
  group.failing = false;
  std::erase_if(pending_, [&](const Pending& pending) { return pending.group.get() == &group; });
  end_operations_(group, failure, notice.sequence);
}

Error FailureAgreement::explain_loss(const GroupState& group, int peer, const Error& cause) const {
  ErrorContext context = cause.context();
  peers_.self().fill_self(context);
  peers_.info(peer).fill_peer(context);
  if (context.cause.empty()) context.cause = cause.what();
  if (context.advice.empty()) context.advice = kLookAtItsLog;
  std::string during = note_oldest(group, context);
  if (const InFlight* oldest = group.oldest(); oldest != nullptr)
    if (std::string waiting = oldest->operation->waiting_for(); !waiting.empty()) during += ", waiting for " + waiting;
  return Error(ErrorKind::kPeerLost,
               "rank " + std::to_string(peers_.rank()) + " (host " + context.host + ") lost " +
                   peers_.info(peer).text() + " " + during + ": Connection closed by peer: " + context.cause + "; " +
                   context.advice,
               context);
}

Error FailureAgreement::explain_damage(const GroupState& group, int peer, const Error& cause) const {
  ErrorContext context = cause.context();
  const std::string during = note_oldest(group, context);
  return Error(ErrorKind::kDamaged,
               "rank " + std::to_string(peers_.rank()) + " (host " + context.host + ") received damaged bytes from " +
                   peers_.info(peer).text() + " " + during + ": " + context.cause + "; " + context.advice,
               context);
}

Error FailureAgreement::explain_departure(const GroupState& group, int peer) const {
  role_.assert_held();
  if (const auto& loss = losses_[peer]) {
    if (loss->kind() == ErrorKind::kDamaged) return explain_damage(group, peer, *loss);
    const bool own = loss->kind() == ErrorKind::kSystem;  // this rank cannot make connections any more
    // there was no connection
    const bool explained = own || (loss->kind() == ErrorKind::kHandshake && links_[peer]->broken());
    return explained ? *loss : explain_loss(group, peer, *loss);
  }
  return explain_loss(group, peer, Error(ErrorKind::kPeerLost, departure_text(farewells_[peer])));
}

}  // namespace ringdp
