#include "transport/congestion.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>

#include "base/error.h"
#include "transport/tcp_health.h"

namespace ringdp {
namespace {

constexpr int64_t kBbrFromUs = 10'000;
constexpr const char* kBest = "bbr";  // does not slow down for a single lost packet
constexpr const char* kAllowed = "net.ipv4.tcp_allowed_congestion_control";

std::string in_use(int fd) {
  std::array<char, 16> name{};  // TCP_CA_NAME_MAX
  socklen_t length = name.size() - 1;
  return getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), &length) == 0 ? name.data() : "the system's";
}

std::string line_of(const char* path) {
  std::string line;
  std::ifstream file(path);
  std::getline(file, line);
  return line;
}

// Paces packets at the kernel's own rate: without it, a whole window is sent at once after a pause and overruns short
// queues.
void spread_out(int fd) {
  const uint64_t any = uint64_t{1} << 60;
  setsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &any, sizeof(any));
}

}  // namespace

std::string ask_for_congestion(int fd, std::string_view setting) {
  if (setting == kSystemCongestion) return "";
  const bool automatic = setting == kAutomaticCongestion;
  const bool long_path = tcp_round_trip_us(fd) >= kBbrFromUs;
  if (long_path) spread_out(fd);
  if (automatic && !long_path) return "";
  const std::string name = automatic ? kBest : std::string(setting);
  if (in_use(fd) == name || setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name.data(), name.size()) == 0) return "";
  const int error_number = errno;
  const std::string allowed = line_of("/proc/sys/net/ipv4/tcp_allowed_congestion_control");
  std::string help = error_number == ENOENT
                         ? "this kernel does not have it (modprobe tcp_" + name + ")"
                         : "sysctl -w " + std::string(kAllowed) + "='" + allowed + " " + name + "' would allow it";
  return "asks for the congestion control " + name + " and may not use it (" + errno_text(error_number) + "), so " +
         in_use(fd) + " is used; " + help;
}

bool keeps_its_rate(int fd) { return in_use(fd).starts_with(kBest); }

}  // namespace ringdp
