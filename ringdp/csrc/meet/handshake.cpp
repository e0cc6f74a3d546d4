#include "meet/handshake.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "base/error.h"
#include "transport/tcp.h"

namespace ringdp {

namespace {

constexpr std::array<char, 8> kMagic{'R', 'I', 'N', 'G', 'D', 'P', '\r', '\n'};
constexpr std::size_t kSignedBytes = kHandshakeBytes - kSha256Bytes;

Digest mac_of(std::span<const std::byte> fields, std::span<const std::byte> secret,
              std::span<const std::byte> transcript) {
  std::vector<std::byte> covered(transcript.begin(), transcript.end());
  covered.insert(covered.end(), fields.begin(), fields.end());
  return hmac_sha256(secret, covered);
}

constexpr uint8_t kNoRoundTrip = 1;
constexpr uint8_t kLongestRoundTrip = 26;  // 2^26 us are 67 s

}  // namespace

uint8_t met_with(int64_t round_trip_us) {
  if (round_trip_us <= 0) return kNoRoundTrip;
  return static_cast<uint8_t>(kNoRoundTrip + std::bit_width(static_cast<uint64_t>(round_trip_us)));
}

int64_t round_trip_in(uint8_t met) {
  if (met <= kNoRoundTrip) return 0;
  return int64_t{1} << std::min<int>(met - kNoRoundTrip - 1, kLongestRoundTrip);
}

HandshakeMessage encode_handshake(const HandshakeFields& fields, std::span<const std::byte> secret,
                                  std::span<const std::byte> transcript) {
  HandshakeMessage message{};
  std::byte* at = message.data();
  std::memcpy(at, kMagic.data(), kMagic.size());
  put(at + 8, fields.version);
  put(at + 12, static_cast<uint32_t>(fields.type));
  std::memcpy(at + 16, fields.job.data(), kJobBytes);
  put(at + 32, fields.epoch);
  put(at + 36, fields.from);
  put(at + 40, fields.to);
  put(at + 44, fields.world);
  put(at + 48, static_cast<uint32_t>(fields.refusal));
  put(at + 52, fields.padding);
  std::memcpy(at + 56, fields.nonce.data(), kNonceBytes);
  put(at + 80, static_cast<uint8_t>(fields.stream));
  put(at + 81, static_cast<uint8_t>(fields.streams - 1));
  put(at + 82, static_cast<uint8_t>(fields.purpose));
  put(at + 83, fields.met);
  put(at + 84, static_cast<uint8_t>(fields.tls));
  put(at + 85, static_cast<uint8_t>(fields.turned));  // 86, 87: 0 so far
  put(at + 88, fields.number);
  Digest mac = mac_of(std::span(message).first(kSignedBytes), secret, transcript);
  std::memcpy(at + kSignedBytes, mac.data(), mac.size());
  return message;
}

std::optional<HandshakeFields> decode_handshake(const HandshakeMessage& message, std::span<const std::byte> secret,
                                                std::span<const std::byte> transcript) {
  const std::byte* at = message.data();
  if (std::memcmp(at, kMagic.data(), kMagic.size()) != 0) return std::nullopt;
  Digest mac = mac_of(std::span(message).first(kSignedBytes), secret, transcript);
  if (!equal_bytes(mac, std::span(message).subspan(kSignedBytes))) return std::nullopt;
  HandshakeFields fields;
  fields.version = take<uint32_t>(at + 8);
  fields.type = static_cast<HandshakeType>(take<uint32_t>(at + 12));
  std::memcpy(fields.job.data(), at + 16, kJobBytes);
  fields.epoch = take<uint32_t>(at + 32);
  fields.from = take<uint32_t>(at + 36);
  fields.to = take<uint32_t>(at + 40);
  fields.world = take<uint32_t>(at + 44);
  fields.refusal = static_cast<Refusal>(take<uint32_t>(at + 48));
  fields.padding = take<uint32_t>(at + 52);
  std::memcpy(fields.nonce.data(), at + 56, kNonceBytes);
  fields.stream = take<uint8_t>(at + 80);
  fields.streams = static_cast<uint16_t>(take<uint8_t>(at + 81) + 1);
  fields.purpose = static_cast<Purpose>(take<uint8_t>(at + 82));
  fields.met = take<uint8_t>(at + 83);
  fields.tls = static_cast<TlsMode>(take<uint8_t>(at + 84));
  fields.turned = take<uint8_t>(at + 85) != 0;
  fields.number = take<uint64_t>(at + 88);
  return fields;
}

Refusal judge_hello(const HandshakeFields& hello, const HandshakeFields& mine) {
  if (hello.version != mine.version) return Refusal::kVersion;
  if (hello.job != mine.job) return Refusal::kJob;
  if (hello.epoch != mine.epoch) return Refusal::kEpoch;
  if (hello.world != mine.world) return Refusal::kWorld;
  if (hello.to != mine.to || hello.from >= mine.world || hello.from == mine.to) return Refusal::kRank;
  if (hello.tls != mine.tls) return Refusal::kTls;
  return Refusal::kNone;
}

std::string refusal_text(Refusal refusal, const HandshakeFields& theirs, const HandshakeFields& mine) {
  auto both = [](const std::string& what, uint32_t they, uint32_t we) {
    return what + " differs: " + std::to_string(they) + " there, " + std::to_string(we) + " here";
  };
  switch (refusal) {
    case Refusal::kVersion:
      return both("the protocol version", theirs.version, mine.version);
    case Refusal::kJob:
      return "it belongs to another job (or an earlier start of this one)";
    case Refusal::kEpoch:
      return both("the restart count", theirs.epoch, mine.epoch);
    case Refusal::kWorld:
      return both("the world size", theirs.world, mine.world);
    case Refusal::kRank:
      return "the rank does not match: rank " + std::to_string(theirs.from) + " speaks to rank " +
             std::to_string(theirs.to) + ", rank " + std::to_string(mine.to) + " of " + std::to_string(mine.world) +
             " listens";
    case Refusal::kDuplicate:
      return "rank " + std::to_string(theirs.from) + " is connected already: two processes have the same rank";
    case Refusal::kGone:
      return "it closed this connection, or has left";
    case Refusal::kTls:
      return "RINGDP_TLS differs: " + tls_mode_text(theirs.tls) + " there, " + tls_mode_text(mine.tls) + " here";
    case Refusal::kNone:
      break;
  }
  return "it gave no reason";
}

HandshakeSocket::Read HandshakeSocket::received(ssize_t got) {
  if (got > 0) return Read::kDone;
  error_number_ = got == 0 ? 0 : errno;
  return got < 0 && (errno == EAGAIN || errno == EINTR) ? Read::kWaits : Read::kEnded;
}

HandshakeSocket::Read HandshakeSocket::read_message() {
  const ssize_t got = recv(socket_.get(), buffer_.data() + filled_, kHandshakeBytes - filled_, MSG_DONTWAIT);
  if (const Read how = received(got); how != Read::kDone) return how;
  filled_ += static_cast<std::size_t>(got);
  if (filled_ < kHandshakeBytes) return Read::kWaits;
  filled_ = 0;
  return Read::kDone;
}

HandshakeSocket::Read HandshakeSocket::read_padding() {
  if (padding_left_ == 0) return Read::kDone;
  std::array<std::byte, kMaxPaddingBytes> nothing;
  const ssize_t got = recv(socket_.get(), nothing.data(), padding_left_, MSG_DONTWAIT);
  if (const Read how = received(got); how != Read::kDone) return how;
  padding_left_ -= static_cast<std::size_t>(got);
  return padding_left_ == 0 ? Read::kDone : Read::kWaits;
}

std::optional<HandshakeFields> HandshakeSocket::decode(std::span<const std::byte> secret) const {
  return decode_handshake(buffer_, secret, transcript_);
}

void HandshakeSocket::add_to_transcript() { transcript_.insert(transcript_.end(), buffer_.begin(), buffer_.end()); }

Digest HandshakeSocket::key(std::span<const std::byte> secret) const {
  static constexpr std::string_view kLabel = "ringdp connection";
  const auto label = std::as_bytes(std::span(kLabel));
  std::vector<std::byte> text(label.begin(), label.end());
  text.insert(text.end(), transcript_.begin(), transcript_.end());
  return hmac_sha256(secret, text);
}

bool HandshakeSocket::announced(std::size_t bytes) {
  if (bytes > kMaxPaddingBytes) return false;
  padding_ = padding_left_ = bytes;
  return true;
}

bool HandshakeSocket::send(const HandshakeFields& fields, std::span<const std::byte> secret) {
  const HandshakeMessage message = encode_handshake(fields, secret, transcript_);
  transcript_.insert(transcript_.end(), message.begin(), message.end());
  // They always fit into a fresh socket's buffer. The padding is sent separately: the message must arrive even where
  // the padding does not.
  static constexpr std::array<std::byte, kMaxPaddingBytes> kPadding{};
  for (std::span<const std::byte> bytes :
       {std::span<const std::byte>(message), std::span(kPadding).first(fields.padding)}) {
    if (bytes.empty()) continue;
    const ssize_t sent = ::send(socket_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent == static_cast<ssize_t>(bytes.size())) continue;
    error_number_ = sent < 0 ? errno : EAGAIN;
    return false;
  }
  return true;
}

bool HandshakeSocket::send_first(std::span<const std::byte> greeting) {
  if (greeting.empty()) return true;
  const ssize_t sent = ::send(socket_.get(), greeting.data(), greeting.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  error_number_ = sent < 0 ? errno : EAGAIN;
  return sent == static_cast<ssize_t>(greeting.size());
}

std::string HandshakeSocket::why() const {
  return error_number_ == 0 ? "it closed the connection" : errno_text(error_number_);
}

namespace {

constexpr int64_t kPatienceMs = 7000;   // in all, every rank has the error within ten seconds
constexpr int64_t kProbingMs = 20'000;  // where Linux looks for a size that passes: that takes it 3 to 13 s

}  // namespace

uint32_t padding_for(int fd) { return static_cast<uint32_t>(std::min(largest_payload(fd), kMaxPaddingBytes)); }

int64_t padding_patience_ms() {
  std::ifstream file("/proc/sys/net/ipv4/tcp_mtu_probing");  // ip-sysctl: 0 is never
  int mode = 0;
  return file >> mode && mode > 0 ? kProbingMs : kPatienceMs;
}

}  // namespace ringdp
