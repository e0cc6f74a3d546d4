#include "engine/message_matching.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace ringdp {

MessageMatching::MessageMatching(PeerLinks& links, FailureAgreement& failures,
                                 std::function<void(int peer)> want_connection, Start start)
    : links_(links), failures_(failures), want_connection_(std::move(want_connection)), start_(std::move(start)) {}

void MessageMatching::take(GroupState& group, InFlight in_flight) {
  const PointToPoint& ends = *in_flight.operation->point_to_point();
  if (ends.sends) return number(group, std::move(in_flight));
  if (ends.from == PointToPoint::kAny && want_connection_)  // a lower rank may not be able to connect to this one
    for (int member : group.view.members)
      if (Link* link = links_[member]; link != nullptr && !link->connected()) want_connection_(member);
  group.unbound.push_back(std::move(in_flight));
  bind_receives(group);
}

void MessageMatching::number(GroupState& group, InFlight in_flight) {
  const PointToPoint& ends = *in_flight.operation->point_to_point();
  FlowIdentity& identity = in_flight.operation->mutable_identity();
  identity.sequence = group.messages.next(ends);
  in_flight.work->sequence_.store(identity.sequence, std::memory_order_release);
  in_flight.work->source_.store(ends.from, std::memory_order_release);
  group.nested.push_back(std::move(in_flight));
  start_(group, group.nested.back());
}

// A receive from a given rank takes that rank's next number at once; a receive from any rank takes it when the next
// message of some rank has begun to arrive. A receive posted after one from any rank with the same tag waits until
// that one is bound: the first receive posted gets the first message.
bool MessageMatching::bind_receives(GroupState& group) {
  bool changed = false;
  std::vector<int32_t> open;  // tags of receives from any rank that stay unbound
  for (std::size_t i = 0; i < group.unbound.size();) {
    Operation& operation = *group.unbound[i].operation;
    PointToPoint ends = *operation.point_to_point();
    bool behind = std::find(open.begin(), open.end(), ends.tag) != open.end();
    if (!behind && ends.from == PointToPoint::kAny) {
      ends.from = find_sender(group, ends);
      if (ends.from == PointToPoint::kAny)
        open.push_back(ends.tag);
      else
        operation.bind(ends.from);
    }
    if (behind || ends.from == PointToPoint::kAny) {
      ++i;
      continue;
    }
    InFlight in_flight = std::move(group.unbound[i]);
    group.unbound.erase(group.unbound.begin() + static_cast<std::ptrdiff_t>(i));
    number(group, std::move(in_flight));
    changed = true;
  }
  return changed;
}

int MessageMatching::find_sender(const GroupState& group, PointToPoint ends) {
  bool some_usable = false;
  for (int step = 1; step < group.view.size; ++step) {
    ends.from = (ends.to + step) % group.view.size;
    Link& link = *links_[group.view.members[static_cast<std::size_t>(ends.from)]];
    if (link.incoming().has_early(group.id, group.messages.peek(ends))) return ends.from;
    some_usable = some_usable || link.usable();
  }
  if (!some_usable) {
    int first = group.view.members[static_cast<std::size_t>((ends.to + 1) % group.view.size)];
    failures_.queue(group.id, failures_.explain_loss(
                                  group, first, Error(ErrorKind::kPeerLost, "it left the job, as all others did")));
  }
  return PointToPoint::kAny;
}

}  // namespace ringdp
