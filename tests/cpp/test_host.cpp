// Whether another process of this host still lives, asked at the worst moment.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "meet/records.h"
#include "testing.h"

namespace ringdp::testing {

CASE("a process that ends while it is looked up is gone, never an error") {
  std::atomic<int64_t> watched{0};
  std::atomic<bool> over{false};
  std::atomic<int> problems{0};
  std::string space = ProcessId::own().space;
  std::thread watcher([&] {
    while (!over) {
      try {
        certainly_gone({watched, 0, space});
      } catch (...) {
        ++problems;
      }
    }
  });
  // Forking takes a sanitizer milliseconds, and longer where all cores are busy.
  auto end = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  for (int i = 0; i < 2000 && std::chrono::steady_clock::now() < end; ++i) {
    pid_t child = fork();
    if (child == 0) _exit(0);
    watched = child;
    int status = 0;
    waitpid(child, &status, 0);
  }
  over = true;
  watcher.join();
  CHECK(problems == 0);
}

CASE("a process is gone once it has ended, not before") {
  pid_t child = fork();
  if (child == 0) {
    pause();
    _exit(0);
  }
  ProcessId other = ProcessId::own();
  CHECK(!certainly_gone(other));
  other.pid = child;
  other.started += 1'000'000;  // that number belonged to another process
  CHECK(certainly_gone(other));
  kill(child, SIGKILL);
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(certainly_gone(other));
}

}  // namespace ringdp::testing
