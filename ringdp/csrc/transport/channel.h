// Channel: an ordered byte stream to one peer that never blocks. A transport implements this and a Transport
// (transport.h). Used by the thread that drives the engine, one at a time. Owns its descriptor or segment.
//
// It is read in one of two ways: `receive` copies what has come; a transport whose bytes are in this process's memory
// already is `direct` and shows them (`peek`) until they are used up (`consume`).
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "base/fd.h"

namespace ringdp {

enum class IoStatus {
  kOk,          // `bytes` were moved (fewer than offered is normal)
  kWouldBlock,  // nothing moved; poll the descriptor
  kClosed,      // the peer ended the stream
  kBroken       // `error_number` says why
};

struct IoResult {
  IoStatus status = IoStatus::kOk;
  std::size_t bytes = 0;
  int error_number = 0;
};

// What a user can do where packets of the size that the hosts send do not arrive.
inline constexpr const char* kLargePacketsAdvice =
    "give the interfaces of these hosts and everything between them the same MTU (ip link set dev NAME mtu BYTES, as "
    "small "
    "as the smallest of them), or let Linux find the size: sysctl -w net.ipv4.tcp_mtu_probing=1 on every host";

class Channel {
 public:
  // Of a direct channel: where a frame begins in memory if all before it were padded to this, too.
  static constexpr std::size_t kDirectAlignment = 64;
  // How much fills a payload up to that.
  static constexpr std::size_t padding_of(std::size_t payload) {
    return (kDirectAlignment - payload % kDirectAlignment) % kDirectAlignment;
  }

  virtual ~Channel() = default;

  virtual IoResult send(std::span<const iovec> pieces) = 0;
  // What the last `send` would have blocked on is not the descriptor but time: polling for room is of no use.
  virtual bool held_back() const { return false; }

  // From now on no more than about so many bytes wait in the system unsent: what is sent next is not far behind.
  virtual void limit_unsent(std::size_t) {}

  virtual bool direct() const { return false; }
  virtual IoResult receive(std::span<const iovec> pieces) = 0;  // unless direct
  // These two: only if direct. All bytes that wait, contiguous, valid until `consume`; none: `status` says why.
  virtual IoStatus peek(std::span<const std::byte>& bytes) {
    bytes = {};
    return IoStatus::kWouldBlock;
  }
  virtual void consume(std::size_t) {}

  // A further socket to the peer, of a channel that was opened with a place for it (Transport::open).
  virtual void add_stream(Fd) {}

  // Of what was sent: how many bytes may not have come to the peer's host, and are lost if the channel breaks now.
  virtual std::size_t undelivered() { return 0; }
  virtual bool drained() = 0;                 // everything sent has reached the peer's host: closing now loses nothing
  virtual void close_send() = 0;              // no more bytes will be sent; the peer sees kClosed after the last one
  virtual int poll_fd() const = 0;            // for the Poller; readable may mean room, too
  virtual int bell_fd() const { return -1; }  // a second one, if any: every write to it wakes, and none is read

  // A direct channel moves without its descriptor. A thread that sleeps on that says so before: true if from now on it
  // turns readable when bytes come (with `for_room`, also when room is made); false: something is there already, do
  // not sleep.
  virtual bool before_sleep(bool /*for_room*/) { return true; }
  virtual void after_sleep() {}
  virtual void noticed() {}  // the descriptor was readable: look at it with the next `peek`, or for room

  // Whether the peer's host is there at all, whatever its process does; a transport inside one host has nothing to add.
  virtual void watch_host(int64_t) {
  }  // ask it while nothing moves: one that is gone breaks the channel in that many ms
  virtual int64_t host_silence_ms() { return 0; }  // how long it has owed an acknowledgement; 0: it owes none

  // Bytes under way of which nothing arrives, though the peer's host answers: for how long, and how large their
  // packets are at most.
  struct HeldUp {
    int64_t ms = 0;  // 0: nothing is
    std::size_t packet_bytes = 0;
  };
  virtual HeldUp held_up() { return {}; }

  // What the path has carried to the peer so far, where the kernel counts that.
  struct Carried {
    uint64_t bytes = 0;   // that have arrived
    int64_t busy_us = 0;  // while there was something to carry, but for when the peer had no room
    int64_t round_trip_us = 0;
    int64_t least_round_trip_us = 0;
    int64_t idle_ms = 0;       // since it was last given something
    uint64_t bytes_per_s = 0;  // lately, at its best
  };
  virtual std::optional<Carried> carried() const { return std::nullopt; }

  // A setting of the system that makes it slow, and the value that would help; empty: none that is known.
  virtual std::string slowed_by() const { return ""; }

  virtual std::string describe() const = 0;  // "tcp 10.0.0.1:41000 -> 10.0.0.2:29500"
};

}  // namespace ringdp
