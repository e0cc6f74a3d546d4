#include "link/link.h"

#include <poll.h>

#include <utility>

#include "base/text.h"

namespace ringdp {

namespace {

constexpr std::size_t kDrainBytes = 1024 * 1024;  // at a time

bool has_more(const Channel& channel) {
  pollfd polled{channel.poll_fd(), POLLIN, 0};
  return poll(&polled, 1, 0) > 0;
}

}  // namespace

void LinkRepair::stop_sending() {
  hold();
  connection_.channel().close_send();
}

void LinkRepair::drain() {
  while (connection_.connected() && connection_.usable() && has_more(connection_.channel())) {
    if (!receiver_.pump(kDrainBytes)) return;
  }
}

void LinkRepair::interrupt() {
  connection_.interrupt();
  receiver_.interrupted();
  sender_.interrupted();
}

bool LinkRepair::resume(std::unique_ptr<Channel> channel, uint64_t taken) {
  connection_.open(std::move(channel), connection_.made_late());
  return sender_.resumed(taken);
}

void LinkRepair::add_stream(Fd socket) {
  if (connection_.path() != nullptr && connection_.usable() && !connection_.healing())
    connection_.path()->add_stream(std::move(socket));
}

namespace {

constexpr std::size_t kLastFramesBytes = 1024 * 1024;  // read at a time

}  // namespace

Link::Link(PeerInfo self, PeerInfo peer, std::unique_ptr<Channel> channel, const LinkEvents& events, bool checksums,
           std::size_t segment_bytes, bool heals)
    : Connection(std::move(self), std::move(peer)),
      events_(events),
      sender_(
          *this,
          {[this] { events_.wanted(this->peer().rank); }, [this](int error_number) { on_send_failed(error_number); }},
          segment_bytes, heals),
      incoming_(*this, sender_, events_),
      receiver_(*this, sender_, incoming_, events_),
      repair_(*this, sender_, receiver_, heals) {
  if (!channel) return;
  open(std::move(channel), false);
  sender_.opened(checksums);
  receiver_.opened(checksums);
}

void Link::connect(std::unique_ptr<Channel> channel, bool checksums) {
  open(std::move(channel), true);
  receiver_.opened(checksums);
  sender_.opened(checksums);
}

void Link::detach(RecvFlow& flow) {
  incoming_.detach(flow);
  receiver_.detach(flow);
}

void Link::discard_group(uint64_t group) {
  incoming_.discard_group(group);
  sender_.window().discard_group(group);
}

void Link::announce(const FlowIdentity& identity) {
  if (broken() || departed()) return;
  FrameHeader header;
  header.group = identity.group;
  header.sequence = identity.sequence;
  header.fingerprint = identity.fingerprint;
  header.shape = identity.shape;
  sender_.control(header);
}

void Link::send_abort(uint64_t group, const AbortNotice& notice) {
  if (!broken() && !departed())
    sender_.control(FrameHeader::of(FrameType::kAbort, group, notice.sequence), notice.encode());
}

void Link::send_bye(const std::string& reason) {
  if ((connected() || healing()) && !broken() && !departed()) sender_.say_bye(clean_text(reason, kReasonBytes));
}

void Link::send_ping(uint64_t group, uint64_t sequence, bool with_stacks) {
  if (!broken() && !departed() && sender_.may_talk())
    sender_.control(FrameHeader::of(FrameType::kPing, group, sequence, with_stacks ? kWithStacks : 0));
}

void Link::send_pong(uint64_t group, uint64_t sequence, const std::string& answer, bool stacks) {
  if (!broken() && !departed() && sender_.may_talk())
    sender_.control(FrameHeader::of(FrameType::kPong, group, sequence, stacks ? kWithStacks : 0), answer);
}

// If the peer has ended, its last frames explain why. If it still sends, the bytes that this kernel acknowledges must
// be read.
void Link::on_send_failed(int error_number) {
  if (direct() == nullptr) repair_.drain();
  while (!departed() && receiver_.pump(kLastFramesBytes)) {
  }
  if (departed()) return;
  try {
    receiver_.on_closed(error_number);
  } catch (const ConnectionBroken& error) {
    throw error.for_sending();
  }
}

}  // namespace ringdp
