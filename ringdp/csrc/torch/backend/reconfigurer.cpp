#include "torch/backend/reconfigurer.h"

#ifdef C10D_BACKEND_HAS_RECONFIGURE

#include <numeric>
#include <utility>

#include "base/error.h"
#include "base/thread.h"
#include "torch/backend/future_wait.h"

namespace ringdp {
namespace {

// torch's handle of an attempt. Owned by Python and by the attempt's thread.
class ReconfigureWork final : public c10d::Work {
 public:
  ReconfigureWork() : c10d::Work(-1, c10d::OpType::UNKNOWN, "ring:reconfigure") {}

  void end(std::exception_ptr error) {
    finish(error);
    error ? future_->setError(error) : future_->markCompleted();
  }
  bool isCompleted() override { return future_->completed(); }
  bool wait(std::chrono::milliseconds timeout) override {
    if (!wait_until_complete(*future_, timeout))
      throw Error(ErrorKind::kTimeout, "reconfigure: wait Timed out after " + std::to_string(timeout.count()) +
                                           " ms; the attempt goes on until its own timeout");
    if (future_->hasError()) std::rethrow_exception(future_->exception_ptr());
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  const c10::intrusive_ptr<c10::ivalue::Future> future_ =
      c10::make_intrusive<c10::ivalue::Future>(c10::NoneType::get());
};

Reconfiguration::Members members_of(const c10d::ReconfigureOptions& options) {
  Reconfiguration::Members members;
  members.uuid = options.uuid;
  if (const auto* list = std::get_if<std::vector<c10d::ReconfigureHandle>>(&options.handles)) {
    members.handles = *list;
  } else {
    const auto& set = std::get<std::unordered_set<c10d::ReconfigureHandle>>(options.handles);
    members.handles.assign(set.begin(), set.end());
    members.ordered = false;
  }
  return members;
}

}  // namespace

Reconfigurer::Reconfigurer(Settings settings, Install install)
    : settings_(std::move(settings)), install_(std::move(install)), reconfiguration_(settings_.rendezvous) {}

Reconfigurer::~Reconfigurer() {
  if (fork_generation() == generation_) {
    stop();
  } else {
    [[maybe_unused]] auto* of_the_parent = thread_.release();
  }
}

void Reconfigurer::stop() {
  if (fork_generation() != generation_) return;
  stopping_ = true;
  std::unique_ptr<std::thread> thread;
  {
    std::lock_guard lock(mutex_);
    thread = std::move(thread_);
  }
  end_thread(thread);
}

std::string Reconfigurer::handle() {
  if (fork_generation() != generation_) throw forked_error();
  std::lock_guard lock(mutex_);
  if (handle_.empty()) handle_ = reconfiguration_.handle();
  return handle_;
}

c10::intrusive_ptr<c10d::Work> Reconfigurer::begin(const c10d::ReconfigureOptions& options, int64_t group_timeout_ms) {
  if (!options.hints.empty())
    throw Error(ErrorKind::kValue,
                "reconfigure: the backend ring knows no hint '" + options.hints.begin()->first + "': leave hints out");
  int64_t timeout_ms = settings_.timeout_ms;
  if (options.timeout) timeout_ms = options.timeout->count();
  if (timeout_ms <= 0)
    throw Error(ErrorKind::kValue, "reconfigure: timeout must be positive, not " + std::to_string(timeout_ms) + " ms");
  handle();
  std::lock_guard lock(mutex_);
  if (stopping_) throw Error(ErrorKind::kState, "this process group was shut down");
  if (under_way_.exchange(true))
    throw Error(ErrorKind::kState,
                "reconfigure: another attempt of this process group is under way: wait for its Work first");
  end_thread(thread_);  // of the last attempt: it has ended, or is closing the old members
  auto work = c10::make_intrusive<ReconfigureWork>();
  try {
    thread_ = start_thread("ringdp-meet", [this, work, members = members_of(options), timeout_ms, group_timeout_ms] {
      Membership old;
      std::exception_ptr error;
      try {
        old = install_(attempt(members, timeout_ms, group_timeout_ms));
      } catch (...) {
        error = std::current_exception();
      }
      under_way_ = false;
      work->end(error);
      old.close("reconfigured");
      if (old.runtime) old.runtime->shut_down();
    });
  } catch (...) {
    under_way_ = false;
    throw;
  }
  return work;
}

Membership Reconfigurer::attempt(const Reconfiguration::Members& members, int64_t timeout_ms,
                                 int64_t group_timeout_ms) {
  const auto check = [this] {
    if (stopping_) throw Error(ErrorKind::kState, "the process group was shut down during a reconfigure");
  };
  Reconfiguration::Outcome met = reconfiguration_.meet(members, timeout_ms, check);
  Membership made;
  made.runtime = std::make_shared<Runtime>(met.rank, std::move(met.mesh), settings_.engine, settings_.tables);
  std::vector<int> all(static_cast<std::size_t>(met.world));
  std::iota(all.begin(), all.end(), 0);
  made.group =
      std::make_shared<GroupHandle>(made.runtime, settings_.name, std::move(all), group_timeout_ms, settings_.tables);
  return made;
}

}  // namespace ringdp

#endif
