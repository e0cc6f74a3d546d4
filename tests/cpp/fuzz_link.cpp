// What a peer may send once it was let in: frames that are right, frames that were changed, in any order and any
// pieces, while operations come and go on this side.
#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <list>
#include <memory>

#include "base/error.h"
#include "fuzz.h"
#include "link/frame.h"
#include "link/link.h"

namespace ringdp::fuzz {
namespace {

// Gives out what a peer has sent in pieces of any size, and takes what is sent to it, or does not.
class ScriptedChannel final : public Channel {
 public:
  ScriptedChannel(std::vector<std::byte> input, Random& random) : input_(std::move(input)), random_(random) {}

  IoResult receive(std::span<const iovec> pieces) override {
    if (random_.one_in(4)) return {IoStatus::kWouldBlock, 0, 0};
    if (at_ == input_.size()) return {IoStatus::kWouldBlock, 0, 0};
    std::size_t limit = random_.one_in(3) ? 1 + random_.below(100) : input_.size(), moved = 0;
    for (const iovec& piece : pieces) {
      std::size_t part = std::min({piece.iov_len, input_.size() - at_, limit - moved});
      std::memcpy(piece.iov_base, input_.data() + at_, part);
      at_ += part;
      moved += part;
      if (part < piece.iov_len) break;
    }
    return {IoStatus::kOk, moved, 0};
  }
  IoResult send(std::span<const iovec> pieces) override {
    if (random_.one_in(6)) return {IoStatus::kWouldBlock, 0, 0};
    std::size_t offered = 0;
    for (const iovec& piece : pieces) offered += piece.iov_len;
    return {IoStatus::kOk, random_.one_in(2) ? offered : 1 + random_.below(offered), 0};
  }
  bool drained() override { return true; }
  void close_send() override {}
  int poll_fd() const override { return -1; }
  std::string describe() const override { return "scripted"; }
  bool used_up() const { return at_ == input_.size(); }

 private:
  std::vector<std::byte> input_;
  std::size_t at_ = 0;
  Random& random_;
};

FlowIdentity identity(uint64_t group, uint64_t sequence, uint64_t count) {
  FlowIdentity out;
  out.group = group;
  out.sequence = sequence;
  out.shape.what = Collective::kAllReduce;
  out.shape.dtype = DType::kFloat32;
  out.shape.count = count;
  out.fingerprint = out.shape.fingerprint();
  return out;
}

struct Operation final : FlowHandler {
  FlowIdentity id;
  std::vector<std::byte> memory;
  SendFlow send;
  RecvFlow recv;
  bool sending = false, receiving = false;

