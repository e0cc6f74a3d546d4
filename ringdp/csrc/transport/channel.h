// Channel: an ordered byte stream to one peer that never blocks. A transport implements this and a Transport
// (transport.h). Used by the thread that drives the engine, one at a time. Owns its descriptor or segment.
//
// It is read in one of two ways: `receive` copies bytes that have come; a transport whose bytes are in this process's
// memory already has a DirectReader in place of it. A channel through a network has a NetworkPath: what is known of
// the way to the peer's host. Both are parts of the channel, and live as long as it does.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "base/fd.h"

namespace ringdp {

enum class IoStatus {
  kOk,          // `bytes` were moved (fewer than offered is normal)
  kWouldBlock,  // nothing moved; poll the descriptor
  kHeldBack,    // nothing was sent: the rate limiter refused. Retry after a delay; do not poll
  kClosed,      // the peer ended the stream
  kBroken       // `error_number` says why
};

struct IoResult {
  IoStatus status = IoStatus::kOk;
  std::size_t bytes = 0;
  int error_number = 0;
};

// Bytes of such a channel come without its descriptor.
class DirectReader {
 public:
  // The alignment in memory of a frame, if all frames before it are padded to this.
  static constexpr std::size_t kAlignment = 64;
  // The padding of a payload up to that.
  static constexpr std::size_t padding_of(std::size_t payload) {
    return (kAlignment - payload % kAlignment) % kAlignment;
  }

  // All unread bytes, contiguous, valid until `consume`, which releases them; if there are none, the status is the
  // reason.
  virtual IoStatus peek(std::span<const std::byte>& bytes) = 0;
  virtual void consume(std::size_t bytes) = 0;

  // Called before a thread sleeps on the descriptor: true if it turns readable from now on when bytes come (with
  // `for_room`, also when there is room); false if there are bytes already: do not sleep.
  virtual bool before_sleep(bool for_room) = 0;
  virtual void after_sleep() = 0;
  virtual void noticed() = 0;  // the descriptor was readable: the next `peek` or `send` reads it

  virtual int bell_fd() const = 0;  // a second descriptor, which only wakes: it is never read

 protected:
  ~DirectReader() = default;
};

class NetworkPath {
 public:
  // From now on at most about so many bytes are queued unsent in the kernel, so that later bytes are not delayed.
  virtual void limit_unsent(std::size_t /*bytes*/) {}
  // How many sent bytes may not have reached the peer's host: lost if the channel breaks now.
  virtual std::size_t undelivered() { return 0; }
  // Adds a socket to the peer, in place of an empty one of Transport::open.
  virtual void add_stream(Fd) {}

  // The liveness of the peer's host, not of its process: probes it while the channel is idle; a dead one breaks the
  // channel in that many ms.
  virtual void watch_host(int64_t /*silence_ms*/) {}
  virtual int64_t host_silence_ms() { return 0; }  // for how long an acknowledgement is overdue; 0: none is

  // Bytes in flight do not arrive, though the peer's host answers: for how long, and the largest size of their
  // packets.
  struct HeldUp {
    int64_t ms = 0;  // 0: nothing is
    std::size_t packet_bytes = 0;
  };
  virtual HeldUp held_up() { return {}; }

  // What the path has carried to the peer so far, where the kernel counts that.
  struct Carried {
    uint64_t bytes = 0;   // that have arrived
    int64_t busy_us = 0;  // while there were bytes to carry and the peer had room
    int64_t round_trip_us = 0;
    int64_t least_round_trip_us = 0;
    int64_t idle_ms = 0;       // since the last send
    uint64_t bytes_per_s = 0;  // the highest rate lately
  };
  virtual std::optional<Carried> carried() const { return std::nullopt; }

  // A system setting that makes it slow, and a better value; empty: none is known.
  virtual std::string slowed_by() const { return ""; }

 protected:
  ~NetworkPath() = default;
};

// The way of a channel over another one is that of the other one, but for what it changes.
class PathBelow : public NetworkPath {
 public:
  void limit_unsent(std::size_t bytes) override { below_.limit_unsent(bytes); }
  std::size_t undelivered() override { return below_.undelivered(); }
  void add_stream(Fd socket) override { below_.add_stream(std::move(socket)); }
  void watch_host(int64_t silence_ms) override { below_.watch_host(silence_ms); }
  int64_t host_silence_ms() override { return below_.host_silence_ms(); }
  HeldUp held_up() override { return below_.held_up(); }
  std::optional<Carried> carried() const override { return below_.carried(); }
  std::string slowed_by() const override { return below_.slowed_by(); }

 protected:
  explicit PathBelow(NetworkPath& below) : below_(below) {}
  ~PathBelow() = default;

 private:
  NetworkPath& below_;
};

class Channel {
 public:
  virtual ~Channel() = default;

  virtual IoResult send(std::span<const iovec> pieces) = 0;
  virtual IoResult receive(std::span<const iovec> pieces) = 0;  // unless direct
  virtual bool drained() = 0;                // all sent bytes have reached the peer's host: closing now loses none
  virtual void close_send() = 0;             // no more bytes will be sent; the peer sees kClosed after the last one
  virtual int poll_fd() const = 0;           // for the Poller; readable may also mean room to send
  virtual std::string describe() const = 0;  // "tcp 10.0.0.1:41000 -> 10.0.0.2:29500"
  // Of kBroken: what was wrong with the peer's bytes (EBADMSG), or with its identity (EKEYREJECTED). Else empty.
  virtual std::string why_ended() const { return ""; }

  virtual DirectReader* direct() { return nullptr; }  // null: a stream, for `receive`
  virtual NetworkPath* path() { return nullptr; }     // null: inside a host
};

}  // namespace ringdp
