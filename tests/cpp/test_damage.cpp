// What a link makes of a flipped bit: every bit of a stream of frames in turn, of all types, in pieces of any size.
// Nothing that a flipped bit could have touched reaches an operation, and what came before it is delivered.
#include <algorithm>
#include <cstring>
#include <random>

#include "link/frame.h"
#include "link/link.h"
#include "testing.h"

namespace ringdp::testing {
namespace {

constexpr std::size_t kBytes = 96;  // of each flow

// Keeps what is sent; gives out what it was given, at most `piece` bytes at a time.
class MemoryChannel final : public Channel {
 public:
  explicit MemoryChannel(std::vector<std::byte>& sent, std::vector<std::byte> input = {}, std::size_t piece = 1 << 20)
      : sent_(sent), input_(std::move(input)), piece_(piece) {}

  IoResult send(std::span<const iovec> pieces) override {
    const std::size_t before = sent_.size();
    for (const iovec& it : pieces) {
      const auto* begin = static_cast<const std::byte*>(it.iov_base);
      sent_.insert(sent_.end(), begin, begin + it.iov_len);
    }
    return {IoStatus::kOk, sent_.size() - before, 0};
  }
  IoResult receive(std::span<const iovec> pieces) override {
    if (at_ == input_.size()) return {IoStatus::kWouldBlock, 0, 0};
    const std::size_t part = std::min({pieces[0].iov_len, piece_, input_.size() - at_});
    std::memcpy(pieces[0].iov_base, input_.data() + at_, part);
    at_ += part;
    return {IoStatus::kOk, part, 0};
  }
  bool drained() override { return true; }
  void close_send() override {}
  int poll_fd() const override { return -1; }
  std::string describe() const override { return "tcp 10.0.0.1:1000 -> 10.0.0.2:2000"; }

 private:
  std::vector<std::byte>& sent_;
  std::vector<std::byte> input_;
  std::size_t at_ = 0;
  const std::size_t piece_;
};

struct Flow final : FlowHandler {
  FlowIdentity id;
  std::vector<std::byte> memory = std::vector<std::byte>(kBytes);
  std::size_t delivered = 0;
  SendFlow send;
  RecvFlow recv;

  explicit Flow(uint64_t sequence) {
    id.group = 7;
    id.sequence = sequence;
    id.shape.what = Collective::kAllReduce;
    id.shape.dtype = DType::kUint8;
    id.shape.count = kBytes;
    id.fingerprint = id.shape.fingerprint();
    send.handler = recv.handler = this;
    send.identity = recv.identity = &id;
    send.total = send.ready = recv.total = recv.window = kBytes;
  }
  std::span<const std::byte> outgoing(SendFlow&, uint64_t offset, std::size_t max) override {
    return std::span(memory).subspan(offset, std::min(max, kBytes - offset));
  }
  void flushed(SendFlow&) override {}
  std::span<std::byte> incoming(RecvFlow&, uint64_t offset, std::size_t length) override {
    return std::span(memory).subspan(offset, length);
  }
  void arrived(RecvFlow&, uint64_t, std::span<std::byte> data) override { delivered += data.size(); }
};

std::byte pattern(uint64_t sequence, std::size_t i) { return static_cast<std::byte>(31 * sequence + 7 * i + i * i); }

// Two flows, and words of all types around them.
std::vector<std::byte> stream(bool checksums) {
  std::vector<std::byte> sent;
  Link link({1, "there", 2}, {0, "here", 1}, std::make_unique<MemoryChannel>(sent), {}, checksums);
  Flow first(1), second(2);
  for (Flow* flow : {&first, &second})
    for (std::size_t i = 0; i < kBytes; ++i) flow->memory[i] = pattern(flow->id.sequence, i);
  RecvFlow wanted = second.recv;
  wanted.total = wanted.window = 1 << 20;
  link.attach(wanted);  // a grant
  link.send_ping(7, 1);
  link.pump_send();
  link.attach(first.send);
  link.pump_send();
  link.send_pong(7, 1, PeerState{}.encode());
  link.send_abort(8, {ErrorKind::kTimeout, 1, 3, 0, false, "it took too long"});
  link.attach(second.send);
  link.pump_send();
  link.send_bye("the end");
  link.pump_send();
  return sent;
}

struct Seen {
  std::string error;
  bool damaged = false, departed = false;
  std::size_t delivered = 0, words = 0;
  bool right = true;  // what was delivered
};

Seen receive(std::vector<std::byte> input, bool checksums, std::size_t piece) {
  Seen seen;
  LinkEvents events;
  events.aborted = [&](int, uint64_t group, const AbortNotice& notice) {
    ++seen.words;
    seen.right = seen.right && group == 8 && notice.sequence == 3 && notice.text == "it took too long";
  };
  events.asked = [&](int, uint64_t group, uint64_t sequence, bool) {
    ++seen.words;
    seen.right = seen.right && group == 7 && sequence == 1;
  };
  events.answered = [&](int, uint64_t group, uint64_t sequence, const PeerState&) {
    ++seen.words;
    seen.right = seen.right && group == 7 && sequence == 1;
  };
  events.departed = [&](int, const std::string& reason) {
    ++seen.words;
    seen.right = seen.right && reason == "the end";
  };
  events.mismatched = [&](const Disagreement&) { seen.right = false; };
  events.started = [](uint64_t, uint64_t) { return StartedOperation{}; };
  std::vector<std::byte> sent;
  Link link({0, "here", 1}, {1, "there", 2}, std::make_unique<MemoryChannel>(sent, std::move(input), piece), events,
            checksums);
  Flow first(1), second(2);
  link.attach(first.recv);
  link.attach(second.recv);
  try {
    while (link.pump_receive(1 << 20)) {
    }
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::kDamaged);
    CHECK_EQ(error.context().rank, 0);
    CHECK_EQ(error.context().peer, 1);
    seen.error = error.what();
    while (link.pump_receive(1 << 20)) {  // the rest is read, so that the other side can go on, and thrown away
    }
  }
  for (Flow* flow : {&first, &second}) {
    seen.delivered += flow->delivered;
    for (std::size_t i = 0; i < flow->delivered; ++i)
      seen.right = seen.right && flow->memory[i] == pattern(flow->id.sequence, i);
  }
  seen.damaged = link.damaged();
  seen.departed = link.departed();
  return seen;
}

}  // namespace

