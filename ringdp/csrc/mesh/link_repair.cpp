#include "mesh/link_repair.h"

#include <poll.h>

#include <utility>

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
    connection_.channel().noticed();  // its descriptor may be readable for room only
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
  if (connection_.connected() && connection_.usable() && !connection_.healing())
    connection_.channel().add_stream(std::move(socket));
}

}  // namespace ringdp
