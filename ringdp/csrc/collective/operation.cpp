#include "collective/operation.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"

namespace ringdp {

InputFactors::InputFactors(DType dtype, std::vector<double> of_members, int rank, int size)
    : of_members_(std::move(of_members)),
      rank_(rank),
      element_bytes_(dtype_size(dtype)),
      multiply_(multiply(dtype)),
      weigh_(weigh(dtype)) {
  if (!on()) return;
  if (multiply_ == nullptr)
    throw Error(ErrorKind::kValue, "all_reduce multiplies float32 and float64 tensors by factors, not " +
                                       std::string(dtype_name(dtype)) + " ones");
  if (of_members_.size() != static_cast<std::size_t>(size))
    throw Error(ErrorKind::kValue, "all_reduce needs a factor for each of the " + std::to_string(size) +
                                       " ranks, not " + std::to_string(of_members_.size()));
}

void InputFactors::multiply_own(std::span<std::byte> input) const {
  if (on() && of(rank_) != 1) multiply_(input.data(), of(rank_), input.size() / element_bytes_);
}

void InputFactors::combine(void* to, const void* a, int member_a, const void* b, int member_b, std::size_t divisor,
                           std::size_t count) const {
  const auto by = [&](int member) { return member < 0 ? 1.0 : of(member); };
  weigh_(to, a, by(member_a), b, by(member_b), divisor, count);
}

Operation::Operation(GroupView group, OperationShape shape, std::string name) : group_(std::move(group)) {
  identity_.shape = shape;
  identity_.name = std::move(name);
  if (!identity_.name.empty()) {
    auto hash = static_cast<uint32_t>(hash_text(identity_.name));
    identity_.shape.name_hash = hash == 0 ? 1 : hash;
  }
  identity_.fingerprint = identity_.shape.fingerprint();
}

void Operation::copy_at_start(std::span<std::byte> to, std::span<const std::byte> from) {
  if (from.empty() || to.data() == from.data()) return;
  uses(to);
  uses(from);
  copies_.emplace_back(to, from);
}

void Operation::wrap(std::function<void()> before, std::function<void()> after) {
  before_ = std::move(before);
  after_ = std::move(after);
}

void Operation::stage(std::shared_ptr<Staging> staging) {
  staging_ = std::move(staging);
  watch_.hand_on(staging_.get());
}

void Operation::record_flows_in(std::span<FlowRecord> records, std::atomic<uint32_t>& used,
                                std::atomic<uint32_t>& left_out) {
  records_ = records;
  records_used_ = &used;
  records_left_out_ = &left_out;
}

FlowRecord* Operation::record_of(int peer, bool sends, uint64_t total) {
  if (records_used_ == nullptr) return nullptr;
  const uint32_t used = records_used_->load(std::memory_order_relaxed);
  if (used == records_.size()) {
    records_left_out_->fetch_add(1, std::memory_order_relaxed);
    return nullptr;
  }
  FlowRecord& record = records_[used];
  record.begin(peer, sends, total);
  records_used_->store(used + 1, std::memory_order_release);
  return &record;
}

bool Operation::can_start() const {
  if (!staging_ || staging_->all_there()) return true;
  const bool multiplied_first = input_factors_.on() && !multiplies_as_it_goes();
  return !before_ && copies_.empty() && only_looked_at_.empty() && !multiplied_first && starts_early();
}

void Operation::start(const OperationContext& context) {
  context_ = context;
  identity_.group = context.group;
  identity_.sequence = context.sequence;
  started_ = true;
  if (before_) before_();
  for (auto& [to, from] : copies_) std::memmove(to.data(), from.data(), from.size());
  if (!multiplies_as_it_goes()) input_factors_.multiply_own(input_);
  watch_.own(only_looked_at_);
  watch_.result(only_looked_at_);
  prepare();
  prepared_ = true;
  // Receivers first: early frames may already complete this, and decide what can be sent.
  for (RecvFlow& flow : receives_) context_.carrier->attach(flow);
  for (SendFlow& flow : sends_) context_.carrier->attach(flow);
  std::vector<int> announced = uninformed_neighbours();
  if (!complete())
    for (int member : announce_to_)
      if (std::find(announced.begin(), announced.end(), member) == announced.end()) announced.push_back(member);
  for (int member : announced) context_.carrier->announce(group_.members[member], identity_);
}

// The neighbours without a flow that starts at once. A member must not get two empty frames of one operation.
std::vector<int> Operation::uninformed_neighbours() const {
  std::vector<int> found;
  if (!announces_to_neighbours_) return found;
  for (int step : {1, group_.size - 1}) {
    const int member = (group_.rank + step) % group_.size;
    const bool informed = std::any_of(sends_.begin(), sends_.end(), [&](const SendFlow& flow) {
      return flow.member == member && (flow.total == 0 || flow.ready > 0);
    });
    if (!informed && (found.empty() || found.front() != member)) found.push_back(member);  // one of two ranks is both
  }
  return found;
}

SendFlow& Operation::add_send(int member, uint64_t total, uint64_t ready) {
  SendFlow& flow = sends_.emplace_back();
  flow.handler = this;
  flow.identity = &identity_;
  flow.member = member;
  flow.peer = group_.members[member];
  flow.total = total;
  flow.ready = ready;
  flow.record = record_of(flow.peer, true, total);
  return flow;
}

RecvFlow& Operation::add_receive(int member, uint64_t total, uint64_t window) {
  RecvFlow& flow = receives_.emplace_back();
  flow.handler = this;
  flow.identity = &identity_;
  flow.member = member;
  flow.peer = group_.members[member];
  flow.total = total;
  flow.window = window;
  flow.record = record_of(flow.peer, false, total);
  return flow;
}

void Operation::widen(RecvFlow& flow, uint64_t window) {
  flow.window = window;
  context_.carrier->widen(flow);
}

void Operation::will_change(std::span<const std::byte> memory) {
  for (SendFlow& flow : sends_) context_.carrier->will_change(flow, memory);
}

bool Operation::complete() const {
  auto ended = [](const auto& flow) { return flow.complete(); };
  return prepared_ && std::all_of(receives_.begin(), receives_.end(), ended) &&
         std::all_of(sends_.begin(), sends_.end(), ended) && finished();
}

void Operation::let_go() {
  for (SendFlow& flow : sends_) context_.carrier->detach(flow);
}

void Operation::abandon() {
  if (!started_) return;
  let_go();
  for (RecvFlow& flow : receives_) context_.carrier->detach(flow);
}

bool Operation::touches(std::span<const std::byte> memory) const {
  return std::any_of(memory_.begin(), memory_.end(), [&](std::span<const std::byte> mine) {
    return mine.data() < memory.data() + memory.size() && memory.data() < mine.data() + mine.size();
  });
}

bool Operation::conflicts(const Operation& other) const {
  return std::any_of(memory_.begin(), memory_.end(), [&](auto mine) { return other.touches(mine); });
}

bool Operation::needs(int world_rank) const {
  auto open = [&](const auto& flow) { return flow.peer == world_rank && !flow.complete(); };
  return std::any_of(receives_.begin(), receives_.end(), open) || std::any_of(sends_.begin(), sends_.end(), open);
}

std::string Operation::waiting_for() const {
  if (staging_ && !staging_->all_there())
    return "this rank's own device (" + std::to_string(staging_->bytes_there()) + " of " +
           std::to_string(staging_->bytes_expected()) + " bytes have come from it)";
  if (!started_) return "a message from any rank";
  std::string out;
  auto add = [&](const auto& flow, uint64_t moved, const char* verb) {
    std::string peer = context_.carrier->peer_text(flow.peer);
    std::string state = std::to_string(moved) + " of " + std::to_string(flow.total) + " bytes " + verb;
    peer.insert(peer.size() - 1, "; " + (flow.total == 0 ? "it has not come" : state));
    out += (out.empty() ? "" : ", ") + peer;
  };
  for (const RecvFlow& flow : receives_)
    if (!flow.complete()) add(flow, flow.received, "received");
  if (!out.empty()) return out;
  for (const SendFlow& flow : sends_)
    if (!flow.complete()) add(flow, flow.sent, "taken");
  return out;
}

std::vector<int> Operation::missing() const {
  if (staging_ && !staging_->all_there()) return {group_.members[static_cast<std::size_t>(group_.rank)]};
  std::vector<int> peers;
  auto add = [&](const auto& flow) {
    if (!flow.complete() && std::find(peers.begin(), peers.end(), flow.peer) == peers.end()) peers.push_back(flow.peer);
  };
  for (const RecvFlow& flow : receives_) add(flow);
  for (const SendFlow& flow : sends_) add(flow);
  return peers;
}

uint64_t Operation::progress() const {
  uint64_t moved = staging_ ? staging_->bytes_there() : 0;
  for (const RecvFlow& flow : receives_) moved += flow.received + (flow.opened ? 1 : 0);
  for (const SendFlow& flow : sends_) moved += flow.sent + (flow.opened ? 1 : 0);
  return moved;
}

}  // namespace ringdp
