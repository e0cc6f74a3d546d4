// A CountedChannel is a Channel over a Channel whose ends tell each other how many bytes they have received: over TLS,
// where a damaged record is found behind the kernel's acknowledgements, and where connections may be relayed, whose
// bytes a launcher's host acknowledges. So after a break both ends know what must be sent again. Bytes go in messages
// of at most 128 KiB, each with a head (docs/reference/wire_format.md). Used as any channel; owns the one below, which
// is no DirectReader.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "transport/channel.h"

namespace ringdp {

// Invariant: what is left of a head goes before what is left of its message, and that before the next head.
class CountedChannel final : public Channel, private PathBelow {
 public:
  explicit CountedChannel(std::unique_ptr<Channel> inner) : PathBelow(*inner->path()), inner_(std::move(inner)) {}

  IoResult send(std::span<const iovec> pieces) override;
  IoResult receive(std::span<const iovec> pieces) override;
  bool drained() override { return inner_->drained(); }
  void close_send() override;
  int poll_fd() const override { return inner_->poll_fd(); }
  std::string describe() const override { return inner_->describe(); }
  std::string why_ended() const override { return wrong_ ? kWrong : inner_->why_ended(); }
  NetworkPath* path() override { return this; }

 private:
  static constexpr std::size_t kHeadBytes = 12;
  static constexpr const char* kWrong = "a message that no rank sends";

  std::size_t undelivered() override { return static_cast<std::size_t>(sent_ - arrived_); }

  void begin_message(std::size_t bytes);
  IoResult send_on(std::span<const iovec> pieces);  // `bytes` are of the pieces
  void take_head();
  void tell();

  const std::unique_ptr<Channel> inner_;
  std::vector<iovec> parts_;

  std::array<std::byte, kHeadBytes> head_out_{};
  std::size_t head_left_ = 0;     // of it, to send
  std::size_t message_left_ = 0;  // bytes that belong to that head
  uint64_t sent_ = 0;
  uint64_t arrived_ = 0;  // of those, the peer has told
  bool closing_ = false;

  std::array<std::byte, kHeadBytes> head_in_{};
  std::size_t head_filled_ = 0;
  std::size_t payload_left_ = 0;
  uint64_t received_ = 0;
  uint64_t told_ = 0;  // of those, this side has told the peer
  bool wrong_ = false;
};

}  // namespace ringdp
