// ProcessGroupNCCL on the fake device, as a program sees torch's: a collective is queued on a stream of its own behind
// what the caller's current stream has to do; wait() lets the current stream wait for it and not the host; its future
// is completed at once; its tensors live until somebody has waited, or it is over; abort() ends what is queued, and
// leaves in the results what was there. What takes longer than the timeout ends the process, after the time that torch
// gives to dumps. A communicator is made at the first collective, for which the host waits.
#include "nccl.h"

#include <ATen/core/ivalue.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/zeros.h>
#include <c10/core/StreamGuard.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <list>
#include <memory>
#include <numeric>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <utility>

#include "exchange.h"
#include "fake.h"

namespace fake_cuda {
namespace {

namespace py = pybind11;

using at::Tensor;
using c10d::OpType;
using Tensors = std::vector<Tensor>;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;
using std::chrono::milliseconds;

constexpr int kDumpsBeforeTheEnd = 4;  // times TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC
constexpr int kDumpMs = 15'000;

// The memory as kernels reach it, in one row; no reference to the tensor.
Tensor flat(const Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.is_cuda() && tensor.is_non_overlapping_and_dense(),
                    "Tensors must be CUDA and dense, and contiguous");
  auto* memory = Machine::here().twin(static_cast<std::byte*>(tensor.storage().mutable_data()));
  if (memory != nullptr) memory += tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
  return at::from_blob(memory, {tensor.numel()}, at::TensorOptions().dtype(tensor.scalar_type()));
}

Tensors flats(const Tensors& tensors) {
  Tensors out;
  for (const Tensor& one : tensors) out.push_back(flat(one));
  return out;
}

std::string describe(const char* name, const Tensors& tensors) {
  std::string text = name;
  for (const Tensor& one : tensors) text += c10::str(" ", one.scalar_type(), "[", one.numel(), "]");
  return text;
}

void reduce_into(Tensor& sum, const Tensor& next, c10d::ReduceOp op) {
  switch (op) {
    case c10d::ReduceOp::PRODUCT:
      sum.mul_(next);
      break;
    case c10d::ReduceOp::MIN:
      sum.copy_(at::minimum(sum, next));
      break;
    case c10d::ReduceOp::MAX:
      sum.copy_(at::maximum(sum, next));
      break;
    default:
      sum.add_(next);
  }
}

// As NCCL's average of floats: each rank's share is multiplied before it is added.
Tensor reduced(Tensors parts, c10d::ReduceOp op) {
  const bool average = op == c10d::ReduceOp::AVG;
  const double factor = 1.0 / static_cast<double>(parts.size());
  if (average && parts[0].is_floating_point())
    for (Tensor& one : parts) one.mul_(factor);
  Tensor sum = parts[0].clone();
  for (std::size_t rank = 1; rank < parts.size(); ++rank) reduce_into(sum, parts[rank], op);
  if (average && !sum.is_floating_point()) sum.div_(static_cast<int64_t>(parts.size()), "trunc");
  return sum;
}

void check_op(const c10d::ReduceOp& op) {
  TORCH_CHECK_VALUE(op == c10d::ReduceOp::SUM || op == c10d::ReduceOp::AVG || op == c10d::ReduceOp::PRODUCT ||
                        op == c10d::ReduceOp::MIN || op == c10d::ReduceOp::MAX,
                    "Cannot use this ReduceOp with NCCL");
}

// What keeps a collective's tensors.
struct Shelf {
  std::mutex mutex;
  Tensors tensors;
  std::atomic<bool> over = false;

  void clear() {
    Tensors dropped;
    const std::lock_guard lock(mutex);
    dropped.swap(tensors);
  }
};

class NcclWork final : public c10d::Work {
 public:
  NcclWork(int rank, OpType type, Tensors results, std::shared_ptr<Shelf> shelf)
      : c10d::Work(rank, type), results_(std::move(results)), shelf_(std::move(shelf)) {}

  void queued(MarkPointer end, const c10::Stream& stream, std::shared_ptr<Exchange> exchange) {
    end_ = std::move(end);
    exchange_ = std::move(exchange);
    const c10::StreamGuard guard(stream);
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                       std::vector<c10::Device>{kDevice});
    future_->markCompleted(c10::IValue(results_));
  }
  void be_barrier() { barrier_ = true; }
  void fail(const std::string& why) {
    const std::lock_guard lock(mutex_);
    exception_ = std::make_exception_ptr(C10_BUILD_ERROR(DistBackendError, why));
  }

