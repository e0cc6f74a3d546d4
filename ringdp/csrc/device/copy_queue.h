// CopyQueue: copies between a device's memory and this process's, under way while the host goes on. One per operation.
// torch/device/device_copies.h carries them out on a device's streams; tests/core has a device for tests.
//
// Owned by an operation's Staging. Calls that queue return at once; one thread at a time makes them: the thread that
// calls the collective, then the one that drives the engine, which also asks `done`. Once the operation is over, the
// other calls and `done` are for any thread. The copies of one queue may run in any order, but copies that touch the
// same memory run in the order of the calls. Queues of different operations are independent. The caller keeps both
// memories of a copy until `done`: until then no thread may read the bytes that a copy writes, or write those that it
// reads or writes.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

namespace ringdp {

class CopyQueue {
 public:
  using Ticket = std::size_t;

  virtual ~CopyQueue() = default;

  // Orders later copies of this queue after the work that this thread has queued on its current stream so far.
  virtual void after_caller() = 0;
  virtual Ticket to_host(std::byte* host, const std::byte* device, std::size_t bytes) = 0;
  virtual Ticket to_device(std::byte* device, const std::byte* host, std::size_t bytes) = 0;
  // Queues work on the device, after everything that was queued here before.
  virtual Ticket follow(std::function<void()> work) = 0;
  virtual bool done(Ticket ticket) = 0;  // throws an error of the device

  // Calls `what` now, on this thread; the work that it queues on the device runs after everything queued here. On a
  // device without streams this thread waits.
  virtual void after_all(const std::function<void()>& what) = 0;
  // The same for all later work of this thread on its current stream.
  virtual void order_caller() = 0;
  virtual void wait() = 0;  // until everything that was queued here is done
};

using MakeCopyQueue = std::function<std::unique_ptr<CopyQueue>()>;

}  // namespace ringdp
