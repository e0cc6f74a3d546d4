// A Channel that behaves as badly as a lossless network may: short reads and writes, and "would block" although there
// was room, chosen by a seed. On demand it also flips a bit of what it receives. For tests. Used as any Channel is.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <random>

#include "transport/channel.h"

namespace ringdp {

class FaultyChannel final : public Channel, private DirectReader {
 public:
  // `flip_within` not 0: one bit of the first so many bytes that are received flips. Not for direct channels.
  FaultyChannel(std::unique_ptr<Channel> inner, uint64_t seed, uint64_t flip_within = 0)
      : inner_(std::move(inner)), random_(seed) {
    if (flip_within > 0) flip_bit_ = random_() % (8 * flip_within);
  }

  IoResult send(std::span<const iovec> pieces) override;
  IoResult receive(std::span<const iovec> pieces) override;
  bool drained() override { return inner_->drained(); }
  void close_send() override { inner_->close_send(); }
  int poll_fd() const override { return inner_->poll_fd(); }
  std::string describe() const override { return "faulty " + inner_->describe(); }
  std::string why_ended() const override { return inner_->why_ended(); }
  DirectReader* direct() override { return inner_->direct() != nullptr ? this : nullptr; }
  NetworkPath* path() override { return inner_->path(); }

 private:
  IoStatus peek(std::span<const std::byte>& bytes) override;
  void consume(std::size_t bytes) override { inner_->direct()->consume(bytes); }
  bool before_sleep(bool) override { return false; }  // what it refused a moment ago may be there: never sleep long
  void after_sleep() override { inner_->direct()->after_sleep(); }
  void noticed() override { inner_->direct()->noticed(); }
  int bell_fd() const override { return inner_->direct()->bell_fd(); }

  bool refuses() { return random_() % 4 == 0; }
  std::size_t some() { return random_() % 3 == 0 ? 1 + random_() % 200 : 1 + random_() % 100'000; }

  void flip(std::span<const iovec> pieces, std::size_t received);

  std::unique_ptr<Channel> inner_;
  std::mt19937_64 random_;
  std::optional<uint64_t> flip_bit_;  // counted from the next byte that is received
};

}  // namespace ringdp