  bool isCompleted() override { return exception() != nullptr || Machine::here().reached(end_); }
  bool wait(milliseconds timeout) override {
    Machine::here().queue_wait(current_stream(), end_);
    shelf_->clear();
    if (timeout != kNoTimeout) wait_on_host(timeout);
    if (barrier_) Machine::here().wait_for(end_);
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  Tensors result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  void wait_on_host(milliseconds timeout) {
    const auto end = std::chrono::steady_clock::now() + timeout;
    while (!isCompleted() && std::chrono::steady_clock::now() < end) std::this_thread::sleep_for(milliseconds(1));
    if (isCompleted()) return;
    exchange_->abort();
    fail("Watchdog caught collective operation timeout: the wait for it timed out");
    std::rethrow_exception(exception());
  }

  const Tensors results_;
  const std::shared_ptr<Shelf> shelf_;
  MarkPointer end_;
  std::shared_ptr<Exchange> exchange_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  bool barrier_ = false;
};

c10d::Backend::Options with_name() { return c10d::Backend::Options("nccl"); }

std::atomic<bool> doomed = false;

// As torch's thread is joined, where a group is left or no longer referred to.
void wait_for_the_watchdog() {
  while (doomed) std::this_thread::sleep_for(milliseconds(100));
}

// As torch's watchdog, which does not hear of an abort any more once it has seen the timeout.
void end_process_later(const std::string& why) {
  const char* given = std::getenv("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC");
  const milliseconds time(kDumpsBeforeTheEnd * (given != nullptr ? std::atoi(given) : kDumpMs));
  std::fprintf(stderr, "fake NCCL: %s\n", why.c_str());
  doomed = true;
  std::thread([time] {
    std::this_thread::sleep_for(time);
    std::fprintf(stderr, "fake NCCL: to avoid data inconsistency, the process ends\n");
    std::abort();
  }).detach();
}

class Nccl final : public c10d::Backend {
 public:
  struct Options : c10d::Backend::Options {
    Options() : c10d::Backend::Options(with_name()) {}
    bool is_high_priority_stream = false;
  };

  Nccl(c10::intrusive_ptr<c10d::Store> store, int rank, int size, c10::intrusive_ptr<Options> options)
      : c10d::Backend(rank, size),
        store_(std::move(store)),
        options_(std::move(options)),
        exchange_(std::make_shared<Exchange>(rank, size)) {}
  ~Nccl() override {
    if (!closed_) exchange_->abort();
    wait_for_the_watchdog();
  }

  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  void setTimeout(milliseconds timeout) override { options_->timeout = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return rounds_; }

