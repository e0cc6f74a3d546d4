#include "torch/backend/process_group.h"

#include <algorithm>

#include "base/error.h"
#include "base/naming.h"
#include "collective/direct.h"
#include "torch/backend/call.h"
#include "torch/backend/sparse.h"
#include "torch/backend/steps_made.h"
#include "torch/backend/watchdog.h"
#include "torch/bindings/without_python_lock.h"

namespace ringdp {
namespace {

constexpr std::chrono::seconds kUnfinishedTimeout{10};

}  // namespace

ProcessGroupRing::ProcessGroupRing(std::shared_ptr<GroupHandle> group, std::shared_ptr<Runtime> runtime,
                                   bool owns_runtime)
    : c10d::Backend(group->view().rank, group->view().size),
      owns_runtime_(owns_runtime),
      timeout_ms_(group->timeout_ms()),
      membership_{std::move(runtime), std::move(group), hooks_->make_listener()} {
  membership_.group->on_failure(membership_.listener);
  init();
}

ProcessGroupRing::ProcessGroupRing(std::shared_ptr<ElasticGroup> elastic, std::shared_ptr<Runtime> runtime,
                                   bool owns_runtime)
    : c10d::Backend(elastic->rank(), elastic->size()),
      owns_runtime_(owns_runtime),
      elastic_(std::move(elastic)),
      backward_unit_(std::make_shared<BackwardUnit>(elastic_)),
      timeout_ms_(elastic_->group()->timeout_ms()),
      membership_{std::move(runtime), elastic_->group(), listener_of_other_failures()} {
  membership_.group->on_failure(membership_.listener);
  elastic_->on_install([this](const std::shared_ptr<GroupHandle>& view) {
    std::lock_guard lock(membership_mutex_);
    membership_.group = view;
    membership_.runtime = view->share_runtime();
    if (membership_.listener) view->on_failure(membership_.listener);
  });
  init();
}

// The loss of a member is not a failure of an elastic group.
std::shared_ptr<const FailureListener> ProcessGroupRing::listener_of_other_failures() {
  return std::make_shared<const FailureListener>([inner = hooks_->make_listener()](const std::exception_ptr& failure) {
    if (!is_loss(failure)) (*inner)(failure);
  });
}

// torch's Python type of a Backend holds the GIL while it destroys one; the threads that this destructor joins may
// need it.
ProcessGroupRing::~ProcessGroupRing() {
  const WithoutPythonLock no_lock;
  if (elastic_) elastic_->on_install({});
  close();
  watchdogs_.clear();
  membership_ = {};
}

Membership ProcessGroupRing::membership() const {
  std::lock_guard lock(membership_mutex_);
  return membership_;
}

void ProcessGroupRing::finish_before_shutdown(const c10::intrusive_ptr<c10d::Work>& work) {
  const std::lock_guard lock(unfinished_mutex_);
  std::erase_if(unfinished_, [](const auto& it) { return it->isCompleted(); });
  unfinished_.push_back(work);
}

// Ends the group in good order: it waits for the announcements, as the watched backend waits for its operations.
void ProcessGroupRing::shutdown() {
  const WithoutPythonLock no_lock;
  std::vector<c10::intrusive_ptr<c10d::Work>> unfinished;
  {
    const std::lock_guard lock(unfinished_mutex_);
    unfinished.swap(unfinished_);
  }
  for (const auto& work : unfinished) try {
      work->wait(kUnfinishedTimeout);
    } catch (const std::exception&) {  // its waiters have the error
    }
  std::vector<std::shared_ptr<BackendWatchdog>> watchdogs;
  {
    std::lock_guard lock(watchdogs_mutex_);
    watchdogs = watchdogs_;
  }
  for (const auto& watchdog : watchdogs) watchdog->drain();
  close();
}

void ProcessGroupRing::close() {
  {
    std::lock_guard lock(watchdogs_mutex_);
    for (const auto& watchdog : watchdogs_) watchdog->close();
  }
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  if (reconfigurer_) reconfigurer_->stop();
#endif
  Membership now;
  {
    std::lock_guard lock(membership_mutex_);
    membership_.listener.reset();
    now = membership_;
  }
  now.close();
  if (now.runtime && owns_runtime_) {
    now.runtime->engine().set_farewell_if_none("its process group was destroyed" + after_steps());
    now.runtime->shut_down();
  }
  hooks_->wait_for_abort_hooks();
}

void ProcessGroupRing::abort() {
  const WithoutPythonLock no_lock;
  const Membership now = membership();
  if (!now.runtime) return;
  hooks_->run_abort_hooks();
  aborted_ = true;
  now.runtime->engine().abort("the process group was aborted on rank " + std::to_string(rank()));
}

c10d::ErrorType ProcessGroupRing::getError() {
  const Membership now = membership();
  const std::exception_ptr failure = now.group && !aborted_ ? now.group->failure() : nullptr;
  if (!failure || (elastic_ && is_loss(failure))) return c10d::ErrorType::SUCCESS;
  try {
    std::rethrow_exception(failure);
  } catch (const Error& error) {
    if (error.kind() == ErrorKind::kTimeout) return c10d::ErrorType::TIMEOUT;
    if (error.kind() == ErrorKind::kPeerLost || error.kind() == ErrorKind::kMismatch)
      return c10d::ErrorType::REMOTE_ERROR;
    return c10d::ErrorType::COMM_ERROR;
  } catch (...) {
    return c10d::ErrorType::COMM_ERROR;
  }
}

void ProcessGroupRing::setTimeout(std::chrono::milliseconds timeout) {
  timeout_ms_ = timeout.count();
  if (elastic_) return elastic_->set_timeout_ms(timeout.count());
  if (const auto group = membership().group) group->set_timeout_ms(timeout.count());
}

#ifdef C10D_BACKEND_HAS_RECONFIGURE

ProcessGroupRing::ProcessGroupRing(int rank, int size, std::chrono::milliseconds timeout,
                                   Reconfigurer::Settings settings,
                                   std::function<void(const std::shared_ptr<Runtime>&)> installed)
    : c10d::Backend(rank, size),
      owns_runtime_(true),
      timeout_ms_(timeout.count()),
      installed_(std::move(installed)),
      reconfigurer_(std::make_unique<Reconfigurer>(std::move(settings),
                                                   [this](Membership made) { return install(std::move(made)); })) {
  init();
}

Reconfigurer& ProcessGroupRing::reconfigurer() const {
  if (!reconfigurer_)
    throw Error(ErrorKind::kState,
                "this process group keeps its members: make it by init_process_group(…, enable_reconfigure=True)");
  return *reconfigurer_;
}

c10d::ReconfigureHandle ProcessGroupRing::get_reconfigure_handle() const {
  const WithoutPythonLock no_lock;
  return reconfigurer().handle();
}

c10::intrusive_ptr<c10d::Work> ProcessGroupRing::reconfigure(const c10d::ReconfigureOptions& options) {
  const WithoutPythonLock no_lock;
  return reconfigurer().begin(options, timeout_ms_);
}

Membership ProcessGroupRing::install(Membership made) {
  made.group->set_timeout_ms(timeout_ms_);
  made.listener = hooks_->make_listener();
  made.group->on_failure(made.listener);
  {
    std::lock_guard lock(membership_mutex_);
    if (membership_.group && membership_.group->adds_in_rank_order()) made.group->add_in_rank_order();
    rank_ = made.group->view().rank;
    size_ = made.group->view().size;
    std::swap(membership_, made);
    aborted_ = false;
  }
  installed_(membership().runtime);
  if (made.runtime) made.runtime->engine().set_farewell("its process group was reconfigured");
  return made;
}

#endif

std::shared_ptr<BackendWatchdog> ProcessGroupRing::watchdog(const c10::intrusive_ptr<c10d::Backend>& foreign) {
  std::lock_guard lock(watchdogs_mutex_);
  for (const auto& watchdog : watchdogs_)
    if (watchdog->watches(foreign.get())) return watchdog;
  return watchdogs_.emplace_back(make_shared_without_python_lock<BackendWatchdog>(group(), foreign));
}

std::shared_ptr<GroupHandle> ProcessGroupRing::group() const {
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  if (reconfigurer_ && reconfigurer_->under_way())
    throw Error(ErrorKind::kState, "a reconfigure of this process group is under way: wait for its Work first");
#endif
  auto group = membership().group;
  if (!group)
    throw Error(ErrorKind::kState,
                "this process group has no members yet: it was made with enable_reconfigure=True, so call "
                "reconfigure first, on every member, with the handles of all");
  return group;
}

std::shared_ptr<GroupHandle> ProcessGroupRing::counted() {
  ++calls_;
  return elastic_ && !UnitScope::active() ? elastic_->group_for_call() : group();
}

Call ProcessGroupRing::begin_call(c10d::OpType type, const char* title, const CallTiming& timing,
                                  const std::vector<at::Tensor>& inputs, std::vector<at::Tensor> outputs) {
  std::shared_ptr<GroupHandle> group = counted();
  auto work = c10::make_intrusive<RingWork>(group->view().rank, type, title, inputs, std::move(outputs));
  work->report_to(hooks_);
  return Call(std::move(group), *devices_, std::move(work), timing);
}

// Several tensors: each is an input, and all of them receive the result.
c10::intrusive_ptr<c10d::Work> ProcessGroupRing::allreduce(std::vector<at::Tensor>& tensors,
                                                           const c10d::AllreduceOptions& opts) {
  require_not_empty("allreduce", tensors);
  require_all_like("allreduce", tensors, tensors[0]);
  if (tensors[0].layout() == at::kSparse) {
    if (opts.reduceOp.op_ != c10d::ReduceOp::SUM)
      refuse("allreduce", "unsupported reduction operation (allreduce of sparse tensors only works with ReduceOp.SUM)");
    if (elastic_ && !UnitScope::active())
      throw Error(ErrorKind::kState,
                  "all_reduce of sparse tensors outside RingDP's steps does not go on without a lost rank: make them "
                  "dense, or leave --elastic out");
    return all_reduce_sparse(counted(), devices_, hooks_, tensors, opts.timeout, opts.asyncOp);
  }
  ReduceOp op = reduce_op_of(opts.reduceOp, "all_reduce");
  DType dtype = dtype_of(tensors[0], "all_reduce");
  require_reduction("allreduce", dtype, op);
  auto buffers = std::make_shared<Buffers>(*devices_, "all_reduce", opts.reduceOp, tensors[0]);
  auto memory = buffers->merged(tensors, op);
  Call call = begin_call(c10d::OpType::ALLREDUCE, "ring:all_reduce", opts, tensors, tensors);
  return call.done(call->all_reduce(memory, dtype, op, call.options(std::move(buffers))));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupRing::all_reduce_watched(at::Tensor buffer, c10d::ReduceOp op,
                                                                    std::shared_ptr<FiniteReport> report,
                                                                    std::vector<double> factors, at::Tensor input) {
  const ReduceOp how = reduce_op_of(op, "all_reduce");
  const DType dtype = dtype_of(buffer, "all_reduce");
  require_reduction("allreduce", dtype, how);
  auto buffers = std::make_shared<Buffers>(*devices_, "all_reduce", op, buffer);
  auto memory = buffers->in_place(buffer);
  Call call = begin_call(c10d::OpType::ALLREDUCE, "ring:all_reduce", {}, {buffer}, {buffer});
  CallOptions options = call.options(std::move(buffers));
  options.factors = std::move(factors);
  if (input.defined()) {
    options.input = {static_cast<const std::byte*>(input.const_data_ptr()), input.nbytes()};
    options.keep_alive =
        std::make_shared<std::pair<std::shared_ptr<void>, at::Tensor>>(std::move(options.keep_alive), std::move(input));
  }
  if (options.staging && report)
    options.after = [after = std::move(options.after), staging = options.staging, report] {
      if (after) after();
      report->own = staging->device_address(report->own);
    };
  options.finite = std::move(report);
  return call.done(call->all_reduce(memory, dtype, how, std::move(options)));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupRing::all_reduce_compressed(at::Tensor buffer,
                                                                       std::vector<CompressedSection> sections,
                                                                       const Compression& compression,
                                                                       std::shared_ptr<FiniteReport> report,
                                                                       std::vector<at::Tensor> residuals) {
  if (!buffer.is_cpu())
    refuse("all_reduce_compressed", "the core encodes tensors on the CPU, not one on " + buffer.device().str() +
                                        "; device tensors are encoded on their device and exchanged as bytes");
  Call call = begin_call(c10d::OpType::ALLREDUCE, "ring:all_reduce_compressed", {}, {buffer}, {buffer});
  CallOptions options = call.options(std::make_shared<Buffers>(*devices_, "all_reduce"));
  options.finite = std::move(report);
  options.keep_alive = std::make_shared<std::pair<at::Tensor, std::vector<at::Tensor>>>(buffer, std::move(residuals));
  return call.done(call->all_reduce_compressed(std::move(sections), compression, std::move(options)));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupRing::allreduce_coalesced(std::vector<at::Tensor>& tensors,
                                                                     const c10d::AllreduceCoalescedOptions& opts) {
  require_not_empty("allreduce_coalesced", tensors);
  ReduceOp op = reduce_op_of(opts.reduceOp, "all_reduce");
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].layout() != tensors[0].layout())
      refuse("allreduce_coalesced", "invalid tensor layout at index " + std::to_string(i) + " (expected " +
                                        c10::str(tensors[0].layout()) + ", got " + c10::str(tensors[i].layout()) + ")");
    if (tensors[i].device() != tensors[0].device())
      refuse("allreduce_coalesced", "tensors must all be on the same device");
    if (tensors[i].scalar_type() != tensors[0].scalar_type())
      refuse("allreduce_coalesced", "tensors must all have the same type");
    if (tensors[i].layout() != at::kStrided) refuse("allreduce_coalesced", "unsupported layout");
    require_reduction("allreduce_coalesced", dtype_of(tensors[i], "all_reduce"), op);
  }
  Call call = begin_call(c10d::OpType::ALLREDUCE_COALESCED, "ring:all_reduce", opts, tensors, tensors);
  // Inputs are the values before the call: if memory is shared, one operation reads all of them first.
  const std::size_t each = share_memory(tensors) ? tensors.size() : 1;  // tensors of one operation
  for (std::size_t begin = 0; begin < tensors.size(); begin += each) {
    auto buffers = std::make_shared<Buffers>(*devices_, "all_reduce", opts.reduceOp, tensors[begin]);
    auto memory = buffers->in_place(at::TensorList(tensors).slice(begin, each));
    call.add(call->all_reduce(memory, dtype_of(tensors[begin], "all_reduce"), op,
                              call.options(std::move(buffers), begin + each == tensors.size())));
  }
  return call.done();
}

c10::intrusive_ptr<c10d::Work> ProcessGroupRing::reduce(std::vector<at::Tensor>& tensors,
                                                        const c10d::ReduceOptions& opts) {
  require_root("reduce", opts.rootRank, size());
  if (opts.rootTensor < 0 || opts.rootTensor >= static_cast<int64_t>(tensors.size()))
    refuse("reduce", "invalid root tensor: " + std::to_string(opts.rootTensor));
  require_one("reduce", tensors);
  ReduceOp op = reduce_op_of(opts.reduceOp, "reduce");
  DType dtype = dtype_of(tensors[0], "reduce");
  require_reduction("reduce", dtype, op);
  auto buffers = std::make_shared<Buffers>(*devices_, "reduce", opts.reduceOp, tensors[0]);
  auto memory = opts.rootRank == rank() ? buffers->in_place(tensors[0]) : buffers->input(tensors[0]);
  Call call = begin_call(c10d::OpType::REDUCE, "ring:reduce", opts, tensors, tensors);
  return call.done(call->reduce(memory, dtype, op, static_cast<int>(opts.rootRank), call.options(std::move(buffers))));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupRing::broadcast(std::vector<at::Tensor>& tensors,
                                                           const c10d::BroadcastOptions& opts) {
  require_root("broadcast", opts.rootRank, size());
  if (opts.rootTensor < 0 || opts.rootTensor >= static_cast<int64_t>(tensors.size()))
    refuse("broadcast", "invalid root tensor: " + std::to_string(opts.rootTensor));
  const at::Tensor& tensor = tensors[static_cast<std::size_t>(opts.rootTensor)];
  require_all_like("broadcast", tensors, tensors[0]);
  DType dtype = dtype_of(tensor, "broadcast");
  auto buffers = std::make_shared<Buffers>(*devices_, "broadcast");
  auto memory = opts.rootRank == rank() ? buffers->input(tensor) : buffers->output(tensor);
  buffers->repeat(tensor, tensors);
  Call call = begin_call(c10d::OpType::BROADCAST, "ring:broadcast", opts, tensors, tensors);
  return call.done(call->broadcast(memory, dtype, static_cast<int>(opts.rootRank), call.options(std::move(buffers))));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupRing::barrier(const c10d::BarrierOptions& opts) {
  Call call = begin_call(c10d::OpType::BARRIER, "ring:barrier", opts, {}, {});
  return call.done(call->barrier(call.options(std::make_shared<Buffers>(*devices_, "barrier"))));
}

// A barrier waits for all ranks, so its error names all missing ones.
void ProcessGroupRing::monitoredBarrier(const c10d::BarrierOptions& opts, bool /*waitAllRanks*/) {
  NamedScope name("monitored_barrier");
  c10d::BarrierOptions waiting = opts;
  waiting.asyncOp = false;
  if (waiting.timeout == std::chrono::milliseconds(0))
    waiting.timeout = std::chrono::milliseconds(1);  // 0: the group's
  barrier(waiting);
}

// ---- Messages ----

namespace {

void require_message(const char* what, const std::vector<at::Tensor>& tensors, int tag) {
  if (tensors.size() != 1) refuse(what, "takes a single tensor, got " + std::to_string(tensors.size()));
  if (tag < 0) refuse(what, "Tag must be nonnegative, not " + std::to_string(tag));
}

}  // namespace

c10::intrusive_ptr<c10d::Work> ProcessGroupRing::send(std::vector<at::Tensor>& tensors, int destination, int tag) {
  require_message("send", tensors, tag);
  auto buffers = std::make_shared<Buffers>(*devices_, "send");
  auto memory = buffers->input(tensors[0]);
  Call call = begin_call(c10d::OpType::SEND, "ring:send", {}, tensors, tensors);
  return call.done(
      call->send(memory, dtype_of(tensors[0], "send"), destination, tag, call.options(std::move(buffers))));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupRing::recv(std::vector<at::Tensor>& tensors, int source, int tag) {
  return receive(tensors, source, tag, c10d::OpType::RECV, "ring:recv");
}

c10::intrusive_ptr<c10d::Work> ProcessGroupRing::recvAnysource(std::vector<at::Tensor>& tensors, int tag) {
  return receive(tensors, PointToPoint::kAny, tag, c10d::OpType::RECVANYSOURCE, "ring:recvAnySource");
}

c10::intrusive_ptr<c10d::Work> ProcessGroupRing::receive(std::vector<at::Tensor>& tensors, int source, int tag,
                                                         c10d::OpType type, const char* title) {
  require_message("recv", tensors, tag);
  auto buffers = std::make_shared<Buffers>(*devices_, "recv");
  auto memory = buffers->output(tensors[0]);
  Call call = begin_call(type, title, {}, tensors, tensors);
  return call.done(call->receive(memory, dtype_of(tensors[0], "recv"), source, tag, call.options(std::move(buffers))));
}

ProcessGroupRing* ring_of(c10d::ProcessGroup& group, c10::DeviceType device) {
  const auto types = group.getDeviceTypes();
  if (std::find(types.begin(), types.end(), c10::Device(device)) == types.end()) return nullptr;
  return dynamic_cast<ProcessGroupRing*>(group.getBackend(device).get());
}

}  // namespace ringdp
