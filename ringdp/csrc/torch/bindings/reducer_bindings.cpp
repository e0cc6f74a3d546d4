// ringdp._C.Reducer. Every call releases the GIL: a backward thread may hold the reducer's lock while its Python hook
// waits for the GIL.
#include <torch/csrc/distributed/c10d/python_comm_hook.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <torch/csrc/distributed/c10d/default_comm_hooks.hpp>
#include <tuple>
#include <vector>

#include "torch/backend/steps_made.h"
#include "torch/bindings/bindings.h"
#include "torch/bindings/without_python_lock.h"
#include "torch/reducer/messages.h"
#include "torch/reducer/reducer.h"
#include "torch/reducer/reducer_group.h"

namespace ringdp {
namespace {

namespace py = pybind11;
using NoGil = py::call_guard<py::gil_scoped_release>;
using GroupPointer = c10::intrusive_ptr<c10d::ProcessGroup>;
using PythonFuture = torch::jit::PythonFutureWrapper;

void replace_parameters(Reducer& reducer, std::vector<ModuleParameter> parameters) {
  const ReductionPlan before = reducer.replace_parameters(std::move(parameters));  // released when the lock is free
}

std::shared_ptr<Reducer> make_reducer(std::vector<ModuleParameter> parameters, GroupPointer group,
                                      ReducerOptions options) {
  // Not by a call guard: pybind11 would then register the new object without the GIL, too.
  py::gil_scoped_release no_gil;
  return make_shared_without_python_lock<Reducer>(std::move(parameters), std::move(group), std::move(options));
}

// A part of a reducer, with a class of its own in Python. Each call of its methods holds the reducer's lock.
template <auto Get>
struct Part {
  std::shared_ptr<Reducer> reducer;

