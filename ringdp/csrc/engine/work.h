// Work: the handle of an operation in flight. Made by Engine::submit; shared by the caller that issued the operation
// and by the engine until it is done. Any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>

namespace ringdp {

class Work {
 public:
  Work(uint64_t group, uint64_t sequence, int lane, std::string text, std::function<void(std::exception_ptr)> on_done)
      : group_(group), sequence_(sequence), lane_(lane), text_(std::move(text)), on_done_(std::move(on_done)) {}

  bool finished() const { return state_.load(std::memory_order_acquire) != kRunning; }
  bool failed() const { return state_.load(std::memory_order_acquire) == kFailed; }
  // Null unless failed. Only after `finished`.
  std::exception_ptr error() const { return failed() ? error_ : nullptr; }

  uint64_t group() const { return group_; }
  // Of a message: provisional until its other end is known.
  uint64_t sequence() const { return sequence_.load(std::memory_order_acquire); }
  int source() const {
    return source_.load(std::memory_order_acquire);
  }  // of a received message: its sender, once known
  int lane() const { return lane_; }  // of the CompletionQueue on which `on_done` runs
  const std::string& text() const { return text_; }

 private:
  friend class Engine;
  friend class MessageMatching;
  friend class Progress;
  static constexpr int kRunning = 0, kDone = 1, kFailed = 2;

  void finish(std::exception_ptr error, std::shared_ptr<void> buffers) {
    error_ = std::move(error);
    buffers_ = std::move(buffers);
    state_.store(error_ ? kFailed : kDone, std::memory_order_release);
  }

  const uint64_t group_;
  std::atomic<uint64_t> sequence_;
  std::atomic<int> source_{-1};
  const int lane_;
  const std::string text_;
  std::function<void(std::exception_ptr)> on_done_;  // run once on the completion thread, in operation order
  std::exception_ptr error_;
  std::shared_ptr<void>
      buffers_;  // once finished, without `on_done`: the waiting thread drops them, holding the engine's lock
  std::atomic<int> state_{kRunning};
};

}  // namespace ringdp
