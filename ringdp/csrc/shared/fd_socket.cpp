#include "shared/fd_socket.h"

#include <sys/resource.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "base/bytes.h"
#include "base/error.h"
#include "base/fd.h"
#include "base/sha256.h"
#include "base/text.h"

namespace ringdp {

namespace {

constexpr std::size_t kShare = 4;

}  // namespace

std::size_t most_strangers(std::size_t most, int newest, std::size_t held) {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return most;
  const auto all = static_cast<std::size_t>(limit.rlim_cur);
  const std::size_t used = static_cast<std::size_t>(newest) + 1 - std::min(held, static_cast<std::size_t>(newest) + 1);
  const std::size_t left = all > used ? all - used : 0;
  return std::clamp(left / kShare, std::size_t{1}, std::max(most, std::size_t{1}));
}

namespace {

constexpr std::array<char, 8> kMagic{'R', 'I', 'N', 'G', 'D', 'P', 'S', 'M'};
constexpr std::size_t kReasonAt = 56;
constexpr std::size_t kMacAt = kSharedMessageBytes - kSha256Bytes;  // zeros over a Unix socket
constexpr std::size_t kReasonBytes = kMacAt - kReasonAt;
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
  std::string text = clean_text(reason, kReasonBytes);
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
  std::string_view text = text_of(std::span(raw).subspan(kReasonAt, kReasonBytes));
  out.reason = clean_text(text.substr(0, text.find('\0')), kReasonBytes);
  return out;
}

Digest SharedMac::of(const SharedBytes& message) const {
  static constexpr std::string_view kLabel = "ringdp set-up";
  std::array<std::byte, kLabel.size() + 1 + sizeof(count_) + kMacAt> text{};
  std::memcpy(text.data(), kLabel.data(), kLabel.size());
  text[kLabel.size()] = std::byte{of_dialler_};
  put(&text[kLabel.size() + 1], count_);
  std::copy_n(message.begin(), kMacAt, text.end() - kMacAt);
  return hmac_sha256(key_, text);
}

void SharedMac::sign(SharedBytes& message) {
  const Digest mac = of(message);
  std::copy(mac.begin(), mac.end(), message.begin() + kMacAt);
  ++count_;
}

bool SharedMac::accept(const SharedBytes& message) {
  if (!equal_bytes(of(message), std::span(message).subspan(kMacAt))) return false;
  ++count_;
  return true;
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

namespace {

constexpr std::size_t kMaxStrangers = 64;
constexpr int kAcceptsPerStep = 256;
constexpr int64_t kStrangerMs = 2000;
constexpr int kBacklog = 1024;
constexpr auto kPauseForDescriptors = std::chrono::milliseconds(50);

// "ringdp/" and the name in hexadecimal, so that an administrator sees its owner.
socklen_t fill_address(const SharedToken& name, sockaddr_un& address) {
  std::string text = "ringdp/" + hex_encode(name);
  address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, text.data(), text.size());  // the 0 in front makes it abstract
  return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
}

Fd unix_socket(int& error_number) {
  Fd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  error_number = fd ? 0 : errno;
  return fd;
}

}  // namespace

SharedReader::Status SharedReader::read(int fd) {
  ssize_t got = receive_with_descriptor(fd, std::span(buffer_).subspan(filled_), descriptor_);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) return Status::kWaiting;
  if (got <= 0) {
    why_ = got == 0 ? "its connection was closed" : errno_text(errno);
    return Status::kClosed;
  }
  filled_ += static_cast<std::size_t>(got);
  if (filled_ < buffer_.size()) return Status::kWaiting;
  filled_ = 0;
  if (mac_ && !mac_->accept(buffer_)) {
    why_ = "a message on its connection is not as it was sent";
    return Status::kClosed;
  }
  auto message = SharedMessage::decode(buffer_);
  if (!message) return Status::kNonsense;
  message_ = std::move(*message);
  return Status::kMessage;
}

namespace {

int send_shared_bytes(int fd, const SharedBytes& bytes, const Fd& descriptor) {
  ssize_t moved = 0;
  do {
    moved = send_with_descriptor(fd, bytes, descriptor);
  } while (moved < 0 && errno == EINTR);
  if (moved < 0) return errno;
  return moved == static_cast<ssize_t>(bytes.size()) ? 0 : EAGAIN;
}

}  // namespace