  Operation(const FlowIdentity& identity, std::size_t bytes) : id(identity), memory(bytes) {
    send.handler = recv.handler = this;
    send.identity = recv.identity = &id;
    send.total = send.ready = recv.total = recv.window = bytes;
  }
  std::span<const std::byte> outgoing(SendFlow&, uint64_t offset, std::size_t max) override {
    require(offset < memory.size() && max > 0, "bytes are asked for that are there");
    return std::span(memory).subspan(offset, std::min(max, memory.size() - offset));
  }
  void flushed(SendFlow& flow) override {
    require(flow.sent <= flow.total, "no more is sent than there is");
    if (flow.complete()) sending = false;
  }
  std::span<std::byte> incoming(RecvFlow&, uint64_t offset, std::size_t length) override {
    if (offset > memory.size() || length > memory.size() - offset) return {};
    return std::span(memory).subspan(offset, length);
  }
  void arrived(RecvFlow& flow, uint64_t offset, std::span<std::byte> data) override {
    require(offset + data.size() <= memory.size() && flow.received <= flow.total, "it stays within the memory");
    if (flow.complete()) receiving = false, count("operations received");
  }
};

constexpr std::array<std::size_t, 8> kSizes{0, 4, 64, 4096, 65536, 65540, 300'000, 600'000};

std::vector<std::byte> frame(Random& random, const Operation& about, uint64_t& offset, const FrameCheck& check) {
  FrameHeader header;
  header.group = about.id.group;
  header.sequence = about.id.sequence;
  header.fingerprint = about.id.fingerprint;
  header.shape = about.id.shape;
  std::size_t payload = 0;
  std::string control;
  if (random.one_in(4)) {
    constexpr std::array kOften{FrameType::kGrant, FrameType::kRequest, FrameType::kCredit, FrameType::kPing,
                                FrameType::kPong};
    header.type = random.one_in(20) ? static_cast<FrameType>(2 + random.below(7)) : kOften[random.below(kOften.size())];
    header.offset = random.one_in(4) ? random.odd_number() : about.memory.size();
    if (header.type == FrameType::kAbort || header.type == FrameType::kBye) payload = random.below(100);
    if (header.type == FrameType::kPong) {
      PeerState state;
      state.waits_for = {1, 2, 3};
      state.last = "all_reduce #1";
      control = state.encode();
      std::vector<std::byte> changed(control.size());
      std::memcpy(changed.data(), control.data(), control.size());
      if (random.one_in(2)) mutate(changed, random);
      control.assign(reinterpret_cast<const char*>(changed.data()), changed.size());
      payload = control.size();
    }
  } else {
    payload = std::min<std::size_t>({about.memory.size() - offset, kSegmentBytes, 1 + random.below(kSegmentBytes)});
    header.offset = offset;
    header.eager = offset < kSmallFlowBytes;
    if (header.eager) payload = std::min(payload, kSmallFlowBytes - offset);
    offset += payload;
  }
  header.length = static_cast<uint32_t>(payload);
  std::vector<std::byte> out(check.head_bytes() + payload);
  std::memcpy(out.data() + check.head_bytes(), control.data(), control.size());
  check.write_head(header, std::span(out).subspan(check.head_bytes()), out.data());
  if (random.one_in(12)) {
    std::vector<std::byte> head(out.begin(), out.begin() + static_cast<std::ptrdiff_t>(check.head_bytes()));
    mutate(head, random);
    std::copy_n(head.begin(), std::min(head.size(), check.head_bytes()), out.begin());
  }
  return out;
}

}  // namespace

void round(Random& random) {
  std::list<Operation> operations;
  for (uint64_t sequence = 1 + random.below(6); sequence > 0; --sequence) {
    std::size_t bytes = kSizes[random.below(random.one_in(4) ? 8 : 5)];
    operations.emplace_back(identity(1 + random.below(2), sequence, bytes / 4), bytes);
  }
  const FrameCheck check(random.one_in(4));
  std::vector<std::byte> input;
  for (const Operation& it : operations) {
    uint64_t offset = 0;
    for (uint64_t left = 1 + random.below(5); left > 0; --left) {
      auto next = frame(random, it, offset, check);
      input.insert(input.end(), next.begin(), next.end());
    }
  }
  if (random.one_in(10)) mutate(input, random);
  auto owned = std::make_unique<ScriptedChannel>(std::move(input), random);
  const ScriptedChannel& channel = *owned;
  LinkEvents events;
  events.aborted = [&](int, uint64_t, const AbortNotice& notice) {
    require(notice.text.size() <= kAbortTextBytes, "a notice is short");
    count("aborts");
  };
  events.mismatched = [&](const Disagreement& about) {
    Error error = about.explain({0, "here", 1}, {1, "there", 2}, about.name_unknown() ? "theirs" : "");
    require(error.kind() == ErrorKind::kMismatch, "a disagreement is explained");
    count("mismatches");
  };
  events.departed = [](int, const std::string& reason) {
    require(reason.size() <= kReasonBytes, "a reason is short");
    count("goodbyes");
  };
  Link* answering = nullptr;
  events.asked = [&](int, uint64_t group, uint64_t sequence, bool) {
    PeerState state;
    state.progress = PeerState::Progress::kRunning;
    state.waits_for.assign(random.below(2000), 1);
    state.last = std::string(random.below(3000), 'x');
    answering->send_pong(group, sequence, state.encode());
    count("questions");
  };
  events.answered = [](int, uint64_t, uint64_t, const PeerState& state) {
    require(state.waits_for.size() <= kPeerStateBytes && state.last.size() <= kPeerStateBytes, "an answer is short");
    count("answers");
  };
  events.started = [&](uint64_t, uint64_t) { return StartedOperation{random.one_in(20), nullptr}; };
  Link link({0, "here", 1}, {1, "there", 2}, std::move(owned), events, check.on());
  answering = &link;
  for (int step = 0; step < 60 && !link.departed(); ++step) {
    auto it = std::next(operations.begin(), static_cast<std::ptrdiff_t>(random.below(operations.size())));
    switch (random.below(9)) {
      case 0:
        if (!it->receiving && !it->recv.opened && it->recv.received == 0) it->receiving = true, link.attach(it->recv);
        break;
      case 1:
        if (!it->sending && !it->send.opened && it->send.sent == 0) it->sending = true, link.attach(it->send);
        break;
      case 2:
        if (random.one_in(8) && it->receiving) it->receiving = false, link.detach(it->recv);
        if (random.one_in(8) && it->sending) it->sending = false, link.detach(it->send);
        break;
      case 3:
        if (random.one_in(10)) link.discard_group(it->id.group);
        if (random.one_in(10)) link.incoming().check_early_frames(it->id);
        break;
      case 4:
        if (random.one_in(4)) link.announce(it->id);
        if (random.one_in(8)) link.send_ping(it->id.group, it->id.sequence);
        if (random.one_in(30)) link.send_bye("done");
        link.check_host();
        (void)link.has_outgoing();
        break;
      case 5:
        link.pump_send();
        break;
      default:
        link.pump_receive(1 + random.below(1 << 20));
    }
  }
  if (channel.used_up()) count("read to the end");
}

}  // namespace ringdp::fuzz
