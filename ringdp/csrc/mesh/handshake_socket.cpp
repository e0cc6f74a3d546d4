#include "mesh/handshake_socket.h"

#include <sys/socket.h>

#include <array>
#include <cerrno>

#include "base/error.h"

namespace ringdp {

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

std::string HandshakeSocket::why() const {
  return error_number_ == 0 ? "it closed the connection" : errno_text(error_number_);
}

}  // namespace ringdp
