// Staging: the device memory of one operation, and its mirror in this process's memory, with which the operation
// works. Its input arrives piece by piece, and its results are copied back piece by piece as they become final.
//
// Owned by the operation and its Work together. Made and filled by the thread that calls the collective, which thereby
// queues the copies of the input; then used by the thread that drives the engine. `landed` and `queue` are for any
// thread once the operation is over. It does not own memory: the operation's buffers (Submission::keep_alive) own
// mirrors and tensors, and the engine keeps both and this until all copies have ended, also where the operation fails
// (engine/staged_copies.h).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "device/copy_queue.h"

namespace ringdp {

class Staging {
 public:
  static constexpr std::size_t kPieceBytes = 1024 * 1024;  // a copy's least length, if there is more than that
  static constexpr std::size_t kPieces = 16;               // of one mirror at most: each costs a few microseconds

  explicit Staging(std::unique_ptr<CopyQueue> queue) : queue_(std::move(queue)) {}

  // `host` stands for as many bytes at `device`. With `reads` they are copied there now; with `writes` they are copied
  // back.
  void mirror(std::span<std::byte> host, std::byte* device, bool reads, bool writes);
  void at_end(std::function<void()> work) { at_end_.push_back(std::move(work)); }  // on the device, after the results

  // Called by the driver from here on.

  bool poll();  // asks the device; true if more has come
  // How many bytes of `memory`, from its start, had arrived at the last `poll`; all if it does not mirror input.
  std::size_t there(std::span<const std::byte> memory) const;
  bool all_there() const { return come_ == arrivals_.size(); }
  uint64_t bytes_there() const { return bytes_there_; }
  uint64_t bytes_expected() const { return bytes_expected_; }

  // These bytes are final results. They may lie outside all mirrors. Without this call `finish` copies them.
  void final(std::span<const std::byte> memory);
  // The operation is complete: copies back the rest.
  void finish();

  const std::byte* device_address(const std::byte* host) const;  // of a byte of a mirror; null for others

  bool landed();  // no copy is under way: the owners may use all memory again
  CopyQueue& queue() { return *queue_; }

 private:
  struct Piece {
    std::size_t final_bytes = 0;
    bool copied = false;
    bool late = false;  // reported again after that: an error of ours, repaired at the end
  };
  struct Mirror {
    std::span<std::byte> host;
    std::byte* device;
    bool reads;
    std::size_t there;          // from the start
    std::size_t piece_bytes;    // of all but the last
    std::vector<Piece> pieces;  // of the result; none if it is not written
  };
  struct Arrival {
    std::size_t mirror;
    std::size_t upto;
    CopyQueue::Ticket ticket;
  };

  const Mirror* find(const std::byte* address) const;
  // A result may overwrite input on the device. Its own input has arrived when it is final; this waits for that of
  // others.
  bool may_go_back(const Mirror& mirror) const { return mirror.reads || all_there(); }
  void copy_back(Mirror& mirror, std::size_t begin, std::size_t end);  // pieces

  std::unique_ptr<CopyQueue> queue_;
  std::vector<Mirror> mirrors_;
  std::vector<Arrival> arrivals_;
  std::size_t come_ = 0;  // arrivals that have ended, as have all before them
  uint64_t bytes_there_ = 0;
  uint64_t bytes_expected_ = 0;
  std::vector<std::function<void()>> at_end_;
  std::vector<CopyQueue::Ticket> results_;
};

}  // namespace ringdp
