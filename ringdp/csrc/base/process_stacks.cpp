#include "base/process_stacks.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <semaphore.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <mutex>
#include <sstream>
#include <utility>

namespace ringdp {

namespace {

constexpr int kMostFrames = 48;
constexpr int kOwnFrames = 2;  // the handler, and the kernel's frame below it

std::array<void*, kMostFrames> frames;
std::atomic<int> frame_count{0};
std::atomic<bool> wanted{false};
sem_t noted;
std::mutex one_at_a_time;
std::atomic<bool> prepared{false};

int stack_signal() { return SIGRTMAX - 7; }

void on_signal(int) {
  const int kept = errno;
  if (wanted.exchange(false, std::memory_order_acq_rel)) {
    frame_count.store(backtrace(frames.data(), kMostFrames), std::memory_order_release);
    sem_post(&noted);
  }
  errno = kept;
}

std::string text_of_frame(void* address) {
  Dl_info info{};
  if (dladdr(address, &info) == 0 || info.dli_fname == nullptr) {
    char text[32];
    std::snprintf(text, sizeof(text), "%p", address);
    return text;
  }
  std::string file = info.dli_fname;
  if (const auto slash = file.rfind('/'); slash != std::string::npos) file.erase(0, slash + 1);
  if (info.dli_sname == nullptr) {
    char offset[32];
    std::snprintf(offset, sizeof(offset), "+0x%zx",
                  static_cast<std::size_t>(static_cast<char*>(address) - static_cast<char*>(info.dli_fbase)));
    return file + offset;
  }
  int status = 0;
  char* plain = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
  std::string name = status == 0 && plain != nullptr ? plain : info.dli_sname;
  std::free(plain);
  if (name.size() > 160) name = name.substr(0, 157) + "...";
  return name + " in " + file;
}

// The main thread's state in /proc: "S", or "D" (uninterruptible, no signal is handled).
char state_of_main() {
  std::ifstream file("/proc/self/task/" + std::to_string(getpid()) + "/stat");
  std::string line;
  std::getline(file, line);
  const auto end = line.rfind(')');
  return end != std::string::npos && end + 2 < line.size() ? line[end + 2] : '?';
}

std::string wait_channel() {
  std::ifstream file("/proc/self/task/" + std::to_string(getpid()) + "/wchan");
  std::string name;
  std::getline(file, name);
  return name.empty() || name == "0" ? "" : " (the kernel's " + name + ")";
}

}  // namespace

bool prepare_native_stack() {
  std::lock_guard lock(one_at_a_time);
  if (prepared) return true;
  struct sigaction now{};
  if (sigaction(stack_signal(), nullptr, &now) != 0 || now.sa_handler != SIG_DFL) return false;
  std::array<void*, 4> first;
  backtrace(first.data(), 4);  // loads its libraries, which the handler may not do
  sem_init(&noted, 0, 0);
  struct sigaction action{};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  if (sigaction(stack_signal(), &action, nullptr) != 0) return false;
  prepared = true;
  return true;
}

std::string native_stack_of_main(int64_t limit_ms) {
  std::lock_guard lock(one_at_a_time);
  if (!prepared) return "(not known: another part of the program uses the signal for it)\n";
  if (state_of_main() == 'D') return "(it is in uninterruptible sleep" + wait_channel() + ")\n";
  while (sem_trywait(&noted) == 0) {
  }
  wanted = true;
  if (syscall(SYS_tgkill, getpid(), getpid(), stack_signal()) != 0) return "(the main thread has ended)\n";
  timespec until{};
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += limit_ms / 1000;
  until.tv_nsec += limit_ms % 1000 * 1'000'000;
  if (until.tv_nsec >= 1'000'000'000) {
    until.tv_nsec -= 1'000'000'000;
    ++until.tv_sec;
  }
  int waited = 0;
  do waited = sem_timedwait(&noted, &until);
  while (waited != 0 && errno == EINTR);
  if (waited != 0 && wanted.exchange(false)) return "(the main thread did not answer" + wait_channel() + ")\n";
  std::string out;
  for (int i = kOwnFrames; i < frame_count.load(std::memory_order_acquire); ++i)
    out += "  " + text_of_frame(frames[static_cast<std::size_t>(i)]) + "\n";
  return out;
}

namespace {

constexpr auto kFresh = std::chrono::milliseconds(500);

std::mutex source_mutex;
StackSource source;

std::mutex collecting;  // this guards the next two
std::string collected;
std::chrono::steady_clock::time_point collected_at{};

std::mutex count_mutex;
ProgramThreadCount last_count;  // by that mutex

StackSource current_source() {
  std::lock_guard lock(source_mutex);
  return source;
}

bool starts_with_any(const std::string& text, const std::vector<std::string>& beginnings) {
  return text.starts_with("<") ||
         std::any_of(beginnings.begin(), beginnings.end(), [&](const std::string& it) { return text.starts_with(it); });
}

}  // namespace

void set_stack_source(StackSource replacement) {
  std::lock_guard none(collecting);
  collected_at = {};
  std::lock_guard lock(source_mutex);
  source = std::move(replacement);
}

std::string process_stacks(int64_t limit_ms) {
  std::lock_guard one(collecting);
  const StackSource now = current_source();
  if (!now.python) return "";
  if (std::chrono::steady_clock::now() - collected_at < kFresh) return collected;
  std::string out = now.python(limit_ms);
  if (out.size() > kStacksBytes * 3 / 4) out = out.substr(0, kStacksBytes * 3 / 4) + "\n  …\n";
  out += "C++ stack of the main thread (most recent call first):\n" + native_stack_of_main(limit_ms);
  if (out.size() > kStacksBytes) out.resize(kStacksBytes);
  collected = out;
  collected_at = std::chrono::steady_clock::now();
  return out;
}

std::string call_site_text(int32_t number) {
  const StackSource now = current_source();
  return now.call_site && number >= 0 ? now.call_site(number) : "";
}

void note_program_threads(const ProgramThreadCount& counted) {
  std::lock_guard lock(count_mutex);
  if (counted.at >= last_count.at) last_count = counted;
}

ProgramThreadCount program_threads() {
  std::lock_guard lock(count_mutex);
  return last_count;
}

std::string frame_of_script(const std::string& stacks) {
  const std::vector<std::string> foreign = current_source().foreign;
  std::istringstream lines(stacks);
  std::string line, innermost;
  while (std::getline(lines, line)) {
    const auto file = line.find("File \"");
    if (file == std::string::npos) {
      if (!innermost.empty() && (line.empty() || !line.starts_with(" "))) break;  // the first thread's end
      continue;
    }
    const auto begin = file + 6, end = line.find('"', begin), number = line.find("line ", begin);
    if (end == std::string::npos || number == std::string::npos) continue;
    const std::string path = line.substr(begin, end - begin);
    const auto slash = path.rfind('/');
    std::string text = path.substr(slash == std::string::npos ? 0 : slash + 1) + ":" + line.substr(number + 5);
    if (!starts_with_any(path, foreign)) return text;
    if (innermost.empty()) innermost = std::move(text);
  }
  return innermost;
}

}  // namespace ringdp
