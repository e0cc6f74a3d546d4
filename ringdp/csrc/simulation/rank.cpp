#include "simulation/rank.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "shared/shared_setup.h"
#include "simulation/simulation.h"

namespace ringdp {
namespace {

constexpr std::size_t kSocketBytes = 512 * 1024;  // what a connection's socket takes of what cannot leave yet
constexpr std::size_t kStretchBytes = 64 * 1024;  // at a time, through shared memory

}  // namespace

void SimulatedRank::begin(std::unique_ptr<Operation> operation) {
  operation_ = std::move(operation);
  operation_->start({.group = 1, .sequence = 0, .carrier = this, .scratch = &scratch_});
  // As PeerLinks::pump: from its right neighbour on.
  const auto behind = [this](const SimulatedPeer* it) { return it->member > member_ ? 0 : 1; };
  std::sort(senders_.begin(), senders_.end(), [&](const auto* a, const auto* b) {
    return std::pair(behind(a), a->member) < std::pair(behind(b), b->member);
  });
  look({});
  go_on();
}

SimulatedPeer& SimulatedRank::peer(int member) {
  auto [found, made] = peers_.try_emplace(member);
  SimulatedPeer& it = found->second;
  if (made) {
    it.rank = this;
    it.member = member;
    it.within_host = simulation_.host_of(member) == simulation_.host_of(member_);
  }
  return it;
}

void SimulatedRank::attach(SendFlow& flow) {
  SimulatedPeer& to = peer(flow.peer);
  to.out = &flow;
  senders_.push_back(&to);
  ++open_flows_;
}

void SimulatedRank::attach(RecvFlow& flow) {
  peer(flow.peer).in = &flow;
  ++open_flows_;
  if (flow.total > kSmallFlowBytes) grant(flow);
}

void SimulatedRank::widen(RecvFlow& flow) {
  if (flow.total > kSmallFlowBytes || flow.granted != 0) grant(flow);
}

// As IncomingFlows::grant.
void SimulatedRank::grant(RecvFlow& flow) {
  const uint64_t limit = std::min(flow.window, flow.total);
  if (limit <= flow.granted) return;
  flow.granted = limit;
  SimulatedPeer& from = peer(flow.peer);
  if (from.grant == 0 && !from.announces) controls_.push_back(&from);
  from.grant = limit;
}

void SimulatedRank::announce(int to, const FlowIdentity&) {
  SimulatedPeer& it = peer(to);
  if (it.grant == 0 && !it.announces) controls_.push_back(&it);
  it.announces = true;
}

std::size_t SimulatedRank::room_of(const SimulatedPeer& peer) const {
  if (!peer.within_host) return kSocketBytes;
  const auto& hosts = simulation_.network_.hosts;
  return shared_ring_bytes(hosts[static_cast<std::size_t>(simulation_.host_of(member_))].ranks);
}

bool SimulatedRank::can_send(const SimulatedPeer& peer) const {
  return peer.out != nullptr && peer.window.sendable(*peer.out) && peer.unsent < room_of(peer);
}

void SimulatedRank::look(const CriticalPath& path) {
  auto queue = [&](SimulatedPeer& it) {
    if (std::exchange(it.queued, true)) return;
    queue_.push_back({.kind = Work::Kind::kSend, .peer = &it, .possible_s = simulation_.now_, .path = path});
  };
  for (SimulatedPeer* it : controls_) queue(*it);
  controls_.clear();
  for (SimulatedPeer* it : senders_)
    if (!it->queued && can_send(*it)) queue(*it);
}

void SimulatedRank::take(SimulatedMessage* message, std::size_t bytes, bool last, const CriticalPath& path) {
  add({.kind = Work::Kind::kTake,
       .message = message,
       .bytes = bytes,
       .last = last,
       .possible_s = simulation_.now_,
       .path = path});
}

void SimulatedRank::room(SimulatedPeer& peer, std::size_t bytes, const CriticalPath& path) {
  peer.unsent -= bytes;
  if (peer.queued || !can_send(peer)) return;
  peer.queued = true;
  add({.kind = Work::Kind::kSend, .peer = &peer, .possible_s = simulation_.now_, .path = path});
}

void SimulatedRank::add(Work work) {
  queue_.push_back(std::move(work));
  go_on();
}

void SimulatedRank::go_on() {
  if (working_ || waits_for_core_ || queue_.empty()) return;
  if (cores_.free == 0) {
    waits_for_core_ = true;
    cores_.waiting.push_back(this);
    return;
  }
  --cores_.free;
  begin_work();
}

void SimulatedRank::core_is_free() {
  waits_for_core_ = false;
  --cores_.free;
  if (simulation_.now_ > queue_.front().possible_s) path_ = cores_.last;
  begin_work();
}

void SimulatedRank::begin_work() {
  working_ = true;
  now_ = std::move(queue_.front());
  queue_.pop_front();
  // It waited for this thread or for a core, or the thread waited for it.
  if (simulation_.now_ <= now_.possible_s) path_ = now_.path;
  double seconds = 0;
  if (now_.kind == Work::Kind::kSend) seconds = prepare_send(now_);
  if (now_.kind == Work::Kind::kTake) seconds = take_message(now_);
  if (now_.kind == Work::Kind::kCompute) seconds = std::exchange(owed_s_, 0);
  seconds += seconds_of_counted();
  simulation_.add_event(simulation_.now_ + seconds, Simulation::EventKind::kWorkEnds, this);
}

// What the operation's kernels would have taken since the last call.
double SimulatedRank::seconds_of_counted() {
  CountedWork* const work = CountedWork::here();
  if (work == nullptr) return 0;
  const CountedWork::Bytes done = work->take();
  const WorkCosts& costs = simulation_.network_.costs;
  const double sums = static_cast<double>(done.added) * costs.add;
  const double codes =
      static_cast<double>(done.encoded) * costs.encode + static_cast<double>(done.decoded) * costs.decode;
  path_.seconds[CriticalPath::kSums] += sums;
  path_.seconds[CriticalPath::kCodes] += codes;
  return sums + codes;
}

// Control frames and the next frame of the flow, as LinkSender::stage_next makes them.
double SimulatedRank::prepare_send(Work& work) {
  SimulatedPeer& to = *work.peer;
  const WorkCosts& costs = simulation_.network_.costs;
  to.queued = false;
  SimulatedMessage* const message = simulation_.new_message();
  work.message = message;
  message->from = &to;
  message->grant = std::exchange(to.grant, 0);
  message->wire_bytes = message->grant != 0 ? kFrameHeaderBytes : 0;
  if (std::exchange(to.announces, false)) message->wire_bytes += kFrameHeaderBytes;
  std::erase(controls_, &to);
  if (can_send(to)) {
    SendFlow& flow = *to.out;
    const std::size_t longest = to.within_host ? kStretchBytes : kSegmentBytes;
    const std::size_t most = std::min<uint64_t>({longest, to.window.allowance(flow), flow.ready - flow.sent});
    std::span<const std::byte> payload;
    if (flow.total > 0) payload = flow.handler->outgoing(flow, flow.sent, most);
    if (flow.total == 0 || !payload.empty()) {
      message->data = true;
      message->offset = flow.sent;
      message->length = payload.size();
      message->wire_bytes += kFrameHeaderBytes + payload.size();
      if (flow.sent >= flow.granted) to.window.sent_eagerly(payload.size());
      if (CountedWork::here() == nullptr) message->payload.assign(payload.begin(), payload.end());
    }
  }
  if (message->wire_bytes == 0) return 0;
  const double each = to.within_host ? costs.message_within_host : costs.message_between_hosts;
  const double copy =
      static_cast<double>(message->length) * (to.within_host ? costs.copy_within_host : costs.copy_between_hosts);
  path_.seconds[CriticalPath::kMessages] += each;
  path_.seconds[CriticalPath::kCopies] += copy;
  double memory = 0;
  if (to.within_host && simulation_.network_.memory_bytes_per_s > 0) {
    memory = simulation_.wait_for_memory(*this, message->length, each + copy);
    path_.seconds[CriticalPath::kMemory] += memory;
  }
  return each + copy + memory;
}

double SimulatedRank::take_message(Work& work) {
  SimulatedMessage& message = *work.message;
  const bool within_host = message.from->within_host;
  const WorkCosts& costs = simulation_.network_.costs;
  double each = 0, copy = 0;
  if (work.last) each = within_host ? costs.message_within_host : costs.message_between_hosts;
  if (!within_host) copy = static_cast<double>(work.bytes) * costs.copy_between_hosts;
  path_.seconds[CriticalPath::kMessages] += each;
  path_.seconds[CriticalPath::kCopies] += copy;
  if (!work.last) return each + copy;
  ++path_.hops;
  SimulatedPeer& from = peer(message.taken_for);
  if (message.grant != 0 && from.out != nullptr)
    from.out->granted = std::min(std::max(from.out->granted, message.grant), from.out->total);
  if (message.data) {
    RecvFlow& flow = *from.in;
    std::span<std::byte> room;
    if (message.length > 0) room = flow.handler->incoming(flow, message.offset, message.length);
    if (!message.payload.empty()) std::memcpy(room.data(), message.payload.data(), message.length);
    flow.received += message.length;
    flow.opened = true;
    if (flow.complete()) {
      from.in = nullptr;
      flow_ended();
    }
    flow.handler->arrived(flow, message.offset, room);
  }
  return each + copy;
}

void SimulatedRank::work_ends() {
  working_ = false;
  SimulatedMessage* const message = now_.message;
  const Work::Kind kind = now_.kind;
  if (kind == Work::Kind::kSend) sent(message);
  if (kind == Work::Kind::kTake) {
    if (message->from->within_host) message->from->rank->room(*message->from, now_.bytes, path_);
    if (now_.last) simulation_.free_message(message);
  }
  look(path_);
  if (open_flows_ == 0 && !finished() && owed_s_ == 0 && operation_->complete()) {
    finished_s_ = simulation_.now_;
    simulation_.rank_finished(path_);
  }
  ++cores_.free;
  cores_.last = path_;
  if (!cores_.waiting.empty()) {  // this rank's turn comes after theirs
    SimulatedRank* const next = cores_.waiting.front();
    cores_.waiting.pop_front();
    next->core_is_free();
  }
  go_on();
}

void SimulatedRank::sent(SimulatedMessage* message) {
  if (message->wire_bytes == 0) return simulation_.free_message(message);
  SimulatedPeer& to = *message->from;
  ++messages_;
  message->path = path_;
  to.unsent += message->wire_bytes;
  SendFlow* const flow = message->data ? to.out : nullptr;
  const std::size_t length = message->length;
  simulation_.transmit(message);
  if (flow == nullptr) return;
  flow->sent += length;
  flow->opened = true;
  if (flow->complete()) {
    to.out = nullptr;
    std::erase(senders_, &to);
    flow_ended();
  }
  flow->handler->flushed(*flow);
  // A sum may have waited for these bytes to leave.
  owed_s_ = seconds_of_counted();
  if (owed_s_ > 0) queue_.push_front({.kind = Work::Kind::kCompute, .possible_s = simulation_.now_, .path = path_});
}

}  // namespace ringdp
