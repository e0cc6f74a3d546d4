// Bytes on a Unix stream socket with a descriptor beside them (SCM_RIGHTS, unix(7)). Neither blocks nor raises
// SIGPIPE; results and errno are those of sendmsg(2) and recvmsg(2). Any thread, one per socket and direction.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <span>

#include "base/fd.h"

namespace ringdp {

ssize_t send_with_descriptor(int socket, std::span<const std::byte> bytes, const Fd& descriptor);  // may be empty

// A received descriptor replaces `descriptor`; of several the last one does, and the others are closed.
ssize_t receive_with_descriptor(int socket, std::span<std::byte> bytes, Fd& descriptor);

}  // namespace ringdp
