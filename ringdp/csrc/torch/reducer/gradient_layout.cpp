#include "torch/reducer/gradient_layout.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "base/error.h"
#include "base/naming.h"

namespace ringdp {
namespace {

// Above this size a copy costs more than a separate operation.
constexpr std::size_t kDirectBytes = std::size_t{4} << 20;

// Ranks whose gradients of a parameter differ in type could not average them.
void check_gradient_dtypes(const std::vector<ModuleParameter>& parameters) {
  for (const ModuleParameter& parameter : parameters) {
    if (!parameter.tensor.requires_grad() || gradient_dtype(parameter.tensor)) continue;
    ErrorContext context;
    context.name = parameter.name;
    context.advice = "give grad_dtype a type";
    throw Error(ErrorKind::kValue,
                "the grad_dtype of parameter " + parameter.name +
                    " is None, by which its gradients may have another type on each rank: " + context.advice,
                context);
  }
}

constexpr const char* kHookAndCompression =
    "a communication hook and compression both say how buckets are reduced: use one of them (compressors can be "
    "communication hooks too)";

}  // namespace

GradientLayout::GradientLayout(std::vector<ModuleParameter> all, c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                               ReducerOptions given, GradientListener& listener)
    : options(std::move(given)),
      pool(options.gradient_pool),
      parameters(std::move(all)),
      group(std::move(process_group), options.average, options.names_compared, options.host_control),
      plan(options.caps_bytes),
      hooks(listener),
      weights(group, parameters, options.weighted),
      store(parameters, plan, hooks, weights.factors(), options.own_gradients),
      left_over(parameters, plan),
      reductions(parameters, plan, group),
      compression(parameters, reductions, group),
      overflow(parameters),
      buckets(group, parameters, compression, overflow),
      repair(group, store, compression, buckets, options.weighted) {
  check_gradient_dtypes(parameters.all());
  start();
}

// Plans with the parameters that now require grad.
void GradientLayout::start() {
  hooks.detach();
  store.start();
  left_over.start();
  plan.start(describe_gradients());
  reductions.forget_choice();
  attach_hooks();
}

void GradientLayout::attach_hooks() {
  if (!local() || options.unused == UnusedParameters::kForbidden || options.weighted)
    hooks.attach(parameters.tensors());
}

// Plans with changed reductions.
void GradientLayout::lay_out_again() {
  plan.describe_again(describe_gradients());
  reductions.forget_choice();
  store.drop();
}

bool GradientLayout::follow_learned_order() {
  const std::optional<bool> changed = plan.follow_learned();
  if (!changed) return false;
  reductions.forget_choice();
  if (*changed) store.drop();
  return true;
}

std::vector<int32_t> GradientLayout::exchange_order(const std::vector<std::size_t>& arrivals,
                                                    const std::vector<bool>& used_somewhere) {
  const std::vector<bool> all_busy;
  return group.broadcast(plan.order_to_send(arrivals, options.skip_unused ? used_somewhere : all_busy),
                         group.control_device(parameters.tensors().front()), "order of the gradients");
}

std::vector<PlannedGradient> GradientLayout::describe_gradients() {
  std::vector<PlannedGradient> gradients;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& parameter = parameters.tensors()[i];
    const c10::Device device = parameter.device();
    const c10::ScalarType dtype = bucket_dtype(i);
    const std::size_t param_index = parameters.param_index(i);
    PlannedGradient& gradient = gradients.emplace_back();
    gradient.exact = reductions.of_parameter(param_index) == nullptr;
    const uint64_t reduction =
        gradient.exact ? 0 : static_cast<uint64_t>(reductions.number_of_parameter(param_index)) + 1;
    gradient.group = (reduction << 40) | (static_cast<uint64_t>(device.type()) << 32) |
                     (static_cast<uint64_t>(static_cast<uint8_t>(device.index())) << 16) | static_cast<uint64_t>(dtype);
    gradient.numel = static_cast<std::size_t>(parameter.numel());
    gradient.element_bytes = c10::elementSize(dtype);
    gradient.sparse = parameters[i].sparse;
    const c10::ScalarType own = gradient_dtype_of(i);
    const bool in_place = dtype == own;
    gradient.alone = gradient.sparse || (in_place && gradient.bytes() >= kDirectBytes);
    store.set_dtype(i, own, dtype);
  }
  return gradients;
}

// check_gradient_dtypes has seen that there is one.
c10::ScalarType GradientLayout::gradient_dtype_of(std::size_t parameter) const {
  const at::Tensor& tensor = parameters.tensors()[parameter];
  return gradient_dtype(tensor).value_or(tensor.scalar_type());
}

