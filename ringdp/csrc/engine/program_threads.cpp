#include "engine/program_threads.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <set>

#include "base/fd.h"
#include "base/process_stacks.h"

namespace ringdp {
namespace {

constexpr std::size_t kNamedThreads = 4;
constexpr std::size_t kKeptThreads = 16;  // of a group: a program may start a thread for each call

pid_t this_thread() {
  thread_local pid_t number = 0;
  thread_local unsigned generation = 0;
  if (const unsigned now = fork_generation(); number == 0 || generation != now) {
    number = static_cast<pid_t>(::syscall(SYS_gettid));
    generation = now;
  }
  return number;
}

// The thread's name; empty if it has ended.
std::string name_of(pid_t thread) {
  std::ifstream file("/proc/self/task/" + std::to_string(thread) + "/comm");
  std::string name;
  std::getline(file, name);
  return name;
}

}  // namespace

void ProgramThreads::note_call(GroupState& group, uint64_t sequence) {
  role_.mutex().assert_held();
  const pid_t thread = this_thread();
  for (CallingThread& caller : group.callers)
    if (caller.thread == thread) {
      caller.last = sequence;
      return;
    }
  if (group.callers.size() < kKeptThreads) {
    group.callers.push_back({thread, sequence});
    return;
  }
  *std::min_element(group.callers.begin(), group.callers.end(), [](const CallingThread& a, const CallingThread& b) {
    return a.last < b.last;
  }) = {thread, sequence};
}

ProgramThreads::Waiting::Waiting(ProgramThreads& threads, MutexLock& lock, const Work& work)
    : threads_(threads), lock_(lock) {
  threads_.role_.mutex().assert_held();
  threads_.waits_.push_back({this_thread(), work.group(), in_order(work.sequence()), Clock::now()});
}

ProgramThreads::Waiting::~Waiting() {
  if (!lock_.native().owns_lock()) lock_.lock();
  threads_.role_.mutex().assert_held();
  auto& waits = threads_.waits_;
  // the innermost: a signal handler may wait inside a wait
  const auto mine =
      std::find_if(waits.rbegin(), waits.rend(), [](const Wait& it) { return it.thread == this_thread(); });
  if (mine != waits.rend()) waits.erase(std::next(mine).base());
}

uint64_t ProgramThreads::blocked_in() const {
  role_.mutex().assert_held();
  if (waits_.empty()) return 0;
  const ProgramThreadCount counted = program_threads();
  std::set<pid_t> waiting;
  for (const Wait& wait : waits_) {
    // Threads that were counted since then, and still wait, have started no other thread.
    if (!wait.in_order || wait.group != waits_.front().group || counted.at <= wait.began) return 0;
    waiting.insert(wait.thread);
  }
  return counted.count == static_cast<int>(waiting.size()) ? waits_.front().group : 0;
}

std::string ProgramThreads::several(const GroupState& group) const {
  role_.mutex().assert_held();
  std::vector<std::string> found;
  for (const CallingThread& caller : group.callers) {
    const std::string name = name_of(caller.thread);
    if (name.empty() || name.starts_with("pt_autograd") || name.starts_with("ringdp")) continue;
    const std::string who = caller.thread == ::getpid() ? "the main thread" : "thread " + std::to_string(caller.thread);
    found.push_back(who + " (last #" + std::to_string(caller.last) + ")");
  }
  if (found.size() < 2) return "";
  std::string out;
  for (std::size_t i = 0; i < std::min(found.size(), kNamedThreads); ++i) {
    const bool last = i + 1 == std::min(found.size(), kNamedThreads);
    out += (i == 0 ? "" : last ? " and " : ", ") + found[i];
  }
  if (found.size() > kNamedThreads) out += " and " + std::to_string(found.size() - kNamedThreads) + " more";
  return out;
}

}  // namespace ringdp
