#include "engine/diagnosis.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <filesystem>
#include <mutex>
#include <system_error>
#include <utility>

#include "base/process_stacks.h"
#include "base/signal_bell.h"
#include "base/thread.h"
#include "engine/operation_record.h"

namespace ringdp {

namespace {

constexpr std::size_t kMostWaiting = 64;  // jobs

}  // namespace

struct JobThread::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> jobs;
  bool stopped = false;
};

JobThread::JobThread(const char* name) : name_(name), state_(std::make_shared<State>()) {}

void JobThread::run(std::function<void()> job) {
  std::lock_guard lock(state_->mutex);
  if (state_->stopped || state_->jobs.size() >= kMostWaiting) return;
  state_->jobs.push_back(std::move(job));
  state_->changed.notify_one();
  if (thread_) return;
  try {
    thread_ = start_thread(name_, [state = state_] { work(state); });
  } catch (const Error&) {
    state_->jobs.clear();
  }
}

void JobThread::stop() {
  std::lock_guard lock(state_->mutex);
  state_->stopped = true;
  state_->changed.notify_one();
}

void JobThread::join() { end_thread(thread_); }

void JobThread::work(const std::shared_ptr<State>& owned) {
  std::shared_ptr<State> state = owned;
  std::unique_lock lock(state->mutex);
  for (;;) {
    state->changed.wait(lock, [&] { return state->stopped || !state->jobs.empty(); });
    if (state->jobs.empty()) return;
    std::function<void()> job = std::move(state->jobs.front());
    state->jobs.pop_front();
    lock.unlock();
    job();
    job = nullptr;
    lock.lock();
  }
}

namespace {

constexpr int64_t kMostStallBytes = 4 * 1024 * 1024;  // of the log of stalls

// All of `text`, or errno.
int write_all(int fd, const std::string& text) {
  for (std::size_t done = 0; done < text.size();) {
    const ssize_t part = ::write(fd, text.data() + done, text.size() - done);
    if (part < 0 && errno == EINTR) continue;
    if (part <= 0) return part == 0 ? EIO : errno;
    done += static_cast<std::size_t>(part);
  }
  return 0;
}

// In one piece: a reader sees the whole file or none. 0, or errno.
int write_file(const std::string& path, const std::string& text) {
  const std::string draft = path + ".part";
  const int fd = ::open(draft.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0644);
  if (fd < 0) return errno;
  int error = write_all(fd, text);
  if (::close(fd) != 0 && error == 0) error = errno;
  if (error == 0 && ::rename(draft.c_str(), path.c_str()) != 0) error = errno;
  if (error != 0) ::unlink(draft.c_str());
  return error;
}

}  // namespace

struct Diagnosis::State {
  State(OperationRecorder& operations, NoticeBoard& board, std::string where)
      : recorder(operations), notices(board), folder(std::move(where)), bell(!folder.empty()) {}

  OperationRecorder& recorder;
  NoticeBoard& notices;
  const std::string folder;
  SignalBell bell;
  JobThread asking{"ringdp-stacks"};
  std::mutex mutex;
  std::deque<std::function<void()>> jobs;
  bool stopped = false;
  PeerInfo self;  // set before the thread starts, as the next members
  int world = 1;
  int dumps = 0;  // used by the thread only, as the next members
  bool complained = false;

  std::string path(const std::string& kind, const std::string& end) const {
    return folder + "/" + kind + "_rank" + std::to_string(self.rank) + end;
  }
  std::string dump_path(int count) const { return path("dump", "_" + std::to_string(count) + ".json"); }

  int last_dump() const {
    const std::string beginning = "dump_rank" + std::to_string(self.rank) + "_";
    int last = 0;
    std::error_code failed;
    for (const auto& entry : std::filesystem::directory_iterator(folder, failed)) {
      const std::string name = entry.path().filename();
      if (name.starts_with(beginning)) last = std::max(last, std::atoi(name.c_str() + beginning.size()));
    }
    return last;
  }

  void complain(const std::string& what, int error) {
    if (std::exchange(complained, true)) return;
    notices.post(LogLevel::kWarning, "rank " + std::to_string(self.rank) + " cannot write " + what + ": " +
                                         errno_text(error) + "; nothing else is affected (RINGDP_DUMP_DIR)");
  }

