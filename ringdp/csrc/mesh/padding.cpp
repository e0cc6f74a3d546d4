#include "mesh/padding.h"

#include <algorithm>
#include <fstream>

#include "mesh/handshake.h"
#include "transport/tcp.h"

namespace ringdp {
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