  auto lock() const { return Get(*reducer); }
};

// A method of the part, for `def`.
template <auto Get, class Result, class Class, class... Args>
auto of(Result (Class::*method)(Args...)) {
  return [method](const Part<Get>& part, Args... args) -> std::decay_t<Result> {
    auto locked = part.lock();
    return ((*locked).*method)(std::forward<Args>(args)...);
  };
}

template <auto Get, class Result, class Class, class... Args>
auto of(Result (Class::*method)(Args...) const) {
  return [method](const Part<Get>& part, Args... args) -> std::decay_t<Result> {
    auto locked = part.lock();
    return ((*locked).*method)(std::forward<Args>(args)...);
  };
}

Reducer::Locked<const Plan> plan(Reducer& reducer) { return reducer.plan(); }
Reducer::Locked<StepReport> report(Reducer& reducer) { return reducer.report(); }
Reducer::Locked<JoinShadow> join_shadow(Reducer& reducer) { return reducer.join(); }
Reducer::Locked<OverflowReport> overflow(Reducer& reducer) { return reducer.exchange().part(&Exchange::overflow); }
Reducer::Locked<Forwards> forwards(Reducer& reducer) { return reducer.exchange().part(&Exchange::forwards); }
Reducer::Locked<GradientCompression> compression(Reducer& reducer) {
  return reducer.exchange().part(&Exchange::compression);
}

// Called by torch's pipeline stages, Lightning's manual optimization and Accelerate's trigger_sync_in_backward,
// between forward and backward and without `sync`: that backward synchronises, even if its forward ran under no_sync.
// A backward in two halves (zero-bubble schedules) has no graph left in its second half, where the gradients of the
// parameters come from autograd.grad, and nothing would be averaged.
void prepare_for_backward(Reducer& reducer, const std::vector<at::Tensor>& outputs, const std::optional<bool>& sync,
                          const std::optional<bool>& training) {
  const auto in_graph = [](const at::Tensor& output) { return output.requires_grad(); };
  TORCH_CHECK(sync || outputs.empty() || std::any_of(outputs.begin(), outputs.end(), in_graph),
              "RingDP cannot average the gradients of a pipeline stage whose backward is split in two halves (inputs "
              "first, weights later): autograd does not report those of the weights. Use a schedule with whole "
              "backwards: ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B or ScheduleLoopedBFS.");
  if (!sync) reducer.demand_sync();
  reducer.prepare_for_backward(outputs, sync.value_or(true), training);
}

py::dict stats_as_dict(const Part<report>& part) {
  ReducerStats stats;
  {
    py::gil_scoped_release no_gil;
    stats = part.lock()->stats();
  }
  py::dict result;
  result["steps"] = stats.steps;
  result["buckets"] = stats.buckets;
  result["bytes"] = stats.bytes;
  result["backward_s"] = stats.backward_s;
  result["exposed_wait_s"] = stats.exposed_wait_s;
  result["total_backward_s"] = stats.total_backward_s;
  result["total_exposed_wait_s"] = stats.total_exposed_wait_s;
  return result;
}

void set_reductions(Reducer& reducer, std::vector<std::shared_ptr<Reduction>> reductions, std::vector<int> reduction_of,
                    std::vector<uint32_t> owner_offsets, bool exchange_codes) {
  ReductionPlan plan{std::move(reductions), std::move(reduction_of), std::move(owner_offsets), exchange_codes};
  reducer.set_reductions(plan);
}

py::list rows_as_dicts(const Part<report>& part) {
  std::vector<BucketRow> rows;
  {
    py::gil_scoped_release no_gil;
    rows = part.lock()->bucket_rows();
  }
  py::list result;
  for (const BucketRow& row : rows) {
    py::dict one;
    one["index"] = row.index;
    one["name"] = row.name;
    one["reduction"] = row.reduction;
    one["numel"] = row.numel;
    one["bytes_before"] = row.bytes_before;
    one["bytes_after"] = row.bytes_after;
    one["free"] = row.free;
    one["parameters"] = row.parameters;
    one["launched_s"] = row.launched_s;
    one["coding_s"] = row.coding_s;
    one["seconds"] = row.seconds;
    one["exposed_s"] = row.exposed_s;
    result.append(one);
  }
  return result;
}

// DDP's logging data of a step, in ns of the steady clock.
py::dict times_as_dict(const Part<report>& part) {
  ReducerStats stats;
  {
    py::gil_scoped_release no_gil;
    stats = part.lock()->stats();
  }
  py::dict result;
  result["began_ns"] = stats.began_ns;
  result["launched_ns"] = stats.launched_ns;
  result["computed_ns"] = stats.computed_ns;
  result["finished_ns"] = stats.finished_ns;
  result["unused_bytes"] = stats.unused_bytes;
  return result;
}

// The last step in one call: number of steps, bytes of gradients, whether all of them were finite, and the row.
std::tuple<int64_t, int64_t, std::optional<bool>, std::vector<float>> last_step(Reducer& reducer) {
  StepRow row;
  int64_t steps = 0, bytes = 0;
  std::optional<bool> finite;
  {
    py::gil_scoped_release no_gil;
    {
      const auto report = reducer.report();
      row = report->last_row();
      steps = report->stats().steps;
      bytes = report->stats().bytes;
    }
    finite = reducer.exchange()->overflow.finite();
  }
  return {steps, bytes, finite, std::vector<float>(row.begin(), row.end())};
}

void set_facts(const Part<report>& part, const py::bytes& facts) {
  const std::string_view bytes = facts;
  StepReport::Bytes copy(bytes.begin(), bytes.end());
  py::gil_scoped_release no_gil;
  part.lock()->set_facts(copy);
}

std::optional<std::vector<py::bytes>> take_window(const Part<report>& part) {
  std::optional<std::vector<StepReport::Bytes>> window;
  {
    py::gil_scoped_release no_gil;
    window = part.lock()->take();
  }
  if (!window) return std::nullopt;
  std::vector<py::bytes> all;
  for (const StepReport::Bytes& one : *window) all.emplace_back(reinterpret_cast<const char*>(one.data()), one.size());
  return all;
}

// Keeps the text of a call's exception for DDP's logging data.
template <auto Function>
auto noting(Reducer& reducer) {
  try {
    return std::invoke(Function, reducer);
  } catch (...) {
    reducer.note_thrown(current_error_text());
    throw;
  }
}

// torch's PythonCommHook crashes if the hook returns None.
py::object without_none(py::object hook) {
  return py::cpp_function([hook = std::move(hook)](const py::object& state, const py::object& bucket) {
    py::object future = hook(state, bucket);
    if (future.is_none())
      throw py::type_error("the communication hook returned None: it has to return a torch.futures.Future");
    return future;
  });
}

void register_python_hook(Reducer& reducer, py::object state, py::object hook) {
  auto owned = std::make_unique<c10d::PythonCommHook>(std::move(state), without_none(std::move(hook)));
  py::gil_scoped_release no_gil;
  reducer.register_hook(std::move(owned));
}

void register_builtin_hook(Reducer& reducer, c10d::BuiltinCommHookType which) {
  const bool half = which == c10d::BuiltinCommHookType::FP16_COMPRESS;
  std::unique_ptr<c10d::CommHookInterface> hook = make_builtin_hook(
      reducer.exchange()->group.process_group(), half ? BuiltinHook::kFp16Compress : BuiltinHook::kAllReduce);
  reducer.register_hook(std::move(hook));
}

void install_futures(Reducer& reducer, const std::vector<std::shared_ptr<PythonFuture>>& futures) {
  std::vector<c10::intrusive_ptr<c10::ivalue::Future>> plain;
  for (const auto& future : futures) plain.push_back(future->fut);
  py::gil_scoped_release no_gil;
  reducer.install_futures(std::move(plain));
}

std::shared_ptr<PythonFuture> run_hook(Reducer& reducer, c10d::GradBucket& bucket) {
  return std::make_shared<PythonFuture>(reducer.join()->shadow(bucket));
}

std::shared_ptr<PythonFuture> run_sum(Reducer& reducer, const c10d::GradBucket& bucket) {
  return std::make_shared<PythonFuture>(reducer.sum(bucket));
}

// Residuals change between two steps alone.
constexpr const char* kNotTaken = "residuals cannot be taken during a backward";
constexpr const char* kNotSet = "residuals cannot be set during a backward";
using ByParameter = GradientCompression::ByParameter;

// `index` counts the parameters that required grad at construction.
void gradient_arrived(Reducer& reducer, std::size_t index) {
  const auto plan = reducer.plan();
  if (const auto parameter = plan->parameters.since_construction(index)) reducer.gradient_arrived(*parameter);
}

void choose_reductions(Reducer& reducer, const std::vector<int>& reduction_of_bucket) {
  reducer.choose(reduction_of_bucket);
}

ByParameter take_residuals(const Part<compression>& part, const std::vector<std::size_t>& parameters) {
  return part.reducer->residuals(kNotTaken)->take_residuals(parameters);
}

void give_residuals(const Part<compression>& part, const ByParameter& residuals) {
  part.reducer->residuals(kNotSet)->give_residuals(residuals);
}

void set_residuals(const Part<compression>& part, const ByParameter& residuals) {
  part.reducer->residuals(kNotSet)->set_residuals(residuals);
}

void set_group(Reducer& reducer, GroupPointer group, bool average, bool names_compared) {
  reducer.set_group(std::move(group), average, names_compared);
}

// (parameter of the module, under no_sync, changed since) of each, their bytes, and the bytes sent since the first one
// came; -1 where that is not known.
using Unaveraged = std::tuple<std::vector<std::tuple<std::size_t, bool, bool>>, std::size_t, int64_t>;
Unaveraged unaveraged(Reducer& reducer) {
  const auto buckets = reducer.buckets();
  Unaveraged result{{}, 0, -1};
  for (const LeftOverGradients::Parameter& one : buckets->left_over.list()) {
    std::get<0>(result).emplace_back(one.param_index, one.under_no_sync, one.changed);
    std::get<1>(result) += one.bytes;
  }
  const ReducerGroup& group = reducer.exchange()->group;
  if (group.ring(c10::kCPU) != nullptr)
    std::get<2>(result) = static_cast<int64_t>(group.bytes_sent() - buckets->left_over.traffic());
  return result;
}

void remove_hooks(Reducer& reducer) { reducer.buckets()->hooks.remove(); }

std::vector<BucketMembers> layout(const Part<plan>& part) { return part.lock()->buckets.buckets(); }

std::vector<std::size_t> bucket_bytes(const Part<plan>& part) {
  const auto plan = part.lock();
  std::vector<std::size_t> result;
  for (std::size_t i = 0; i < plan->buckets.buckets().size(); ++i) result.push_back(plan->buckets.bytes(i));
  return result;
}

// The names of their operations.
std::vector<std::string> bucket_names(const Part<plan>& part) {
  const auto plan = part.lock();
  const std::vector<BucketMembers>& buckets = plan->buckets.buckets();
  std::vector<std::string> result;
  for (std::size_t i = 0; i < buckets.size(); ++i)
    result.push_back(describe_bucket(i, buckets[i], plan->parameters.names()));
  return result;
}

double incoming_factor(Reducer& reducer) { return reducer.exchange()->weights.factors().incoming; }

// For torch's Join.
void set_forward_work(Reducer& reducer, c10::intrusive_ptr<c10d::Work> work, bool divide_by_all_ranks) {
  reducer.join()->set_forward_work(std::move(work), divide_by_all_ranks);
}

std::vector<c10d::GradBucket> zero_buckets(Reducer& reducer) { return reducer.join()->zero_buckets(); }

template <auto Get>
Part<Get> part_of(const std::shared_ptr<Reducer>& reducer) {
  return {reducer};
}

void bind_options(py::module_& module) {
  py::class_<ModuleParameter>(module, "ModuleParameter", "A parameter of a module, as a Reducer gets it.")
      .def(py::init([](at::Tensor tensor, std::string name, std::string used_in, bool sparse) {
             return ModuleParameter{std::move(tensor), std::move(name), std::move(used_in), sparse};
           }),
           py::arg("tensor"), py::arg("name"), py::arg("used_in"), py::arg("sparse") = false);
  py::class_<ReducerOptions>(module, "ReducerOptions", "What a Reducer is made with.")
      .def(py::init<>())
      .def_readwrite("caps_bytes", &ReducerOptions::caps_bytes)
      .def_readwrite("average", &ReducerOptions::average)
      .def_readwrite("own_gradients", &ReducerOptions::own_gradients)
      .def_readwrite("skip_unused", &ReducerOptions::skip_unused)
      .def_readwrite("names_compared", &ReducerOptions::names_compared)
      .def_readwrite("graph_shows_unused", &ReducerOptions::graph_shows_unused)
      .def_readwrite("reduce_dtype", &ReducerOptions::reduce_dtype)
      .def_readwrite("host_control", &ReducerOptions::host_control)
      .def_readwrite("gradient_pool", &ReducerOptions::gradient_pool)
      .def_readwrite("weighted", &ReducerOptions::weighted)
      .def_readwrite("report_every", &ReducerOptions::report_every)
      .def_readwrite("alone", &ReducerOptions::alone)
      .def(
          "expect_unused",
          [](ReducerOptions& options, bool expected) {
            options.unused = expected ? UnusedParameters::kExpected : UnusedParameters::kForbidden;
          },
          py::arg("expected"), "DDP's find_unused_parameters was given, with this value.");
}

void bind_parts(py::module_& module) {
  py::class_<Part<plan>>(module, "ReducerPlan", "Which gradient is in which bucket.")
      .def(
          "find",
          [](const Part<plan>& part, const std::vector<at::Tensor>& tensors) {
            return part.lock()->parameters.find(tensors);
          },
          py::arg("tensors"), NoGil())
      .def("layout", &layout, NoGil())
      .def("bucket_bytes", &bucket_bytes, NoGil())
      .def("bucket_names", &bucket_names, NoGil())
      .def("rebuilt", [](const Part<plan>& part) { return part.lock()->buckets.rebuilt(); }, NoGil());
  py::class_<Part<overflow>>(module, "ReducerOverflow", "Whether gradients were finite.")
      .def("watch", of<overflow>(&OverflowReport::watch), py::arg("watching"), NoGil())
      .def("finite", of<overflow>(&OverflowReport::finite), NoGil())
      .def("non_finite", of<overflow>(&OverflowReport::non_finite), NoGil())
      .def("own_non_finite", of<overflow>(&OverflowReport::own_non_finite), NoGil());
  py::class_<Part<compression>>(module, "ReducerCompression",
                                "Residuals, and the loss scale that they are measured in.")
      .def("take_residuals", &take_residuals, py::arg("parameters"), NoGil())
      .def("give_residuals", &give_residuals, py::arg("residuals"), NoGil())
      .def("residuals", of<compression>(&GradientCompression::residuals), NoGil())
      .def("set_residuals", &set_residuals, py::arg("residuals"), NoGil())
      .def("set_loss_scale", of<compression>(&GradientCompression::set_loss_scale), py::arg("scale"), NoGil());
  py::class_<Part<forwards>>(module, "ReducerForwards", "The forwards since the last step.")
      .def("note_of", of<forwards>(&Forwards::note_of), py::arg("training"), NoGil(),
           "What the name of an operation in a forward ends in; nearly always nothing.")
      .def("begin_closure", of<forwards>(&Forwards::begin_closure), NoGil(),
           "An optimizer evaluates a closure from now on, which may run several backwards.")
      .def("end_closure", of<forwards>(&Forwards::end_closure), NoGil());
  py::class_<Part<report>>(module, "ReducerReport", "What the steps have cost.")
      .def("stats", &stats_as_dict)
      .def("times", &times_as_dict)
      .def("bucket_rows", &rows_as_dicts)
      .def("note_forward", of<report>(&StepReport::note_forward), NoGil())
      .def("set_facts", &set_facts, py::arg("facts"))
      .def("take_window", &take_window)
      .def(
          "steps", [](const Part<report>& part) { return part.lock()->stats().steps; }, NoGil(),
          "How many backwards have synchronised.");
  py::class_<Part<join_shadow>>(module, "ReducerJoin", "What a rank without input repeats.")
      .def("divide_by", of<join_shadow>(&JoinShadow::divide_by), py::arg("ranks_with_input"), NoGil())
      .def("shadow_weight", of<join_shadow>(&JoinShadow::shadow_weight), NoGil())
      .def("shadow_used_map", of<join_shadow>(&JoinShadow::shadow_used_map), NoGil());
}

}  // namespace

void bind_reducer(py::module_& module) {
  module.def("note_optimizer", &StepPhases::note_optimizer, "An optimizer has ended its step.");
  module.def("most_steps", &most_steps,
             "Backwards that averaged gradients, of the wrapper of this process that had most.");
  bind_options(module);
  bind_parts(module);
  py::class_<Reducer, std::shared_ptr<Reducer>>(module, "Reducer", "Averages gradients during backward; see RingDP.")
      .def(py::init(&make_reducer), py::arg("parameters"), py::arg("process_group"), py::arg("options"))
      .def_property_readonly("plan", &part_of<plan>)
      .def_property_readonly("overflow", &part_of<overflow>)
      .def_property_readonly("compression", &part_of<compression>)
      .def_property_readonly("forwards", &part_of<forwards>)
      .def_property_readonly("report", &part_of<report>)
      .def_property_readonly("join", &part_of<join_shadow>)
      .def("prepare_for_forward", &noting<&Reducer::prepare_for_forward>, NoGil())
      .def("called_in_backward", &Reducer::called_in_backward, NoGil(),
           "A forward that is repeated inside a backward begins: checkpointing does that.")
      .def("replace_parameters", &replace_parameters, py::arg("parameters"), NoGil())
      .def("prepare_for_backward", &prepare_for_backward, py::arg("outputs"), py::arg("sync") = py::none(),
           py::arg("training") = py::none(), NoGil())
      .def("register_comm_hook", &register_python_hook, py::arg("state"), py::arg("hook"))
      .def("register_builtin_comm_hook", &register_builtin_hook, py::arg("hook"), NoGil())
      .def("set_reductions", &set_reductions, py::arg("reductions"), py::arg("reduction_of"), py::arg("owner_offsets"),
           py::arg("exchange_codes") = false, NoGil())
      .def("choose", &choose_reductions, py::arg("reduction_of_bucket"), NoGil())
      .def("announce_weight", &Reducer::announce_weight, py::arg("weight"), py::arg("sync"),
           py::arg("training") = py::none(), NoGil())
      .def("begin_again", &Reducer::begin_again, py::arg("step"), NoGil(),
           "The elastic job has new members: its steps are counted from this one, with buckets that are not ordered.")
      .def("repeat_batch", &Reducer::repeat_batch, NoGil(),
           "The forwards up to the end of this step are of the batch whose forward has failed.")
      .def("incoming_factor", &incoming_factor, NoGil())
      .def("zero_gradients", &Reducer::zero_gradients, NoGil())
      .def("has_unaveraged", &Reducer::any_left_over, "Whether a gradient stayed in some .grad that was not averaged.")
      .def("unaveraged", &unaveraged, NoGil(),
           "Each: (parameter, under no_sync, .grad changed since); then their bytes, and the bytes sent since, or -1.")
      .def("last_step", &last_step)
      .def(
          "view", [](Reducer& reducer) { return reducer.buckets()->repair.view(); }, NoGil(),
          "In an elastic job the number of the view whose members' gradients the last step has averaged; else 0.")
      .def("arrivals", &Reducer::arrivals, NoGil())
      .def("error", &Reducer::thrown, NoGil())
      // The names torch's DistributedDataParallel uses.
      .def("_rebuild_buckets", &noting<&Reducer::rebuild_buckets>, NoGil())
      .def("_autograd_hook", &gradient_arrived, py::arg("index"), NoGil())
      .def("_check_reducer_finalized", &noting<&Reducer::check_finalized>, NoGil())
      .def("_get_zeros_like_grad_buckets", &zero_buckets, NoGil())
      .def("_run_comm_hook", &run_hook, py::arg("bucket"), NoGil())
      .def("_run_allreduce_hook", &run_sum, py::arg("bucket"), NoGil())
      .def("_install_post_backward_futures", &install_futures, py::arg("futures"))
      .def("_push_all_rebuilt_params", &Reducer::shadow_end_of_backward, NoGil())
      .def("_remove_autograd_hooks", &remove_hooks, NoGil())
      .def("_reset_state", &Reducer::reset, NoGil())
      .def("_set_forward_pass_work_handle", &set_forward_work, py::arg("work"), py::arg("use_static_world_size"),
           NoGil())
      .def(
          "when_counted",
          [](Reducer& reducer, py::function call) {
            reducer.when_counted([kept = shared_function(std::move(call))] {
              const py::gil_scoped_acquire gil;
              (*kept)();
            });
          },
          py::arg("call"), "In an elastic job: `call()` at the end of each backward whose step counts.")
      .def("_set_optimizer_in_backward", &Reducer::set_optimizer_in_backward, NoGil())
      .def("_set_static_graph", &noting<&Reducer::set_static_graph>, NoGil())
      .def("_update_process_group", &set_group, py::arg("process_group"), py::kw_only(), py::arg("average"),
           py::arg("names_compared"), NoGil());
  module.def(
      "gradient_memory",
      [] {
        const GradientPool::Use use = GradientPool::use();
        return std::make_tuple(use.installed, use.in_use_bytes, use.idle_bytes);
      },
      "Whether the pool for gradients is installed, its bytes in use, and its idle bytes.");
  module.def(
      "in_gradient_pool",
      [](const at::Tensor& tensor) { return tensor.is_cpu() && GradientPool::owns(tensor.storage().data()); },
      py::arg("tensor"), "Whether the tensor's memory comes from the pool for gradients.");
}

}  // namespace ringdp