  // First without stacks, which may take half a second: the launcher may end this process at any moment.
  void dump(const std::string& reason) {
    DumpHead head{self, world, reason, ""};
    const std::string file = dump_path(++dumps);
    if (dumps > kMostDumps) ::unlink(dump_path(dumps - kMostDumps).c_str());
    if (const int error = write_file(file, dump_text(recorder, head)); error != 0) return complain(file, error);
    asking.run([this, file, head]() mutable {  // `asking` is joined before this ends
      head.stacks = process_stacks();
      if (!head.stacks.empty()) write_file(file, dump_text(recorder, head));
    });
    notices.post(LogLevel::kInfo,
                 "rank " + std::to_string(self.rank) + " wrote its last operations to " + file + " (" + reason + ")");
  }

  void log_stall(const std::string& text) {
    const std::string file = path("stalls", ".log");
    const int fd = ::open(file.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0644);
    if (fd < 0) return complain(file, errno);
    struct stat status{};
    int error = 0;
    if (::fstat(fd, &status) == 0 && status.st_size < kMostStallBytes) error = write_all(fd, text);
    ::close(fd);
    if (error != 0) complain(file, error);
  }

  void begin() {
    std::error_code failed;
    std::filesystem::create_directories(folder, failed);
    if (failed) return complain(folder, failed.value());
    dumps = last_dump();  // keeps the dumps of an earlier process of this rank, within the limit
    const std::string file = path("process", ".json");
    const int error =
        write_file(file, "{\"rank\":" + std::to_string(self.rank) + ",\"world\":" + std::to_string(world) +
                             ",\"pid\":" + std::to_string(self.pid) + ",\"host\":" + json_text(self.host) + "}\n");
    if (error != 0) return complain(file, error);
    if (!SignalBell::handles_user_signal())
      notices.post(
          LogLevel::kInfo,
          "SIGUSR1 has a handler of the script's, which ringdp keeps: for a dump use python -m ringdp dump PID");
  }
};

Diagnosis::Diagnosis(OperationRecorder& recorder, NoticeBoard& notices, std::string folder)
    : state_(std::make_shared<State>(recorder, notices, std::move(folder))) {}

Diagnosis::~Diagnosis() = default;

void Diagnosis::start(const PeerInfo& self, int world) {
  state_->self = self;
  state_->world = world;
  if (state_->folder.empty()) return;
  write([state = state_] { state->begin(); });
}

void Diagnosis::note_failure(uint64_t group, const Error& error, uint64_t cause) {
  if (error.kind() == ErrorKind::kState || error.kind() == ErrorKind::kInterrupted) return;
  const std::string kind = error_class_name(error.kind());
  state_->recorder.add_failure({nanoseconds_of(Clock::now()), group, cause, error.context().peer, kind, error.what()});
  if (!state_->folder.empty()) write([state = state_, kind] { state->dump("failure: " + kind); });
}

void Diagnosis::log_stall(const std::string& text) {
  if (!state_->folder.empty()) write([state = state_, text] { state->log_stall(text); });
}

void Diagnosis::run(std::function<void()> job) { state_->asking.run(std::move(job)); }

void Diagnosis::write(std::function<void()> job) {
  std::lock_guard lock(state_->mutex);
  if (state_->stopped || state_->jobs.size() >= kMostWaiting) return;
  state_->jobs.push_back(std::move(job));
  state_->bell.ring();
  if (thread_) return;
  try {
    thread_ = start_thread("ringdp-dump", [state = state_] { work(state); });
  } catch (const Error&) {
    // As in NoticeBoard: a diagnosis must not fail an operation.
  }
}

void Diagnosis::stop() {
  std::lock_guard lock(state_->mutex);
  state_->stopped = true;
  state_->bell.ring();
}

void Diagnosis::join() {
  end_thread(thread_);
  state_->asking.stop();  // after the jobs of the last dump
  state_->asking.join();
}

void Diagnosis::work(const std::shared_ptr<State>& owned) {
  std::shared_ptr<State> state = owned;
  for (;;) {
    const bool asked = state->bell.wait();
    if (asked && !state->folder.empty()) state->dump("signal");
    std::function<void()> job;
    {
      std::lock_guard lock(state->mutex);
      if (state->jobs.empty()) {
        if (state->stopped) return;
        continue;
      }
      job = std::move(state->jobs.front());
      state->jobs.pop_front();
    }
    job();
    job = nullptr;
    std::lock_guard lock(state->mutex);
    if (state->stopped && state->jobs.empty()) return;
  }
}

}  // namespace ringdp
