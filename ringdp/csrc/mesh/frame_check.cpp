#include "mesh/frame_check.h"

#include "base/bytes.h"

namespace ringdp {
namespace {

constexpr std::size_t kPayloadAt = kFrameHeaderBytes,
                      kHeadAt = kPayloadAt + 4;  // the first of the payload, the second of all before it

}  // namespace

void FrameCheck::write_head(const FrameHeader& header, std::span<const std::byte> payload, std::byte* out) const {
  header.encode(std::span<std::byte, kFrameHeaderBytes>(out, kFrameHeaderBytes));
  if (!on_) return;
  put(out + kPayloadAt, crc32c(payload));
  put(out + kHeadAt, crc32c({out, kHeadAt}));
}

bool FrameCheck::accept_head(const std::byte* head) {
  if (!on_) return true;
  sent_ = take<uint32_t>(head + kPayloadAt);
  found_ = 0;
  return take<uint32_t>(head + kHeadAt) == crc32c({head, kHeadAt});
}

}  // namespace ringdp
