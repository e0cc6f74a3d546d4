// CopyQueue: copies between a device's memory and this process's, under way while the host goes on. One per operation.
// torch/device_copies.h carries them out on a device's streams, slow_device.h stands in for one in tests.
//
// What queues returns at once; one thread at a time calls it: the one that calls the collective, then the one that drives the
// engine, which also asks `done`. Once the operation is over the rest, `done` too, is for any thread.
// Copies of one queue may be carried out in any order, but those that touch the same memory in that of the calls; another
// operation's queue knows nothing of them.
// Whoever queues a copy keeps both memories until `done`: until then nobody may read what a copy writes, or write what one
// reads or writes.
#pragma once

#include <cstddef>
#include <functional>

namespace ringdp {

class CopyQueue {
 public:
  using Ticket = std::size_t;

  virtual ~CopyQueue() = default;

  // What is queued from now on comes after what this thread has queued on its current stream so far.
  virtual void after_caller() = 0;
  virtual Ticket to_host(std::byte* host, const std::byte* device, std::size_t bytes) = 0;
  virtual Ticket to_device(std::byte* device, const std::byte* host, std::size_t bytes) = 0;
  // Work on the device, after everything that was queued here before.
  virtual Ticket follow(std::function<void()> work) = 0;
  virtual bool done(Ticket ticket) = 0;  // throws what went wrong on the device

  // Calls `what` now, on this thread; what that does on the device comes after everything queued here. Where there are no
  // streams to order, this thread waits.
  virtual void after_all(const std::function<void()>& what) = 0;
  // The same for all that this thread does on its current stream from now on.
  virtual void order_caller() = 0;
  virtual void wait() = 0;  // until everything that was queued here is done
};

}  // namespace ringdp
