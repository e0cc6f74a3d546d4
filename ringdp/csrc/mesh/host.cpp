#include "mesh/host.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <sstream>

#include "base/fd.h"

namespace ringdp {
namespace {

// The first bytes of a file of the kernel's; empty if it cannot be read. Not a stream: that would throw if the process
// ends between open and read.
std::string read_proc(const std::string& path) {
  Fd file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  std::array<char, 4096> text;
  ssize_t count = file ? read(file.get(), text.data(), text.size()) : 0;
  return count > 0 ? std::string(text.data(), static_cast<std::size_t>(count)) : "";
}

std::string boot_id() {
  std::string boot;
  std::istringstream(read_proc("/proc/sys/kernel/random/boot_id")) >> boot;
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

// proc(5): the command is in brackets and may contain anything; after it come the state, and as fields 20 and 22 the
// number of threads and the time of the start.
ProcessStatus read_status(int64_t pid) {
  ProcessStatus status;
  std::string text = read_proc("/proc/" + std::to_string(pid) + "/stat");
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
