#include "testing.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <mutex>
#include <thread>
#include <vector>

// libstdc++ counts the references of an exception in its own library, which is not built with ThreadSanitizer: that
// the last holder destroys it after all others are done is invisible, and looks like a race. (Which frame of that is
// seen differs.)
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_suppressions() {
  return "race:std::__exception_ptr::exception_ptr::_M_release\nrace:std::runtime_error::~runtime_error\n";
}

namespace ringdp::testing {
namespace {

struct Case {
  const char* name;
  std::string file;  // without its folder and its ending
  void (*body)();
};

std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

constexpr int kMaxShown = 20;  // per case: a wrong loop would print thousands
constexpr int kTimeoutStatus = 124;

std::mutex output_mutex;
std::atomic<int> failures_in_case{0};
const char* volatile running = "";

void on_alarm(int) {
  // Only what a signal handler may call.
  const auto print = [](const char* text) {
    if (::write(STDERR_FILENO, text, std::strlen(text)) < 0) _exit(kTimeoutStatus);
  };
  print("\nTIMEOUT in: ");
  print(running);
  print("\n");
  _exit(kTimeoutStatus);
}

void guarded(const std::function<void()>& body, const std::string& where) {
  try {
    body();
  } catch (const RequireFailed&) {
    return;  // already reported
  } catch (const std::exception& error) {
    report_failure(where.c_str(), 0, std::string("unexpected exception: ") + error.what());
  }
}

struct Filters {
  std::string_view file;                // empty: any
  std::vector<std::string_view> names;  // parts of names; none: any
};

bool selected(const Case& test, const Filters& filters) {
  if (!filters.file.empty() && filters.file != test.file) return false;
  return filters.names.empty() || std::any_of(filters.names.begin(), filters.names.end(), [&](std::string_view part) {
           return std::string_view(test.name).find(part) != std::string_view::npos;
         });
}

int run_all(const Filters& filters, unsigned limit_s) {
  ::signal(SIGALRM, on_alarm);
  int ran = 0;
  int failed = 0;
  for (const Case& test : cases()) {
    if (!selected(test, filters)) continue;
    ++ran;
    failures_in_case = 0;
    running = test.name;
    const auto begin = std::chrono::steady_clock::now();
    ::alarm(limit_s);
    guarded(test.body, test.name);
    ::alarm(0);
    const bool passed = failures_in_case == 0;
    if (!passed) ++failed;
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    std::printf("%s %6.2f s  %s\n", passed ? "ok  " : "FAIL", took.count(), test.name);
    std::fflush(stdout);
  }
  std::printf("%d of %d cases passed\n", ran - failed, ran);
  if (ran == 0) std::fprintf(stderr, "no case matches\n");
  return failed == 0 && ran > 0 ? 0 : 1;
}

}  // namespace

Registration::Registration(const char* name, const char* file, void (*body)()) {
  cases().push_back({name, std::filesystem::path(file).stem(), body});
}

void report_failure(const char* file, int line, const std::string& message) {
  const int before = failures_in_case.fetch_add(1);
  if (before > kMaxShown) return;
  const std::lock_guard lock(output_mutex);
  if (before == kMaxShown)
    std::fprintf(stderr, "  … more failures of this case are not shown\n");
  else
    std::fprintf(stderr, "  %s:%d: %s\n", file, line, message.c_str());
}

void report_unequal(const char* file, int line, const char* expression, const std::string& got,
                    const std::string& wanted) {
  report_failure(file, line, std::string(expression) + ": got " + got + ", wanted " + wanted);
}

void report_wrong_kind(const char* file, int line, const char* expression, ErrorKind wanted, const Error& thrown) {
  report_failure(file, line,
                 std::string(expression) + ": threw kind " + shown(thrown.kind()) + ", wanted " + shown(wanted) + ": " +
                     thrown.what());
}

void report_nothing_thrown(const char* file, int line, const char* expression) {
  report_failure(file, line, std::string(expression) + ": did not throw");
}

void run_ranks(int world_size, const std::function<void(int rank)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank)
    threads.emplace_back([&body, rank] { guarded([&] { body(rank); }, "rank " + std::to_string(rank)); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace ringdp::testing

int main(int argc, char** argv) {
  ringdp::testing::Filters filters;
  unsigned limit_s = 60;
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--list") {
      for (const auto& test : ringdp::testing::cases()) std::printf("%s: %s\n", test.file.c_str(), test.name);
      return 0;
    }
    if (argument == "--limit-s" && i + 1 < argc)
      limit_s = static_cast<unsigned>(std::strtoul(argv[++i], nullptr, 10));
    else if (argument == "--file" && i + 1 < argc)
      filters.file = argv[++i];
    else
      filters.names.push_back(argument);
  }
  return ringdp::testing::run_all(filters, limit_s);
}