int send_shared_message(int fd, const SharedMessage& message, const Fd& descriptor) {
  return send_shared_bytes(fd, message.encode(), descriptor);
}

int send_shared_message(int fd, const SharedMessage& message, SharedMac& mac) {
  SharedBytes bytes = message.encode();
  mac.sign(bytes);
  return send_shared_bytes(fd, bytes, Fd());
}

std::optional<FdSocket> FdSocket::open(std::string& problem) {
  FdSocket made;
  random_bytes(made.name_);
  sockaddr_un address;
  socklen_t length = fill_address(made.name_, address);
  int error_number = 0;
  made.listener_ = unix_socket(error_number);
  if (error_number == 0 && (bind(made.listener_.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 ||
                            listen(made.listener_.get(), kBacklog) != 0))
    error_number = errno;
  if (error_number == 0) return made;
  problem = "a Unix socket: " + errno_text(error_number);
  return std::nullopt;
}

void FdSocket::expect(const SharedToken& token, int peer) { expected_.push_back({token, peer}); }

void FdSocket::poll_for(std::vector<pollfd>& polled) const {
  if (Clock::now() >= accept_after_) polled.push_back({listener_.get(), POLLIN, 0});
  for (const Stranger& it : strangers_) polled.push_back({it.socket.get(), POLLIN, 0});
}

std::vector<FdSocket::Client> FdSocket::serve() {
  std::vector<Client> clients;
  for (Stranger& it : strangers_) attend(it, clients);
  std::erase_if(strangers_, [](const Stranger& it) { return it.gone; });
  for (int i = 0; i < kAcceptsPerStep && Clock::now() >= accept_after_; ++i) {
    Fd socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      bool short_of = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
      if (short_of) accept_after_ = Clock::now() + kPauseForDescriptors;
      break;
    }
    const int descriptor = socket.get();
    Stranger newcomer{std::move(socket), {}, Deadline::after_ms(kStrangerMs), false};
    attend(newcomer, clients);  // a rank of this job has sent its token by now
    if (newcomer.gone) continue;
    strangers_.push_back(std::move(newcomer));
    for (const std::size_t room = most_strangers(kMaxStrangers, descriptor, strangers_.size());
         strangers_.size() > room;) {
      strangers_.pop_front();
      ++turned_away_;
    }
  }
  return clients;
}

void FdSocket::attend(Stranger& stranger, std::vector<Client>& clients) {
  SharedReader::Status status = stranger.reader.read(stranger.socket.get());
  if (status == SharedReader::Status::kWaiting && !stranger.deadline.expired()) return;
  stranger.gone = true;
  int peer = status == SharedReader::Status::kMessage ? client_of(stranger.reader.message()) : -1;
  if (peer < 0) {
    ++turned_away_;
    return;
  }
  ucred credentials = credentials_of(stranger.socket.get());
  clients.push_back({std::move(stranger.socket), credentials, peer});
}

int FdSocket::client_of(const SharedMessage& message) {
  if (message.type != SharedType::kToken) return -1;
  auto found = std::find_if(expected_.begin(), expected_.end(),
                            [&](const Expected& it) { return equal_bytes(it.token, message.token); });
  if (found == expected_.end()) return -1;
  int peer = found->peer;
  expected_.erase(found);
  return peer;
}

Fd connect_fd_socket(const SharedToken& name, int& error_number) {
  sockaddr_un address;
  socklen_t length = fill_address(name, address);
  Fd fd = unix_socket(error_number);
  if (fd && connect(fd.get(), reinterpret_cast<sockaddr*>(&address), length) != 0) error_number = errno;
  return error_number == 0 ? std::move(fd) : Fd();
}

ucred credentials_of(int fd) {
  ucred credentials{0, static_cast<uid_t>(-1), static_cast<gid_t>(-1)};
  socklen_t length = sizeof(credentials);
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0)
    credentials = {0, static_cast<uid_t>(-1), static_cast<gid_t>(-1)};
  return credentials;
}

}  // namespace ringdp
