// The channel of a rank that may die: from then on no bytes pass, no goodbye either, and both ends see it closed. It
// is used by the thread that drives; a test's thread sets which of the two ranks is dead.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "transport/channel.h"

namespace ringdp::testing {

class DeadChannel final : public Channel {
 public:
  DeadChannel(std::unique_ptr<Channel> inner, const std::atomic<bool>& mine, const std::atomic<bool>& theirs)
      : inner_(std::move(inner)), mine_(mine), theirs_(theirs) {}

  IoResult send(std::span<const iovec> pieces) override {
    if (mine_ || theirs_) return {IoStatus::kClosed, 0, 0};
    return inner_->send(pieces);
  }
  IoResult receive(std::span<const iovec> pieces) override {
    if (mine_ || theirs_) return {IoStatus::kClosed, 0, 0};
    return inner_->receive(pieces);
  }
  bool drained() override { return mine_ || theirs_ || inner_->drained(); }
  void close_send() override {
    if (!mine_ && !theirs_) inner_->close_send();
  }
  int poll_fd() const override { return inner_->poll_fd(); }
  std::string describe() const override { return "cut " + inner_->describe(); }

 private:
  std::unique_ptr<Channel> inner_;
  const std::atomic<bool>& mine_;
  const std::atomic<bool>& theirs_;
};

}  // namespace ringdp::testing