c10::ScalarType GradientLayout::bucket_dtype(std::size_t parameter) const {
  const c10::ScalarType own = gradient_dtype_of(parameter);
  if (parameters[parameter].sparse || !c10::isFloatingType(own)) return own;
  const bool exact = reductions.of_parameter(parameters.param_index(parameter)) == nullptr;
  return exact ? options.reduce_dtype.value_or(own) : at::kFloat;
}

void GradientLayout::allocate() {
  if (!store.empty() || local()) return;
  const GradientPool::Scope scope = pool.scope();
  store.allocate(/*marks=*/options.unused != UnusedParameters::kForbidden && !buckets.has_hook() &&
                 !group.host_control());
  assign_reductions();
}

void GradientLayout::assign_reductions() {
  for (std::size_t index = 0; index < store.size(); ++index) {
    store[index].reduction = reductions.of_bucket(index);
    store[index].too_small = reductions.too_small(index);
  }
}

void GradientLayout::throw_if_group_failed() {
  if (!local() && parameters.size() > 0) buckets.throw_if_failed(parameters.tensors().front().device().type());
}

bool GradientLayout::sends_used_map() const {
  if (options.unused == UnusedParameters::kForbidden || local() || store.empty()) return false;
  return !store[plan.kept() - 1].carries_marks;
}

bool GradientLayout::may_skip() const {
  return options.skip_unused && (plan.kept() < store.size() || !plan.order_known());
}

bool GradientLayout::follow_requires_grad() {
  const bool changed = parameters.changed();
  // All ranks replace data at the same place of the program, and their modules were equal.
  if (!changed && !store.other_data()) return false;
  check_gradient_dtypes(parameters.all());
  const std::vector<std::size_t> frozen = parameters.frozen();
  const auto in = [](const std::vector<std::size_t>& sorted, std::size_t param_index) {
    return std::binary_search(sorted.begin(), sorted.end(), param_index);
  };
  std::vector<std::pair<std::size_t, Bucket>> means;
  const auto agree = [&] {
    means.clear();
    if (group.ranks() == 1 && !repair.on()) return;
    // Averages gradients accumulated under no_sync once; the optimizer may apply them.
    const std::vector<std::size_t> due = parameters.agree_about_change(group, left_over.by_param_index());
    const double factor = due.empty() ? 1 : weights.factor_of_left_over();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      if (!in(due, parameters.param_index(i))) continue;
      means.emplace_back(i, left_over.flat(i, bucket_dtype(i), factor));
      const NamedScope scope("last gradient of " + parameters.names()[i]);
      buckets.average(means.back().second.buffer);
    }
  };
  if (changed) repair.as_unit("the agreement on frozen parameters", agree);
  for (const auto& [parameter, mean] : means) left_over.accept(parameter, mean);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (in(frozen, parameters.param_index(i))) store.release(i);
  }
  parameters.accept();
  start();
  return true;
}

ReductionPlan GradientLayout::replace_parameters(std::vector<ModuleParameter> others) {
  check_gradient_dtypes(others);
  std::unordered_set<const c10::TensorImpl*> staying;
  for (const ModuleParameter& one : others) staying.insert(one.tensor.unsafeGetTensorImpl());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (!staying.contains(parameters.tensors()[i].unsafeGetTensorImpl())) store.release(i);
  }
  parameters = TrainableParameters(std::move(others));
  ReductionPlan before = compression.clear();
  overflow.watch_for_compression(false);
  start();
  return before;
}

void GradientLayout::check_reductions(const ReductionPlan& others) const {
  if (!others.reductions.empty() && buckets.has_hook()) throw Error(ErrorKind::kState, kHookAndCompression);
  reductions.check(others);
}

ReductionPlan GradientLayout::set_reductions(ReductionPlan others) {
  ReductionPlan before = compression.set(std::move(others));
  overflow.watch_for_compression(!reductions.none());
  lay_out_again();
  return before;
}

void GradientLayout::choose(const std::vector<int>& reduction_of_bucket) {
  reductions.choose(reduction_of_bucket);
  assign_reductions();
}

// Also used by RingDP's own hooks, for mixed precision and optimizers in backward.
void GradientLayout::set_hook(std::unique_ptr<c10d::CommHookInterface> hook) {
  if (!reductions.none()) throw Error(ErrorKind::kState, kHookAndCompression);
  buckets.set_hook(std::move(hook));
  store.drop();  // buckets for hooks have no marks, and a world of one has no buckets
  attach_hooks();
}

void GradientLayout::set_group(c10::intrusive_ptr<c10d::ProcessGroup> other, bool average, bool names_compared) {
  const bool other_size = group.replace(std::move(other), average, names_compared);
  buckets.group_replaced();
  if (!reductions.none()) {
    check_reductions(reductions.all());
    if (other_size) compression.clear_residuals();  // other ranks own the parts now
    lay_out_again();
  }
  attach_hooks();
}

}  // namespace ringdp
