#include "mesh/shared_message.h"

#include <algorithm>
#include <cstring>

#include "base/bytes.h"
#include "base/text.h"

namespace ringdp {
namespace {

constexpr std::array<char, 8> kMagic{'R', 'I', 'N', 'G', 'D', 'P', 'S', 'M'};
constexpr std::size_t kReasonAt = 56;
constexpr int64_t kLongestRoundTripUs = 60'000'000;

}  // namespace

SharedBytes SharedMessage::encode() const {
  SharedBytes raw{};
  std::memcpy(raw.data(), kMagic.data(), kMagic.size());
  put(&raw[8], static_cast<uint32_t>(type));
  put(&raw[16], ring_bytes);
  if (type == SharedType::kReady || type == SharedType::kAllReady)
    put(&raw[24], round_trip_us);
  else
    std::copy(name.begin(), name.end(), raw.begin() + 24);
  std::copy(token.begin(), token.end(), raw.begin() + 40);
  std::string text = clean_text(reason, kSharedMessageBytes - kReasonAt);
  std::memcpy(&raw[kReasonAt], text.data(), text.size());
  return raw;
}

std::optional<SharedMessage> SharedMessage::decode(const SharedBytes& raw) {
  SharedMessage out;
  auto type = take<uint32_t>(&raw[8]);
  if (std::memcmp(raw.data(), kMagic.data(), kMagic.size()) != 0 || type < 1 ||
      type > static_cast<uint32_t>(SharedType::kGaveUp))
    return std::nullopt;
  out.type = static_cast<SharedType>(type);
  out.ring_bytes = take<uint64_t>(&raw[16]);
  out.round_trip_us = std::clamp<int64_t>(take<int64_t>(&raw[24]), 0, kLongestRoundTripUs);
  std::copy_n(raw.begin() + 24, out.name.size(), out.name.begin());
  std::copy_n(raw.begin() + 40, out.token.size(), out.token.begin());
  std::string_view text = text_of(std::span(raw).subspan(kReasonAt));
  out.reason = clean_text(text.substr(0, text.find('\0')), kSharedMessageBytes - kReasonAt);
  return out;
}

SharedMessage GivenUp::message() const {
  SharedMessage out;
  out.type = SharedType::kGaveUp;
  out.ring_bytes = static_cast<uint64_t>(kind) | static_cast<uint64_t>(peer + 1) << 8;
  out.reason = text;
  return out;
}

std::optional<GivenUp> GivenUp::from(const SharedMessage& message) {
  if (message.type != SharedType::kGaveUp) return std::nullopt;
  GivenUp out;
  const auto kind = static_cast<ErrorKind>(message.ring_bytes & 0xff);
  if (kind == ErrorKind::kPeerLost || kind == ErrorKind::kTimeout) out.kind = kind;
  out.peer = static_cast<int>(message.ring_bytes >> 8 & 0xffffff) - 1;
  out.text = message.reason;
  return out;
}

}  // namespace ringdp
