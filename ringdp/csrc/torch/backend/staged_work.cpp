#include "torch/backend/staged_work.h"

#include "base/error.h"
#include "torch/backend/future_wait.h"
#include "torch/backend/work.h"

namespace ringdp {

StagedWork::StagedWork(std::shared_ptr<Engine> engine, int rank, c10d::OpType type, const char* title,
                       std::vector<at::Tensor> outputs, std::shared_ptr<Hooks> hooks)
    : c10d::Work(rank, type, title, outputs),
      engine_(std::move(engine)),
      hooks_(std::move(hooks)),
      outputs_(std::move(outputs)),
      future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                       devices_of(outputs_))) {}

void StagedWork::attempt(const std::function<void()>& stage) {
  try {
    stage();
  } catch (...) {
    end(std::current_exception());
  }
}

void StagedWork::end(std::exception_ptr error) {
  finish(error);
  if (!error && hooks_) hooks_->completed(reinterpret_cast<uintptr_t>(this));  // the id that c10d::Work uses
  if (error)
    future_->setError(error);
  else
    future_->markCompleted(c10::IValue(outputs_));
}

bool StagedWork::wait(std::chrono::milliseconds timeout) {
  Deadline deadline = timeout > kNoTimeout ? Deadline::after_ms(timeout.count()) : Deadline::never();
  std::unique_lock lock(mutex_);
  while (!completed_) {
    if (deadline.expired())
      throw Error(ErrorKind::kTimeout, "the wait for an operation of several stages Timed out; it goes on");
    if (cv_.wait_for(lock, kInterruptPeriod) == std::cv_status::no_timeout) continue;
    lock.unlock();
    if (engine_) engine_->check_interrupt();
    lock.lock();
  }
  std::exception_ptr error = exception_;
  lock.unlock();
  if (error) std::rethrow_exception(error);
  future_->wait();  // short: `end` completes it right after this work
  return true;
}

}  // namespace ringdp
