// This rank's host and process: a name for messages, identities that ranks compare, and whether a process of this host
// still exists. Any thread.
#pragma once

#include <cstdint>
#include <string>

namespace ringdp {

std::string host_name();

// Equal exactly when two ranks can reach each other over loopback: boot id and network namespace.
std::string network_identity();

// Equal when two ranks count as one host: `network_identity`, and `host_id` where it is set.
std::string host_identity(const std::string& host_id);

// A process, for other ranks of its host. Its number is valid in its process namespace only and may be reused, so the
// time of its start is part of it.
struct ProcessId {
  int64_t pid = -1;
  int64_t started = -1;  // clock ticks since the host's start, proc(5)
  std::string space;     // boot id and process namespace

  static ProcessId own();
  bool operator==(const ProcessId&) const = default;
};

// True only when it is certain: same process namespace, and the process does not exist any more (or is a zombie).
// False for a stopped or a busy process.
bool certainly_gone(const ProcessId& process);

}  // namespace ringdp
