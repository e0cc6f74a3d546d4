// FrameCheck: the checksums of the frames on one connection (docs/reference/wire_format.md, "Checksums"). A header has
// one of its own, which is compared before any field of it is used, so that no rank waits for the bytes of a damaged
// length. On a connection without checksums it adds no byte and computes nothing. Owned by a Link; used by the thread
// that drives the engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/crc32c.h"
#include "mesh/frame.h"

namespace ringdp {

inline constexpr std::size_t kFrameCheckBytes = 8;

class FrameCheck {
 public:
  explicit FrameCheck(bool on) : on_(on) {}

  bool on() const { return on_; }
  std::size_t head_bytes() const { return kFrameHeaderBytes + (on_ ? kFrameCheckBytes : 0); }

  // Sending: `head_bytes()` at `out`.
  void write_head(const FrameHeader& header, std::span<const std::byte> payload, std::byte* out) const;

  // Receiving: false if the `head_bytes()` at `head` are corrupted. Then its payload, part by part.
  bool accept_head(const std::byte* head);
  void add(std::span<const std::byte> part) {
    if (on_) found_ = crc32c(part, found_);
  }
  bool payload_is_whole() const { return found_ == sent_; }

 private:
  bool on_;
  uint32_t sent_ = 0;   // the payload's, as its header has it
  uint32_t found_ = 0;  // of the bytes of it that have come
};

}  // namespace ringdp
