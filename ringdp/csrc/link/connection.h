// Connection: shared by both halves of a Link: the identity of the two ends, the channel between them, and its state.
// An error that ends it is thrown and names the peer. The base of a Link. Used by the thread that drives the engine.
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

// A rank's identity, from its record in the store.
struct PeerInfo {
  int rank = -1;
  std::string host;
  int64_t pid = -1;

  std::string text() const;                     // "rank 3 (host node7, pid 4711)"
  void fill_self(ErrorContext& context) const;  // rank, host: of this rank, which raises
  void fill_peer(ErrorContext& context) const;  // peer, peer_host, peer_pid: of the other end
};

// The connection has ended without a goodbye: the peer has died, or the network has failed.
class ConnectionBroken final : public Error {
 public:
  using Error::Error;

  // The channel accepts no more bytes; bytes of the peer may still come.
  bool still_read() const { return still_read_; }
  // Bytes that came were not as the peer's end had sent them, and were discarded.
  bool tampered() const { return tampered_; }
  ConnectionBroken by_tampering() const {
    ConnectionBroken it = *this;
    it.tampered_ = true;
    return it;
  }
  ConnectionBroken for_sending() const {
    ConnectionBroken it = *this;
    it.still_read_ = true;
    return it;
  }

 private:
  bool still_read_ = false;
  bool tampered_ = false;
};

class Connection {
 public:
  Connection(PeerInfo self, PeerInfo peer);
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  const PeerInfo& self() const { return self_; }
  const PeerInfo& peer() const { return peer_; }

  bool connected() const { return channel_ != nullptr; }
  bool departed() const { return departed_; }
  bool broken() const { return broken_; }
  bool damaged() const { return damaged_; }  // corrupted bytes arrived: the rest is discarded unread
  bool usable() const { return !broken_ && !departed_ && !damaged_; }
  bool drained() const { return !connected() || channel_->drained(); }
  bool made_late() const { return late_; }  // after the rendezvous
  Channel& channel() const { return *channel_; }
  // Parts of the channel, if it has them; null without a channel.
  DirectReader* direct() const { return direct_; }
  NetworkPath* path() const { return path_; }

  // It has broken, or is being replaced: nothing is sent, but bytes in flight on the old channel are read.
  bool healing() const { return broken_at_.has_value(); }
  int64_t broken_for_ms() const;  // 0: it is not broken
  void hold();                    // from now on it heals
  void interrupt();               // and closes the old channel
  void open(std::unique_ptr<Channel> channel, bool late);

  void close();  // for good: it is broken, and its descriptor is closed
  void depart() {
    departed_ = true;
  }  // the peer said goodbye, or has read this rank's, or will never connect: nothing is read or sent any more

  // From now on a silent host of the peer is an error within about that time, if `check_host` is called at intervals.
  void watch_host(int64_t silence_ms);
  void check_host();
  int64_t host_silence_ms() const { return path_ != nullptr ? path_->host_silence_ms() : 0; }

  [[noreturn]] void fail(ErrorKind kind, const std::string& what, const std::string& advice) const;
  [[noreturn]] void fail_damaged(const std::string& what);
  // The channel has ended without a goodbye: throws ConnectionBroken, unless the peer's host has been silent for so
  // long that no other connection can be established. `error_number`: 0 if the stream ended in order.
  [[noreturn]] void fail_closed(int error_number) const;

 private:
  void destroy_channel();

  const PeerInfo self_;
  const PeerInfo peer_;
  std::unique_ptr<Channel> channel_;
  DirectReader* direct_ = nullptr;  // these are kept because the driver asks for them all the time
  NetworkPath* path_ = nullptr;
  bool late_ = false;
  bool departed_ = false;
  bool broken_ = false;
  bool damaged_ = false;
  std::optional<Clock::time_point> broken_at_;
  int64_t silence_ms_ = 0;  // the limit of the host's silence; 0: none
};

}  // namespace ringdp
