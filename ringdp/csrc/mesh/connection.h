// Connection: what both halves of a Link share: who the two ends are, the channel between them, and how it stands. An
// error that ends it is thrown and names the peer. The base of a Link. Used by the thread that drives the engine.
// PeerInfo is a value type, any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "base/deadline.h"
#include "base/error.h"
#include "transport/channel.h"

namespace ringdp {

// Who a rank is, as it said in the store.
struct PeerInfo {
  int rank = -1;
  std::string host;
  int64_t pid = -1;

  std::string text() const;                     // "rank 3 (host node7, pid 4711)"
  void fill_self(ErrorContext& context) const;  // rank, host: of who raises
  void fill_peer(ErrorContext& context) const;  // peer, peer_host, peer_pid: of whom it is about
};

// The connection has ended without a goodbye: the peer may have died, or the network have failed it.
class ConnectionBroken final : public Error {
 public:
  using Error::Error;

  // It takes nothing more of this side's; what the peer sends may still come.
  bool still_read() const { return still_read_; }
  ConnectionBroken for_sending() const {
    ConnectionBroken it = *this;
    it.still_read_ = true;
    return it;
  }

 private:
  bool still_read_ = false;
};

class Connection {
 public:
  Connection(PeerInfo self, PeerInfo peer);
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  const PeerInfo& self() const { return self_; }
  const PeerInfo& peer() const { return peer_; }

  bool connected() const { return channel_ != nullptr; }
  bool direct() const { return direct_; }  // see Channel
  bool departed() const { return departed_; }
  bool broken() const { return broken_; }
  bool damaged() const { return damaged_; }  // bytes did not arrive as they were sent: the rest is discarded unread
  bool usable() const { return !broken_ && !departed_ && !damaged_; }
  bool drained() const { return !connected() || channel_->drained(); }
  bool made_late() const { return late_; }  // after the ranks met
  Channel& channel() const { return *channel_; }

  // It has broken, or another one is being made in its place: nothing is sent, but what is on its way on the old one
  // is read.
  bool healing() const { return broken_at_.has_value(); }
  int64_t broken_for_ms() const;  // 0: it is whole
  void hold();                    // it heals from now on
  void interrupt();               // and what was there is closed
  void open(std::unique_ptr<Channel> channel, bool late);

  void close();  // for good: it is broken, the descriptor goes
  void depart() {
    departed_ = true;
  }  // the peer said goodbye, or heard this rank's, or will never come: nothing is read or sent any more

  // From now on a peer whose host is gone is an error within about that time, if `check_host` is called now and then.
  void watch_host(int64_t silence_ms);
  void check_host();
  int64_t host_silence_ms() const { return connected() ? channel_->host_silence_ms() : 0; }

  [[noreturn]] void fail(ErrorKind kind, const std::string& what, const std::string& advice) const;
  [[noreturn]] void fail_damaged(const std::string& what);
  // The channel has ended without a goodbye: ConnectionBroken, unless the peer's host has been silent for so long that
  // another one would not come about. `error_number`: 0 where it ended in good order.
  [[noreturn]] void fail_closed(int error_number) const;

 private:
  const PeerInfo self_;
  const PeerInfo peer_;
  std::unique_ptr<Channel> channel_;
  bool direct_ = false;
  bool late_ = false;
  bool departed_ = false;
  bool broken_ = false;
  bool damaged_ = false;
  std::optional<Clock::time_point> broken_at_;
  int64_t silence_ms_ = 0;  // for which the peer's host may be silent; 0: any
};

}  // namespace ringdp
