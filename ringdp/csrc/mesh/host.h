// What this rank knows of its host: a name for messages, an identity that ranks of the same host share, addresses that
// other hosts may reach. Read at start, any thread.
#pragma once

#include <string>
#include <vector>

namespace ringdp {

std::string host_name();

// Equal exactly when two ranks can reach each other over loopback: boot id, network namespace, and `host_id` if it is set.
std::string host_identity(const std::string& host_id);

struct Interface {
  std::string name;
  std::string ip;
  bool is_loopback = false;
};

// Interfaces that are up, IPv4 before IPv6, without link-local addresses.
std::vector<Interface> interfaces();

}  // namespace ringdp
