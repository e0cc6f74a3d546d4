#include "mesh/host.h"

#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <fstream>
#include <iterator>
#include <sstream>

namespace ringdp {
namespace {

std::string boot_id() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return boot;
}

std::string namespace_number(const char* path) {
  struct stat status{};
  return stat(path, &status) == 0 ? std::to_string(status.st_ino) : "?";
}

struct ProcessStatus {
  bool found = false;
  char state = '?';
  int64_t threads = 0;
  int64_t started = -1;
};

// proc(5): the command stands in brackets and may hold anything; after it come the state, and as fields 20 and 22 the
// number of threads and the time of the start.
ProcessStatus read_status(int64_t pid) {
  ProcessStatus status;
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  auto bracket = text.rfind(')');
  if (bracket == std::string::npos) return status;
  std::istringstream rest(text.substr(bracket + 1));
  std::string skipped;
  rest >> status.state;
  for (int field = 4; field < 20; ++field) rest >> skipped;
  rest >> status.threads >> skipped >> status.started;
  status.found = !rest.fail();
  return status;
}

}  // namespace

std::string host_name() {
  std::array<char, 256> name{};
  if (gethostname(name.data(), name.size() - 1) != 0) return "unknown";
  return name.data();
}

std::string network_identity() { return boot_id() + "/" + namespace_number("/proc/self/ns/net"); }

std::string host_identity(const std::string& host_id) { return network_identity() + "/" + host_id; }

ProcessId ProcessId::own() {
  return {getpid(), read_status(getpid()).started, boot_id() + "/" + namespace_number("/proc/self/ns/pid")};
}

bool certainly_gone(const ProcessId& process) {
  static const std::string here = ProcessId::own().space;
  if (process.pid <= 0 || process.started < 0 || process.space != here) return false;
  ProcessStatus now = read_status(process.pid);
  if (!now.found) return kill(static_cast<pid_t>(process.pid), 0) != 0 && errno == ESRCH;  // /proc may hide processes
  if (now.started != process.started) return true;
  return (now.state == 'Z' || now.state == 'X') && now.threads <= 1;  // else the main thread has ended, others live
}

}  // namespace ringdp
