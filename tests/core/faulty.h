// A Channel that behaves as badly as a lossless network may: short reads and writes, and "would block" although there
// was room, chosen by a seed. On demand it also flips a bit of what it receives. For tests. Used as any Channel is.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <random>

#include "transport/channel.h"

namespace ringdp {

class FaultyChannel final : public Channel {
 public:
  // `flip_within` not 0: one bit of the first so many bytes that are received flips. Not for direct channels.
  FaultyChannel(std::unique_ptr<Channel> inner, uint64_t seed, uint64_t flip_within = 0)
      : inner_(std::move(inner)), random_(seed) {
    if (flip_within > 0) flip_bit_ = random_() % (8 * flip_within);
  }

  IoResult send(std::span<const iovec> pieces) override;
  bool direct() const override { return inner_->direct(); }
  IoResult receive(std::span<const iovec> pieces) override;
  IoStatus peek(std::span<const std::byte>& bytes) override;
  void consume(std::size_t bytes) override { inner_->consume(bytes); }
  std::size_t undelivered() override { return inner_->undelivered(); }
  void add_stream(Fd socket) override { inner_->add_stream(std::move(socket)); }
  bool drained() override { return inner_->drained(); }
  void close_send() override { inner_->close_send(); }
  void limit_unsent(std::size_t bytes) override { inner_->limit_unsent(bytes); }
  int poll_fd() const override { return inner_->poll_fd(); }
  int bell_fd() const override { return inner_->bell_fd(); }
  bool before_sleep(bool) override { return false; }  // what it refused a moment ago may be there: never sleep long
  void after_sleep() override { inner_->after_sleep(); }
  void noticed() override { inner_->noticed(); }
  void watch_host(int64_t silence_ms) override { inner_->watch_host(silence_ms); }
  int64_t host_silence_ms() override { return inner_->host_silence_ms(); }
  HeldUp held_up() override { return inner_->held_up(); }
  std::optional<Carried> carried() const override { return inner_->carried(); }
  std::string slowed_by() const override { return inner_->slowed_by(); }
  std::string describe() const override { return "faulty " + inner_->describe(); }

 private:
  bool refuses() { return random_() % 4 == 0; }
  std::size_t some() { return random_() % 3 == 0 ? 1 + random_() % 200 : 1 + random_() % 100'000; }

  void flip(std::span<const iovec> pieces, std::size_t received);

  std::unique_ptr<Channel> inner_;
  std::mt19937_64 random_;
  std::optional<uint64_t> flip_bit_;  // counted from the next byte that is received
};

}  // namespace ringdp
