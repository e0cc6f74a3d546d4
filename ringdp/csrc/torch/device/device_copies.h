// DeviceCopies: a CopyQueue on two streams of a device, one for each direction, which the operations of a process
// group share: copies in the order of the calls, beside the streams on which the caller computes. An event after each
// copy marks its end. For any device with torch streams; no CUDA header. Threads: see CopyQueue. Every call, the
// destruction of events too, makes the device current, and restores the one before: otherwise CUDA would open a
// context on device 0 for threads that never chose a device.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <deque>
#include <optional>

#include "device/copy_queue.h"

namespace ringdp {

struct SideStreams {
  c10::Stream in;   // to the host
  c10::Stream out;  // back
};

class DeviceCopies final : public CopyQueue {
 public:
  explicit DeviceCopies(SideStreams streams) : streams_(streams), called_(streams.in.device_type()) {}
  ~DeviceCopies() override;

  void after_caller() override;
  Ticket to_host(std::byte* host, const std::byte* device, std::size_t bytes) override;
  Ticket to_device(std::byte* device, const std::byte* host, std::size_t bytes) override;
  Ticket follow(std::function<void()> work) override;
  bool done(Ticket ticket) override;
  void after_all(const std::function<void()>& what) override;
  void order_caller() override;
  void wait() override;

 private:
  void order_results();
  Ticket record(c10::Stream stream);

  const SideStreams streams_;
  std::optional<c10::Event> called_;  // on the caller's stream, when it called
  bool results_ordered_ = false;      // after `called_`
  std::deque<c10::Event> events_;     // by ticket
};

}  // namespace ringdp
