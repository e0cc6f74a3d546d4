// FailureAgreement: how a group fails, with the same error on all its ranks: a lost peer, a disagreement, a deadline.
// A group keeps its first failure; all its queued and later operations fail with it. A failure goes through three
// steps: `queue` notes it while a link is being pumped; `report` sends it to the members and makes it pending, for a
// moment in which another rank may report an earlier cause; `end_pending` makes it final and ends the group's
// operations. Owned by the Engine. Used by the thread that drives: called by the links' events, by Progress and by the
// Engine.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <list>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "engine/driver_role.h"
#include "engine/group_table.h"
#include "engine/peer_links.h"
#include "link/frame.h"
#include "link/link.h"

namespace ringdp {

class FailureAgreement {
 public:
  // Ends all operations of a group that has failed, except those before number `cause` that have all their bytes; 0: no
  // operation is the cause.
  using EndOperations = std::function<void(GroupState&, const std::exception_ptr& failure, uint64_t cause)>;

  // Called for each cause found here or received, before the agreement, since this process may be ended at any moment.
  using Noticed = std::function<void(const GroupState&, const Error&, uint64_t cause)>;

  // `listen_ms`: how long to wait for an earlier cause from another rank.
  FailureAgreement(const DriverRole& role, GroupTable& groups, PeerLinks& links, int64_t listen_ms,
                   EndOperations end_operations, Noticed noticed);

  // A system error (memory, descriptors) is this rank's own: the others get its rank; those of a group that outlives
  // losses get this rank's loss, and a goodbye.
  void queue(uint64_t group, Error error);
  void report();
  void end_pending();
  Deadline next_deadline() const;  // of the pending ones

  // At once, with an abort to the members: this rank ends the group, so no rank has an earlier cause.
  void fail(GroupState& group, const Error& error);
  void fail_all(const std::vector<GroupPtr>& groups, const Error& error);
  // This rank leaves while these groups have operations in flight: here they end with `error`, and the members get
  // this rank's loss. `reason`: of its goodbye.
  void leave(const std::vector<GroupPtr>& groups, const Error& error, const std::string& reason);
  // By this rank's own system error.
  void end_by(const std::vector<GroupPtr>& groups, const Error& error);
  void forget_queued();

  // The link to the peer has thrown. It is closed, unless it is damaged.
  void on_lost(int peer, const Error& error);
  void on_unreachable(int peer, const Error& error,
                      bool gone);  // no connection can be made; `gone`: the peer has ended
  void on_departed(int peer, const std::string& reason);
  void on_mismatched(Disagreement disagreement);
  void on_aborted(int peer, uint64_t group, const AbortNotice& notice);
  // A peer's name for an operation. True if a pending failure waited for it.
  bool on_named(int peer, uint64_t group, uint64_t sequence, const std::string& name);

  // The peer left in good order, or was lost before this operation began.
  Error explain_departure(const GroupState& group, int peer) const;
  Error explain_loss(const GroupState& group, int peer, const Error& cause) const;

 private:
  struct Failure {
    uint64_t group;
    Error error;
    AbortNotice notice;     // for the other members
    bool received = false;  // received from one of them
    bool own = false;       // of a system error
  };
  struct Pending {
    GroupPtr group;
    Failure failure;
    Deadline end;
    std::optional<Disagreement> unnamed;  // waits for the peer's name of the operation
  };

  Pending* pending_of(const GroupState& group) RINGDP_REQUIRES(role_);
  void make_pending(const GroupPtr& group, Failure failure, int64_t ms, std::optional<Disagreement> unnamed)
      RINGDP_REQUIRES(role_);
  void defer(const GroupPtr& group, Failure failure) RINGDP_REQUIRES(role_);
  // with `error` here, with `notice` elsewhere
  void fail(GroupState& group, const Error& error, const AbortNotice& notice);
  Failure own_failure(const GroupState& group, const Error& error) const;
  Error lost_here(const GroupState& group, const std::string& reason) const;  // for the others: this rank's loss
  void end_own(GroupState& group, const Failure& failure);
  void fail_quietly(GroupState& group, const Error& error, const AbortNotice& notice) RINGDP_REQUIRES(role_);
  void notify_members(const GroupState& group, const AbortNotice& notice);
  bool notifies(const GroupState& group, int member) const;
  Error explain_damage(const GroupState& group, int peer, const Error& cause) const;

  const DriverRole& role_;
  GroupTable& groups_;
  PeerLinks& links_;
  const PeerTable& peers_;
  const int64_t listen_ms_;
  const EndOperations end_operations_;
  const Noticed noticed_;
  std::vector<Failure> queued_ RINGDP_GUARDED_BY(role_);
  // a list: one may be added while another is being sent
  std::list<Pending> pending_ RINGDP_GUARDED_BY(role_);
  std::vector<std::string> farewells_ RINGDP_GUARDED_BY(role_);        // of peers that left
  std::vector<std::optional<Error>> losses_ RINGDP_GUARDED_BY(role_);  // why the link to a peer broke
};

}  // namespace ringdp
