// A channel that breaks after a given number of sent bytes, of which the last ones are lost. Bytes that the peer's
// host has acknowledged can be read there, as with a connection that the network resets. CutChannel is used by the
// thread that drives; a Cutter is shared by all channels of a rank and the test's threads.
#pragma once

#include <linux/sockios.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>

#include "transport/channel.h"
#include "transport/rate_limit.h"

namespace ringdp::testing {

struct Cutter {
  std::atomic<int> peer{-1};       // the connection to this rank breaks; -1: none
  std::atomic<uint64_t> after{0};  // bytes from now on
  std::atomic<uint64_t> lost{0};   // bytes more that the channel takes, and that never arrive
  std::atomic<int> cuts{0};
  std::atomic<int64_t> held_up_ms{0};  // what the channels say of that; 0: the truth

  void arm(int to, uint64_t after_bytes, uint64_t lost_bytes) {
    after = after_bytes;
    lost = lost_bytes;
    peer = to;
  }
  void disarm() { peer = -1; }
};

class CutChannel final : public Channel, private NetworkPath {
 public:
  CutChannel(std::unique_ptr<Channel> inner, std::shared_ptr<Cutter> cutter, int peer)
      : inner_(std::move(inner)), cutter_(std::move(cutter)), peer_(peer) {}

  IoResult send(std::span<const iovec> pieces) override {
    if (broken_) return {IoStatus::kBroken, 0, ECONNRESET};
    if (cutter_->peer != peer_) return inner_->send(pieces);
    std::size_t offered = 0;
    for (const iovec& piece : pieces) offered += piece.iov_len;
    const uint64_t after = cutter_->after;
    if (offered <= after) {
      IoResult result = inner_->send(pieces);
      if (result.status == IoStatus::kOk) cutter_->after = after - result.bytes;
      return result;
    }
    IoResult result{IoStatus::kOk, 0, 0};
    if (after > 0) {
      result = inner_->send(first_bytes(pieces, after));
      if (result.status != IoStatus::kOk) return result;
      cutter_->after = after - result.bytes;
      if (result.bytes < after) return result;
    }
    swallowed_ = std::min<uint64_t>(offered - result.bytes, cutter_->lost);
    broken_ = true;
    cutter_->disarm();
    ++cutter_->cuts;
    ::shutdown(inner_->poll_fd(), SHUT_RDWR);
    result.bytes += swallowed_;
    if (result.bytes == 0) return {IoStatus::kBroken, 0, ECONNRESET};
    return result;
  }
  IoResult receive(std::span<const iovec> pieces) override { return inner_->receive(pieces); }
  bool drained() override { return inner_->drained(); }
  void close_send() override { inner_->close_send(); }
  int poll_fd() const override { return inner_->poll_fd(); }
  std::string describe() const override { return inner_->describe(); }
  NetworkPath* path() override { return inner_->path() != nullptr ? this : nullptr; }

 private:
  // Without the short cut of connections within a host: the peer may be cutting.
  std::size_t undelivered() override {
    int bytes = 0;
    if (ioctl(inner_->poll_fd(), SIOCOUTQ, &bytes) != 0) return SIZE_MAX;
    return static_cast<std::size_t>(bytes) + swallowed_;
  }
  void add_stream(Fd socket) override { inner_->path()->add_stream(std::move(socket)); }
  void limit_unsent(std::size_t bytes) override { inner_->path()->limit_unsent(bytes); }
  void watch_host(int64_t silence_ms) override { inner_->path()->watch_host(silence_ms); }
  int64_t host_silence_ms() override { return inner_->path()->host_silence_ms(); }
  HeldUp held_up() override {
    const int64_t ms = cutter_->held_up_ms;
    return ms > 0 ? HeldUp{ms, 1448} : inner_->path()->held_up();
  }

  std::unique_ptr<Channel> inner_;
  std::shared_ptr<Cutter> cutter_;
  const int peer_;
  bool broken_ = false;
  std::size_t swallowed_ = 0;
};

}  // namespace ringdp::testing