CASE("a stream that comes as it was sent is read to its end, with checksums and without") {
  for (bool checksums : {false, true})
    for (std::size_t piece : {1, 71, 72, 73, 1000}) {
      const Seen seen = receive(stream(checksums), checksums, piece);
      CHECK_EQ(seen.error, "");
      CHECK(seen.right && seen.departed && !seen.damaged);
      CHECK_EQ(seen.delivered, 2 * kBytes);
      CHECK_EQ(seen.words, std::size_t{4});
    }
  const std::size_t frames = 7;  // grant, ping, data, pong, abort, data, bye
  CHECK_EQ(stream(true).size(), stream(false).size() + frames * kFrameCheckBytes);
}

CASE("whichever bit flips, the link says so, and passes on nothing of that frame or behind it") {
  const std::vector<std::byte> whole = stream(true);
  const Seen unhurt = receive(whole, true, whole.size());
  std::mt19937_64 random(3);
  std::size_t silent = 0, wrong = 0, unnamed = 0, late = 0;
  for (std::size_t bit = 0; bit < 8 * whole.size(); ++bit) {
    std::vector<std::byte> damaged = whole;
    damaged[bit / 8] ^= std::byte{1} << (bit % 8);
    const Seen seen = receive(std::move(damaged), true, 1 + random() % 200);
    silent += seen.error.empty() || !seen.damaged;
    wrong += !seen.right;
    unnamed += seen.error.find("rank 1 (host there, pid 2)") == std::string::npos ||
               seen.error.find("tcp 10.0.0.1:1000 -> 10.0.0.2:2000") == std::string::npos;
    late += seen.words == unhurt.words && seen.delivered == unhurt.delivered;
  }
  CHECK_EQ(silent, std::size_t{0});
  CHECK_EQ(wrong, std::size_t{0});
  CHECK_EQ(unnamed, std::size_t{0});
  CHECK_EQ(late, std::size_t{0});
}

CASE("behind a goodbye nothing is sent") {
  std::vector<std::byte> sent;
  Link link({1, "there", 2}, {0, "here", 1}, std::make_unique<MemoryChannel>(sent), {}, true);
  link.send_bye("that is all");
  Flow flow(1);
  link.attach(flow.send);
  link.send_ping(7, 1);
  link.send_abort(7, {});
  link.pump_send();
  CHECK_EQ(sent.size(), kFrameHeaderBytes + kFrameCheckBytes + std::strlen("that is all"));
  CHECK(!link.has_outgoing());
}

CASE("a frame that says it is longer than its type may be is refused before anything is allocated for it") {
  for (int type = 1; type <= 8; ++type) {
    FrameHeader header;
    header.type = static_cast<FrameType>(type);
    std::array<std::byte, kFrameHeaderBytes> raw{};
    header.encode(raw);
    CHECK(FrameHeader::decode(raw).type == header.type);
    for (uint32_t length : {uint32_t{kSegmentBytes} + 1, uint32_t{1} << 31, ~uint32_t{0}}) {
      header.length = length;
      header.encode(raw);
      CHECK_THROWS(ErrorKind::kHandshake, FrameHeader::decode(raw));
    }
  }
}

}  // namespace ringdp::testing
