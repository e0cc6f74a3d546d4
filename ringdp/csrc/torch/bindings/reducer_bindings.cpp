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

std::vector<ModuleParameter> module_parameters(const std::vector<at::Tensor>& parameters,
                                               std::vector<std::string> names, std::vector<std::string> used_in,
                                               const std::vector<bool>& sparse) {
  TORCH_CHECK(
      names.size() == parameters.size() && used_in.size() == parameters.size() && sparse.size() == parameters.size(),
      "one name, one place and one sparse flag per parameter");
  std::vector<ModuleParameter> described;
  described.reserve(parameters.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    described.push_back({parameters[i], std::move(names[i]), std::move(used_in[i]), sparse[i]});
  }
  return described;
}

void replace_parameters(Reducer& reducer, const std::vector<at::Tensor>& parameters, std::vector<std::string> names,
                        std::vector<std::string> used_in, const std::vector<bool>& sparse) {
  std::vector<ModuleParameter> described = module_parameters(parameters, std::move(names), std::move(used_in), sparse);
  // Released when the lock is free.
  const ReductionPlan before = reducer.replace_parameters(std::move(described));
}

std::shared_ptr<Reducer> make_reducer(const std::vector<at::Tensor>& parameters, std::vector<std::string> names,
                                      std::vector<std::string> used_in, const std::vector<bool>& sparse,
                                      GroupPointer group, std::vector<std::size_t> caps_bytes,
                                      const std::optional<bool>& find_unused, bool average, bool own_gradients,
                                      bool skip_unused, bool names_compared, bool graph_shows_unused,
                                      const std::optional<at::ScalarType>& reduce_dtype, bool host_control,
                                      bool gradient_pool, bool weighted, std::size_t report_every, bool alone) {
  std::vector<ModuleParameter> described = module_parameters(parameters, std::move(names), std::move(used_in), sparse);
  ReducerOptions options;
  options.caps_bytes = std::move(caps_bytes);
  options.average = average;
  options.own_gradients = own_gradients;
  options.skip_unused = skip_unused;
  options.names_compared = names_compared;
  options.graph_shows_unused = graph_shows_unused;
  options.reduce_dtype = reduce_dtype;
  options.host_control = host_control;
  options.weighted = weighted;
  options.gradient_pool = gradient_pool;
  options.report_every = report_every;
  options.alone = alone;
  // Not by a call guard: pybind11 would then register the new object without the GIL, too.
  py::gil_scoped_release no_gil;
  if (find_unused) options.unused = *find_unused ? UnusedParameters::kExpected : UnusedParameters::kForbidden;
  return make_shared_without_python_lock<Reducer>(std::move(described), std::move(group), std::move(options));
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

py::dict stats_as_dict(Reducer& reducer) {
  ReducerStats stats;
  {
    py::gil_scoped_release no_gil;
    stats = reducer.report()->stats();
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

py::list rows_as_dicts(Reducer& reducer) {
  std::vector<BucketRow> rows;
  {
    py::gil_scoped_release no_gil;
    rows = reducer.report()->bucket_rows();
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
py::dict times_as_dict(Reducer& reducer) {
  ReducerStats stats;
  {
    py::gil_scoped_release no_gil;
    stats = reducer.report()->stats();
  }
  py::dict result;
  result["began_ns"] = stats.began_ns;
  result["launched_ns"] = stats.launched_ns;
  result["computed_ns"] = stats.computed_ns;
  result["finished_ns"] = stats.finished_ns;
  result["unused_bytes"] = stats.unused_bytes;
  return result;
}

// See StepReport.
int note_forward(Reducer& reducer) { return reducer.report()->note_forward(); }

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

void set_facts(Reducer& reducer, const py::bytes& facts) {
  const std::string_view bytes = facts;
  StepReport::Bytes copy(bytes.begin(), bytes.end());
  py::gil_scoped_release no_gil;
  reducer.report()->set_facts(copy);
}

std::optional<std::vector<py::bytes>> take_window(Reducer& reducer) {
  std::optional<std::vector<StepReport::Bytes>> window;
  {
    py::gil_scoped_release no_gil;
    window = reducer.report()->take();
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

// Binds a function of one of the reducer's parts, called under its lock.
constexpr const char* kNotTaken = "residuals cannot be taken during a backward";
constexpr const char* kNotSet = "residuals cannot be set during a backward";
using ByParameter = GradientCompression::ByParameter;

std::vector<int64_t> find(Reducer& reducer, const std::vector<at::Tensor>& tensors) {
  return reducer.plan()->parameters.find(tensors);
}

// `index` counts the parameters that required grad at construction.
void gradient_arrived(Reducer& reducer, std::size_t index) {
  const auto plan = reducer.plan();
  if (const auto parameter = plan->parameters.since_construction(index)) reducer.gradient_arrived(*parameter);
}

void choose_reductions(Reducer& reducer, const std::vector<int>& reduction_of_bucket) {
  reducer.choose(reduction_of_bucket);
}

ByParameter take_residuals(Reducer& reducer, const std::vector<std::size_t>& parameters) {
  return reducer.residuals(kNotTaken)->take_residuals(parameters);
}

void give_residuals(Reducer& reducer, const ByParameter& residuals) {
  reducer.residuals(kNotSet)->give_residuals(residuals);
}

ByParameter residuals(Reducer& reducer) { return reducer.exchange()->compression.residuals(); }

void set_residuals(Reducer& reducer, const ByParameter& residuals) {
  reducer.residuals(kNotSet)->set_residuals(residuals);
}

void set_group(Reducer& reducer, GroupPointer group, bool average, bool names_compared) {
  reducer.set_group(std::move(group), average, names_compared);
}

void set_loss_scale(Reducer& reducer, double scale) { reducer.exchange()->compression.set_loss_scale(scale); }

void watch_finite(Reducer& reducer, bool watch) { reducer.exchange()->overflow.watch(watch); }

std::optional<bool> finite(Reducer& reducer) { return reducer.exchange()->overflow.finite(); }

std::vector<std::size_t> non_finite(Reducer& reducer) { return reducer.exchange()->overflow.non_finite(); }

int64_t own_non_finite(Reducer& reducer) { return reducer.exchange()->overflow.own_non_finite(); }

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

std::vector<BucketMembers> layout(Reducer& reducer) { return reducer.plan()->buckets.buckets(); }

std::vector<std::size_t> bucket_bytes(Reducer& reducer) {
  const auto plan = reducer.plan();
  std::vector<std::size_t> result;
  for (std::size_t i = 0; i < plan->buckets.buckets().size(); ++i) result.push_back(plan->buckets.bytes(i));
  return result;
}

// The names of their operations.
std::vector<std::string> bucket_names(Reducer& reducer) {
  const auto plan = reducer.plan();
  const std::vector<BucketMembers>& buckets = plan->buckets.buckets();
  std::vector<std::string> result;
  for (std::size_t i = 0; i < buckets.size(); ++i)
    result.push_back(describe_bucket(i, buckets[i], plan->parameters.names()));
  return result;
}

bool rebuilt(Reducer& reducer) { return reducer.plan()->buckets.rebuilt(); }

double incoming_factor(Reducer& reducer) { return reducer.exchange()->weights.factors().incoming; }

void shadow_weight(Reducer& reducer) { reducer.join()->shadow_weight(); }

// For torch's Join.
void set_forward_work(Reducer& reducer, c10::intrusive_ptr<c10d::Work> work, bool divide_by_all_ranks) {
  reducer.join()->set_forward_work(std::move(work), divide_by_all_ranks);
}

void shadow_with(Reducer& reducer, int64_t ranks_with_input) { reducer.join()->divide_by(ranks_with_input); }

std::vector<c10d::GradBucket> zero_buckets(Reducer& reducer) { return reducer.join()->zero_buckets(); }

void shadow_the_map(Reducer& reducer) { reducer.join()->shadow_used_map(); }

}  // namespace

void bind_reducer(py::module_& module) {
  module.def("note_optimizer", &StepPhases::note_optimizer, "An optimizer has ended its step.");
  module.def("most_steps", &most_steps,
             "Backwards that averaged gradients, of the wrapper of this process that had most.");
  py::class_<Reducer, std::shared_ptr<Reducer>>(module, "Reducer", "Averages gradients during backward; see RingDP.")
      .def(py::init(&make_reducer), py::arg("parameters"), py::arg("names"), py::arg("used_in"), py::arg("sparse"),
           py::arg("process_group"), py::kw_only(), py::arg("caps_bytes"), py::arg("find_unused"), py::arg("average"),
           py::arg("own_gradients"), py::arg("skip_unused"), py::arg("names_compared"), py::arg("graph_shows_unused"),
           py::arg("reduce_dtype") = py::none(), py::arg("host_control") = false, py::arg("gradient_pool") = false,
           py::arg("weighted") = false, py::arg("report_every") = 0, py::arg("alone") = false)
      .def("prepare_for_forward", &noting<&Reducer::prepare_for_forward>, NoGil())
      .def("called_in_backward", &Reducer::called_in_backward, NoGil(),
           "A forward that is repeated inside a backward begins: checkpointing does that.")
      .def("replace_parameters", &replace_parameters, py::arg("parameters"), py::arg("names"), py::arg("used_in"),
           py::arg("sparse"), NoGil())
      .def("find", &find, py::arg("tensors"), NoGil())
      .def("prepare_for_backward", &prepare_for_backward, py::arg("outputs"), py::arg("sync") = py::none(),
           py::arg("training") = py::none(), NoGil())
      .def("register_comm_hook", &register_python_hook, py::arg("state"), py::arg("hook"))
      .def("register_builtin_comm_hook", &register_builtin_hook, py::arg("hook"), NoGil())
      .def("set_reductions", &set_reductions, py::arg("reductions"), py::arg("reduction_of"), py::arg("owner_offsets"),
           py::arg("exchange_codes") = false, NoGil())
      .def("choose", &choose_reductions, py::arg("reduction_of_bucket"), NoGil())
      .def("take_residuals", &take_residuals, py::arg("parameters"), NoGil())
      .def("give_residuals", &give_residuals, py::arg("residuals"), NoGil())
      .def("watch_finite", &watch_finite, py::arg("watch"), NoGil())
      .def("set_loss_scale", &set_loss_scale, py::arg("scale"), NoGil())
      .def("finite", &finite, NoGil())
      .def("non_finite", &non_finite, NoGil())
      .def("own_non_finite", &own_non_finite, NoGil())
      .def("residuals", &residuals, NoGil())
      .def("set_residuals", &set_residuals, py::arg("residuals"), NoGil())
      .def("bucket_rows", &rows_as_dicts)
      .def("shadow_with", &shadow_with, py::arg("ranks_with_input"), NoGil())
      .def("announce_weight", &Reducer::announce_weight, py::arg("weight"), py::arg("sync"),
           py::arg("training") = py::none(), NoGil())
      .def(
          "forward_note",
          [](Reducer& reducer, bool training) { return reducer.exchange()->forwards.note_of(training); },
          py::arg("training"), NoGil(), "What the name of an operation in a forward ends in; nearly always nothing.")
      .def(
          "begin_closure", [](Reducer& reducer) { reducer.exchange()->forwards.begin_closure(); }, NoGil(),
          "An optimizer evaluates a closure from now on, which may run several backwards.")
      .def(
          "end_closure", [](Reducer& reducer) { reducer.exchange()->forwards.end_closure(); }, NoGil())
      .def("repeat_batch", &Reducer::repeat_batch, NoGil(),
           "The forwards up to the end of this step are of the batch whose forward has failed.")
      .def("incoming_factor", &incoming_factor, NoGil())
      .def("shadow_weight", &shadow_weight, NoGil())
      .def("zero_gradients", &Reducer::zero_gradients, NoGil())
      .def("has_unaveraged", &Reducer::any_left_over, "Whether a gradient stayed in some .grad that was not averaged.")
      .def("unaveraged", &unaveraged, NoGil(),
           "Each: (parameter, under no_sync, .grad changed since); then their bytes, and the bytes sent since, or -1.")
      .def("shadow_used_map", &shadow_the_map, NoGil())
      .def("layout", &layout, NoGil())
      .def("bucket_bytes", &bucket_bytes, NoGil())
      .def("bucket_names", &bucket_names, NoGil())
      .def("rebuilt", &rebuilt, NoGil())
      .def("stats", &stats_as_dict)
      .def("times", &times_as_dict)
      .def("note_forward", &note_forward, NoGil())
      .def("set_facts", &set_facts, py::arg("facts"))
      .def("take_window", &take_window)
      .def("last_step", &last_step)
      .def(
          "steps", [](Reducer& reducer) { return reducer.report()->stats().steps; }, NoGil(),
          "How many backwards have synchronised.")
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