  void abort() override {
    closed_ = true;
    exchange_->abort();
  }
  // Waits for all that is queued, as ncclCommFinalize does.
  void shutdown() override {
    if (!closed_ && last_) Machine::here().wait_for(last_);
    closed_ = true;
    wait_for_the_watchdog();
  }

  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    check_op(options.reduceOp);
    const auto take = [op = options.reduceOp](const auto& from, const Tensors& results) {
      for (std::size_t i = 0; i < results.size(); ++i) results[i].copy_(reduced(column(from, i), op));
    };
    return collective(OpType::ALLREDUCE, options.asyncOp, describe("all_reduce", tensors), tensors, tensors, take);
  }
  WorkPointer allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }

  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    check_op(options.reduceOp);
    const auto take = [op = options.reduceOp, mine = options.rootRank == getRank()](const auto& from,
                                                                                    const Tensors& results) {
      if (mine) results[0].copy_(reduced(column(from, 0), op));
    };
    return collective(OpType::REDUCE, options.asyncOp, describe("reduce", tensors), tensors, tensors, take);
  }

  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const auto take = [root = options.rootRank](const auto& from, const Tensors& results) {
      results[0].copy_(from[static_cast<std::size_t>(root)][0]);
    };
    return collective(OpType::BROADCAST, options.asyncOp, describe("broadcast", tensors), tensors, tensors, take);
  }

  WorkPointer allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                        const c10d::AllgatherOptions& options) override {
    const auto take = [](const auto& from, const Tensors& results) {
      for (std::size_t rank = 0; rank < results.size(); ++rank) results[rank].copy_(from[rank][0]);
    };
    return collective(OpType::ALLGATHER, options.asyncOp, "all_gather", inputs, outputs.at(0), take);
  }
  WorkPointer _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return allgather_into_tensor_coalesced(outputs, inputs, options);
  }
  WorkPointer allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& options) override {
    for (std::size_t i = 0; i < inputs.size(); ++i)
      TORCH_CHECK_VALUE(
          outputs.at(i).numel() == inputs[i].numel() * getSize() && outputs[i].scalar_type() == inputs[i].scalar_type(),
          "output tensor must have the type of the input and world_size times its size");
    const auto take = [](const auto& from, const Tensors& results) {
      for (std::size_t i = 0; i < results.size(); ++i)
        for (std::size_t rank = 0; rank < from.size(); ++rank)
          results[i].chunk(static_cast<int64_t>(from.size()))[rank].copy_(from[rank][i]);
    };
    return collective(OpType::_ALLGATHER_BASE, options.asyncOp, describe("all_gather_into", inputs), inputs, outputs,
                      take);
  }

  WorkPointer reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                             const c10d::ReduceScatterOptions& options) override {
    check_op(options.reduceOp);
    const auto take = [op = options.reduceOp, rank = static_cast<std::size_t>(getRank())](const auto& from,
                                                                                          const Tensors& results) {
      results[0].copy_(reduced(column(from, rank), op));
    };
    return collective(OpType::REDUCE_SCATTER, options.asyncOp, describe("reduce_scatter", inputs.at(0)), inputs[0],
                      outputs, take);
  }
  WorkPointer _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }
  WorkPointer reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                              const c10d::ReduceScatterOptions& options) override {
    check_op(options.reduceOp);
    for (std::size_t i = 0; i < inputs.size(); ++i)
      TORCH_CHECK_VALUE(inputs[i].numel() == outputs.at(i).numel() * getSize(),
                        "input tensor must be the same size as output size times world size");
    const auto take = [op = options.reduceOp, rank = getRank()](const auto& from, const Tensors& results) {
      for (std::size_t i = 0; i < results.size(); ++i) {
        Tensors parts;
        for (const Tensor& one : column(from, i))
          parts.push_back(one.narrow(0, rank * results[i].numel(), results[i].numel()));
        results[i].copy_(reduced(std::move(parts), op));
      }
    };
    return collective(OpType::_REDUCE_SCATTER_BASE, options.asyncOp, describe("reduce_scatter_into", inputs), inputs,
                      outputs, take);
  }

  WorkPointer alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& output_splits,
                            std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) override {
    Tensors outputs = split(output, output_splits), inputs = split(input, input_splits);
    return alltoall(outputs, inputs, options);
  }
  WorkPointer alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    const auto take = [mine = static_cast<std::size_t>(getRank())](const auto& from, const Tensors& results) {
      for (std::size_t rank = 0; rank < from.size(); ++rank) results[rank].copy_(from[rank][mine]);
    };
    return collective(OpType::ALLTOALL_BASE, options.asyncOp, "all_to_all", inputs, outputs, take);
  }

  WorkPointer gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    const auto take = [](const auto& from, const Tensors& results) {
      for (std::size_t rank = 0; rank < results.size(); ++rank) results[rank].copy_(from[rank][0]);
    };
    return collective(OpType::GATHER, options.asyncOp, "gather", inputs,
                      options.rootRank == getRank() ? outputs.at(0) : Tensors(), take);
  }
  WorkPointer scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    const auto take = [root = static_cast<std::size_t>(options.rootRank), mine = static_cast<std::size_t>(getRank())](
                          const auto& from, const Tensors& results) { results[0].copy_(from[root][mine]); };
    return collective(OpType::SCATTER, options.asyncOp, "scatter",
                      options.rootRank == getRank() ? inputs.at(0) : Tensors(), outputs, take);
  }

  // The host waits for it.
  WorkPointer barrier(const c10d::BarrierOptions& options) override {
    Tensors tensors{at::zeros({1}, at::TensorOptions().device(kDevice))};
    c10d::AllreduceOptions sum;
    sum.asyncOp = options.asyncOp;
    const WorkPointer work = allreduce(tensors, sum);
    if (work)
      static_cast<NcclWork&>(*work).be_barrier();
    else
      Machine::here().wait_for_stream(current_stream());
    return work;
  }

 private:
  using FromAll = std::vector<Tensors>;  // [rank][buffer], in one row each

  static Tensors column(const FromAll& from, std::size_t i) {
    Tensors out;
    for (const Tensors& one : from) out.push_back(one[i]);
    return out;
  }

  // By rows, for each rank.
  Tensors split(const Tensor& tensor, const std::vector<int64_t>& sizes) const {
    if (!sizes.empty()) return tensor.split_with_sizes(sizes);
    TORCH_CHECK_VALUE(tensor.size(0) % getSize() == 0, "Tensor's dim 0 does not divide equally across group size");
    return tensor.split(std::max<int64_t>(tensor.size(0) / getSize(), 1));
  }

  void connect() {
    const std::lock_guard lock(connecting_);
    if (std::exchange(connected_, true)) return;
    exchange_->connect(*store_, options_->timeout);
    stream_ = Machine::here().next_stream();
  }

  void drop_finished_shelves() {
    std::list<std::shared_ptr<Shelf>> finished;
    const std::lock_guard lock(queueing_);
    for (auto it = shelves_.begin(); it != shelves_.end();) {
      const auto next = std::next(it);
      if ((*it)->over) finished.splice(finished.end(), shelves_, it);
      it = next;
    }
  }

  WorkPointer collective(OpType type, bool asynchronous, const std::string& what, const Tensors& given,
                         const Tensors& results, std::function<void(const FromAll&, const Tensors&)> take) {
    TORCH_CHECK_WITH(DistBackendError, !closed_, "NCCL communicator was aborted on rank ", getRank());
    Machine::here().throw_if_failed();
    connect();
    drop_finished_shelves();
    const auto shelf = std::make_shared<Shelf>();
    if (asynchronous) {
      shelf->tensors = given;
      shelf->tensors.insert(shelf->tensors.end(), results.begin(), results.end());
    }
    auto work = c10::make_intrusive<NcclWork>(getRank(), type, results, shelf);
    const std::lock_guard lock(queueing_);
    shelves_.push_back(shelf);
    const StreamId stream = asynchronous ? stream_ : current_stream();
    if (asynchronous) Machine::here().queue_wait(stream, Machine::here().record(current_stream()));
    const uint64_t round = rounds_++;
    const auto late = [what, round, weak = c10::weak_intrusive_ptr<NcclWork>(work)] {
      const std::string why = c10::str("Watchdog caught collective operation timeout: #", round, " ", what);
      if (const auto alive = weak.lock()) alive->fail(why);
      end_process_later(why);
    };
    const c10::ScalarType type_of_results = (results.empty() ? given : results).at(0).scalar_type();
    Machine::here().queue_apart(
        stream, [=, exchange = exchange_, timeout = options_->timeout, from = flats(given), to = flats(results)] {
          Exchange::Part mine{what, {}};
          for (const Tensor& one : from) {
            const auto* first = static_cast<const std::byte*>(one.const_data_ptr());
            mine.buffers.emplace_back(first, first + one.nbytes());
          }
          std::vector<Exchange::Part> all = exchange->swap(round, std::move(mine), timeout, late);
          FromAll rows;
          for (Exchange::Part& part : all) {
            Tensors& row = rows.emplace_back();
            for (std::size_t i = 0; i < part.buffers.size(); ++i) {
              const auto dtype = i < from.size() ? from[i].scalar_type() : type_of_results;
              const auto count = static_cast<int64_t>(part.buffers[i].size() / c10::elementSize(dtype));
              row.push_back(at::from_blob(part.buffers[i].data(), {count}, at::TensorOptions().dtype(dtype)));
            }
          }
          if (!rows.empty()) take(rows, to);
          shelf->over = true;
        });
    last_ = Machine::here().record(stream);
    exchange_->expect(round, last_);
    work->queued(last_, c10::Stream(c10::Stream::UNSAFE, kDevice, stream), exchange_);
    return asynchronous ? WorkPointer(std::move(work)) : nullptr;
  }

  const c10::intrusive_ptr<c10d::Store> store_;
  const c10::intrusive_ptr<Options> options_;
  const std::shared_ptr<Exchange> exchange_;
  std::mutex connecting_;
  bool connected_ = false;
  StreamId stream_ = 0;
  std::mutex queueing_;
  std::list<std::shared_ptr<Shelf>> shelves_;
  uint64_t rounds_ = 0;
  MarkPointer last_;
  std::atomic<bool> closed_ = false;
};

}  // namespace

void bind_nccl(py::module_& module) {
  using Options = Nccl::Options;
  py::class_<Nccl, c10d::Backend, c10::intrusive_ptr<Nccl>> made(module, "ProcessGroupNCCL");
  py::class_<Options, c10d::Backend::Options, c10::intrusive_ptr<Options>>(made, "Options")
      .def(py::init<>())
      .def_readwrite("is_high_priority_stream", &Options::is_high_priority_stream);
  made.def(py::init<c10::intrusive_ptr<c10d::Store>, int, int, c10::intrusive_ptr<Options>>())
      .def_property_readonly("options", &Nccl::getBackendOptions)
      .def("_group_start", [](const Nccl&) {})  // torch puts the aborts of all groups between these
      .def("_group_end", [](const Nccl&) {});
}

}  // namespace fake_cuda
