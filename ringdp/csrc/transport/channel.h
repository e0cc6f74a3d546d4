// Channel: an ordered byte stream to one peer that never blocks. A new transport implements this and nothing else.
// Used by the thread that drives the engine, one at a time. Owns its descriptor or segment.
//
// It is read in one of two ways: `receive` copies what has come; a transport whose bytes are in this process's memory
// already is `direct` and shows them (`peek`) until they are used up (`consume`).
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

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

class Channel {
 public:
  // Of a direct channel: where a frame begins in memory if all before it were padded to this, too.
  static constexpr std::size_t kDirectAlignment = 64;

  virtual ~Channel() = default;

  virtual IoResult send(std::span<const iovec> pieces) = 0;
  // What the last `send` would have blocked on is not the descriptor but time: polling for room is of no use.
  virtual bool held_back() const { return false; }

  virtual bool direct() const { return false; }
  virtual IoResult receive(std::span<const iovec> pieces) = 0;  // unless direct
  // These two: only if direct. All bytes that wait, contiguous, valid until `consume`; none: `status` says why.
  virtual IoStatus peek(std::span<const std::byte>& bytes) {
    bytes = {};
    return IoStatus::kWouldBlock;
  }
  virtual void consume(std::size_t) {}

  virtual bool drained() const = 0;           // everything sent has reached the peer's host: closing now loses nothing
  virtual void close_send() = 0;              // no more bytes will be sent; the peer sees kClosed after the last one
  virtual int poll_fd() const = 0;            // for the Poller
  virtual int bell_fd() const { return -1; }  // a second one, if any: every write to it wakes, nobody reads it

  // A direct channel moves without its descriptor. Whoever sleeps on that says so before: true if from now on it turns
  // readable when bytes come (with `for_room`, also when room is made); false: something is there already, do not sleep.
  virtual bool before_sleep(bool /*for_room*/) { return true; }
  virtual void after_sleep() {}
  virtual void noticed() {}  // the descriptor was readable: look at it with the next `peek`

  // Whether the peer's host is there at all, whatever its process does; a transport inside one host has nothing to add.
  virtual void watch_host(int64_t) {
  }  // ask it while nothing moves: one that is gone breaks the channel in that many ms
  virtual int64_t host_silence_ms() { return 0; }  // how long it has owed an acknowledgement; 0: it owes none

  virtual std::string describe() const = 0;  // "tcp 10.0.0.1:41000 -> 10.0.0.2:29500"
};

}  // namespace ringdp
