#include "engine/matching.h"

#include <algorithm>

#include "base/bytes.h"
#include "engine/engine.h"

namespace ringdp {

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

// Sends start at once. Receives are numbered in the order in which they were posted: see bind_receives.
void Engine::take_message(Group& group, Slot slot) {
  if (slot.operation->point_to_point()->sends) return start_message(group, std::move(slot));
  group.unbound.push_back(std::move(slot));
  bind_receives(group);
}

void Engine::start_message(Group& group, Slot slot) {
  const PointToPoint& ends = *slot.operation->point_to_point();
  FlowIdentity& identity = slot.operation->mutable_identity();
  identity.sequence = group.messages.next(ends);
  slot.work->sequence_.store(identity.sequence, std::memory_order_release);
  slot.work->source_.store(ends.from, std::memory_order_release);
  group.nested.push_back(std::move(slot));
  start(group, group.nested.back());
}

// A receive from a certain rank takes that rank's next number at once, one from anybody when somebody's next message has
// begun to arrive. A receive behind one from anybody with the same tag waits until that one is bound: the first posted gets
// the first message.
bool Engine::bind_receives(Group& group) {
  bool changed = false;
  std::vector<int32_t> open;  // tags of receives from anybody that stay unbound
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
    Slot slot = std::move(group.unbound[i]);
    group.unbound.erase(group.unbound.begin() + static_cast<std::ptrdiff_t>(i));
    start_message(group, std::move(slot));
    changed = true;
  }
  return changed;
}

int Engine::find_sender(const Group& group, PointToPoint ends) {
  bool anybody = false;
  for (int step = 1; step < group.view.size; ++step) {
    ends.from = (ends.to + step) % group.view.size;
    Link& link = *links_[group.view.members[static_cast<std::size_t>(ends.from)]];
    if (link.has_early(group.id, group.messages.peek(ends))) return ends.from;
    anybody = anybody || !(link.broken() || link.departed());
  }
  if (!anybody) {
    int first = group.view.members[static_cast<std::size_t>((ends.to + 1) % group.view.size)];
    fail_later(group.id, explain_loss(group, first, Error(ErrorKind::kPeerLost, "it left the job, as all others did")));
  }
  return PointToPoint::kAny;
}

}  // namespace ringdp
