#include "torch/backend/work.h"

#include <algorithm>

#include "base/error.h"
#include "torch/backend/future_wait.h"

namespace ringdp {
namespace {

constexpr auto kFutureGrace = std::chrono::milliseconds(100);  // the completion thread may be inside a long callback

}  // namespace

std::vector<c10::Device> devices_of(const std::vector<at::Tensor>& tensors) {
  std::vector<c10::Device> out;
  for (const at::Tensor& tensor : tensors)
    if (!tensor.is_cpu() && std::find(out.begin(), out.end(), tensor.device()) == out.end())
      out.push_back(tensor.device());
  return out;
}

RingWork::RingWork(int rank, c10d::OpType type, const char* title, const std::vector<at::Tensor>& inputs,
                   std::vector<at::Tensor> outputs)
    : c10d::Work(rank, type, title, inputs), outputs_(std::move(outputs)) {}

void RingWork::set_operations(std::shared_ptr<Engine> engine, std::vector<std::shared_ptr<ringdp::Work>> works) {
  engine_ = std::move(engine);
  works_ = std::move(works);
}

void RingWork::mark(std::exception_ptr error) {
  marked_at_ = std::chrono::steady_clock::now();
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::lock_guard lock(future_mutex_);
    if (marked_) return;
    marked_ = true;
    error_ = error;
    future = future_;
  }
  finish(error);                                                     // ends the profiler's event
  if (!error) hooks_->completed(reinterpret_cast<uintptr_t>(this));  // the id that c10d::Work uses
  if (future && error) future->setError(error);
  if (future && !error) complete(future);
  marked_changed_.notify_all();
}

void RingWork::complete(const c10::intrusive_ptr<c10::ivalue::Future>& future) {
  std::function<void()> what = [&] { future->markCompleted(value()); };
  for (const auto& staging : stagings_) what = [&staging, what = std::move(what)] { staging->queue().after_all(what); };
  what();
}

void RingWork::complete_future() {
  std::unique_lock lock(future_mutex_);
  waited_ = true;
  // Inside a callback that runs before this work's own, the future is marked only after that callback.
  if (!future_ || marked_ || works_.back()->lane() <= CompletionQueue::current_lane()) return;
  marked_changed_.wait_for(lock, kFutureGrace, [this] { return marked_ && future_->completed(); });
}

void RingWork::end_event() { finish(works_.back()->error()); }

bool RingWork::isCompleted() {
  if (works_.empty()) return true;
  if (!works_.back()->finished()) return false;
  end_event();
  return works_.back()->failed() ||
         std::all_of(stagings_.begin(), stagings_.end(), [](auto& it) { return it->landed(); });
}

bool RingWork::isSuccess() const { return works_.empty() || (works_.back()->finished() && !works_.back()->failed()); }

std::exception_ptr RingWork::exception() const { return works_.empty() ? nullptr : works_.back()->error(); }

bool RingWork::wait(std::chrono::milliseconds timeout) {
  if (works_.empty()) return true;
  const auto began = std::chrono::steady_clock::now();
  try {
    engine_->wait(*works_.back(), timeout > kNoTimeout ? Deadline::after_ms(timeout.count()) : Deadline::never());
  } catch (const Error& error) {
    if (works_.back()->finished()) end_event();
    if (const auto elastic = elastic_.lock()) elastic->call_failed(works_.back()->group(), error);
    throw;
  } catch (...) {
    if (works_.back()->finished()) end_event();
    throw;
  }
  const auto waited = std::chrono::steady_clock::now() - began;
  all_waited_ns_ += std::chrono::duration_cast<std::chrono::nanoseconds>(waited).count();
  for (const auto& staging : stagings_) staging->queue().order_caller();
  end_event();
  complete_future();
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> RingWork::getFuture() {
  std::lock_guard lock(future_mutex_);
  if (future_) return future_;
  c10::TypePtr list = c10::ListType::create(c10::TensorType::get());
  future_ = c10::make_intrusive<c10::ivalue::Future>(output_lists_.empty() ? list : c10::ListType::create(list),
                                                     devices_of(outputs_));
  // The call has waited already, so no callback can be attached yet and there is no order to keep.
  if (waited_ && !marked_ && works_.back()->finished() && !works_.back()->failed()) marked_ = true;
  if (marked_ && error_) future_->setError(error_);
  if (marked_ && !error_) complete(future_);
  return future_;
}

int RingWork::sourceRank() const { return works_.empty() ? -1 : works_.back()->source(); }

uint64_t RingWork::callback_path() const {
  return works_.empty() ? 0 : CompletionQueue::path_of(works_.back()->group(), works_.back()->sequence());
}

uint64_t RingWork::getSequencenumber() const { return works_.empty() ? 0 : works_.back()->sequence(); }

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
