#include "base/descriptor_passing.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <array>
#include <cstring>

namespace ringdp {

ssize_t send_with_descriptor(int socket, std::span<const std::byte> bytes, const Fd& descriptor) {
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int))> control{};
  iovec piece{const_cast<std::byte*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  if (descriptor) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* rights = CMSG_FIRSTHDR(&message);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    int sent = descriptor.get();
    std::memcpy(CMSG_DATA(rights), &sent, sizeof(sent));
  }
  return sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

ssize_t receive_with_descriptor(int socket, std::span<std::byte> bytes, Fd& descriptor) {
  alignas(cmsghdr) std::array<std::byte, CMSG_SPACE(sizeof(int))> control;
  iovec piece{bytes.data(), bytes.size()};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t got = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (got <= 0) return got;
  for (cmsghdr* it = CMSG_FIRSTHDR(&message); it != nullptr; it = CMSG_NXTHDR(&message, it)) {
    if (it->cmsg_level != SOL_SOCKET || it->cmsg_type != SCM_RIGHTS) continue;
    for (std::size_t at = 0; CMSG_LEN(at + sizeof(int)) <= it->cmsg_len; at += sizeof(int)) {
      int received = -1;
      std::memcpy(&received, CMSG_DATA(it) + at, sizeof(received));
      descriptor = Fd(received);
    }
  }
  return got;
}

}  // namespace ringdp
