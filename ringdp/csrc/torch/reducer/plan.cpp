#include "torch/reducer/plan.h"

#include <algorithm>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/error.h"
#include "codec/plugin.h"
#include "torch/backend/process_group.h"
#include "torch/device/device_codec.h"
#include "torch/reducer/bucket.h"
#include "torch/reducer/messages.h"

namespace ringdp {

namespace {

constexpr uint8_t kTrains = 1;
constexpr uint8_t kLeftOver = 2;  // it has a gradient that was not averaged
constexpr const char* kSameEverywhere = "freeze and unfreeze the same parameters on all ranks, before the same forward";

}  // namespace

TrainableParameters::TrainableParameters(std::vector<ModuleParameter> parameters)
    : all_(std::move(parameters)), trains_(all_.size()) {
  accept();
  at_construction_ = param_indices_;
}

std::vector<int64_t> TrainableParameters::find(const std::vector<at::Tensor>& tensors) const {
  std::unordered_map<const c10::TensorImpl*, int64_t> numbers;
  for (std::size_t i = 0; i < all_.size(); ++i)
    numbers.emplace(all_[i].tensor.unsafeGetTensorImpl(), static_cast<int64_t>(i));
  std::vector<int64_t> result;
  result.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    const auto found = numbers.find(tensor.unsafeGetTensorImpl());
    result.push_back(found == numbers.end() ? -1 : found->second);
  }
  return result;
}

std::optional<std::size_t> TrainableParameters::since_construction(std::size_t position) const {
  const auto found = std::lower_bound(param_indices_.begin(), param_indices_.end(), at_construction_.at(position));
  if (found == param_indices_.end() || *found != at_construction_[position]) return std::nullopt;
  return static_cast<std::size_t>(found - param_indices_.begin());
}

bool TrainableParameters::changed() const {
  for (std::size_t i = 0; i < all_.size(); ++i) {
    if (all_[i].tensor.requires_grad() != (trains_[i] != 0)) return true;
  }
  return false;
}

std::vector<std::size_t> TrainableParameters::flipped(bool now) const {
  std::vector<std::size_t> result;
  for (std::size_t i = 0; i < all_.size(); ++i) {
    if (all_[i].tensor.requires_grad() == now && (trains_[i] != 0) != now) result.push_back(i);
  }
  return result;
}

std::vector<std::size_t> TrainableParameters::frozen() const { return flipped(false); }

// "a.weight requires grad no longer; b.weight, b.bias require grad now", in at most about 200 characters.
std::string TrainableParameters::describe_change() const {
  std::vector<std::string> names;
  names.reserve(all_.size());
  for (const ModuleParameter& parameter : all_) names.push_back(parameter.name);
  std::string text;
  for (bool now : {false, true}) {
    const std::vector<std::size_t> members = flipped(now);
    if (members.empty()) continue;
    if (!text.empty()) text += "; ";
    text += describe_names(members, names) + (members.size() == 1 ? " requires" : " require");
    text += now ? " grad now" : " grad no longer";
  }
  return text;
}

void TrainableParameters::accept() {
  param_indices_.clear();
  tensors_.clear();
  names_.clear();
  for (std::size_t i = 0; i < all_.size(); ++i) {
    trains_[i] = all_[i].tensor.requires_grad() ? 1 : 0;
    if (trains_[i] == 0) continue;
    param_indices_.push_back(i);
    tensors_.push_back(all_[i].tensor);
    names_.push_back(all_[i].name);
  }
}

std::vector<std::size_t> TrainableParameters::agree_about_change(ReducerGroup& group,
                                                                 const std::vector<bool>& left_over) const {
  std::vector<uint8_t> mine(all_.size());
  for (std::size_t i = 0; i < mine.size(); ++i) {
    mine[i] = all_[i].tensor.requires_grad() ? kTrains : 0;
    if (left_over[i]) mine[i] |= kLeftOver;
  }
  const std::string change = describe_change();
  std::vector<std::vector<uint8_t>> ranks;
  try {
    ranks = group.gather(mine, group.control_device(all_.front().tensor), change);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kMismatch) throw;
    ErrorContext context = error.context();
    context.name = change;
    context.advice = kSameEverywhere;
    throw Error(error.kind(), "before this forward " + change + ", and not all ranks did the same: " + error.what(),
                context);
  }
  throw_where_they_differ(ranks, group.rank());
  std::vector<std::size_t> result;
  for (std::size_t i : frozen()) {
    if (std::any_of(ranks.begin(), ranks.end(), [i](const auto& rank) { return (rank[i] & kLeftOver) != 0; }))
      result.push_back(i);
  }
  return result;
}

void TrainableParameters::throw_where_they_differ(const std::vector<std::vector<uint8_t>>& ranks, int rank) const {
  std::vector<std::vector<bool>> trains;
  for (const auto& flags : ranks) {
    std::vector<bool>& one = trains.emplace_back();
    for (const uint8_t flag : flags) one.push_back((flag & kTrains) != 0);
  }
  std::vector<std::string> names;
  for (const ModuleParameter& parameter : all_) names.push_back(parameter.name);
  const TrainingDisagreement found = requires_grad_disagreement(trains, names);
  if (found.text.empty()) return;
  ErrorContext context;
  context.rank = rank;
  context.name = found.first_name;
  context.advice = kSameEverywhere;
  throw Error(ErrorKind::kMismatch, found.text + " Freeze and unfreeze the same on all ranks, before the same forward.",
              context);
}

namespace {

[[noreturn]] void refuse(const std::string& text) { throw Error(ErrorKind::kValue, text); }

}  // namespace

void ReductionAssignment::check(const ReductionPlan& reductions) const {
  if (reductions.reductions.empty()) return;
  const std::vector<ModuleParameter>& all = parameters_.all();
  if (reductions.reduction_of.size() != all.size() || reductions.owner_offsets.size() != all.size())
    refuse("one reduction and one owner offset for each of " + std::to_string(all.size()) + " parameters");
  for (std::size_t i = 0; i < all.size(); ++i) {
    const int index = reductions.reduction_of[i];
    if (index >= static_cast<int>(reductions.reductions.size())) {
      refuse("parameter " + all[i].name + " has reduction " + std::to_string(index) + " of " +
             std::to_string(reductions.reductions.size()));
    }
    const auto* native = index < 0 ? nullptr : dynamic_cast<const CodecReduction*>(reductions.reductions[index].get());
    if (native == nullptr || group_.ranks() == 1) continue;
    const c10::Device device = all[i].tensor.device();
    if (is_plugin(native->codec()) && !device.is_cpu()) {
      refuse("the codec " + native->name() + " for parameter " + all[i].name +
             " is a C library's, for tensors on the CPU; this one is on " + device.str());
    }
    const bool possible = reductions.exchange_codes ? device_codec(device.type()) != nullptr
                                                    : device.is_cpu() && group_.ring(device.type()) != nullptr;
    if (!possible) {
      refuse("the codec " + native->name() + " for parameter " + all[i].name +
             (reductions.exchange_codes ? " needs kernels for the parameter's device; this one is on "
                                        : " needs the backend ring and a parameter on the CPU; this one is on ") +
             device.str() + " and is reduced by " +
             group_.process_group()->getBackend(device.type())->getBackendName() +
             "; TORCH_DISTRIBUTED_DEBUG=DETAIL hides ring, too");
    }
  }
}

ReductionPlan ReductionAssignment::replace(ReductionPlan reductions) {
  return std::exchange(reductions_, std::move(reductions));
}

Reduction* ReductionAssignment::of_parameter(std::size_t param_index) const {
  if (none()) return nullptr;
  const ModuleParameter& parameter = parameters_.all()[param_index];
  const int index = reductions_.reduction_of[param_index];
  if (index < 0 || parameter.sparse || !parameter.tensor.is_floating_point()) return nullptr;
  return reductions_.reductions[static_cast<std::size_t>(index)].get();
}

void ReductionAssignment::choose(const std::vector<int>& reduction_of_bucket) {
  const std::size_t buckets = plan_.buckets().size();
  if (reduction_of_bucket.size() != buckets)
    refuse("reductions for " + std::to_string(reduction_of_bucket.size()) + " buckets; there are " +
           std::to_string(buckets));
  for (std::size_t index = 0; index < buckets; ++index) {
    const int reduction = reduction_of_bucket[index];
    if (reduction < 0) continue;
    if (reduction >= static_cast<int>(reductions_.reductions.size()))
      refuse("reduction " + std::to_string(reduction) + " is out of range: the plan has " +
             std::to_string(reductions_.reductions.size()));
    if (!free(index))
      refuse(describe_bucket(index, plan_.buckets()[index], parameters_.names()) + " has a reduction of its own");
  }
  chosen_ = reduction_of_bucket;
}

bool ReductionAssignment::free(std::size_t bucket) const {
  return is_auto(of_parameter(parameters_.param_index(plan_.buckets()[bucket].front())));
}

int ReductionAssignment::number_of_bucket(std::size_t bucket) const {
  const std::size_t first = parameters_.param_index(plan_.buckets()[bucket].front());
  const Reduction* reduction = of_parameter(first);
  if (reduction == nullptr) return -1;
  if (!is_auto(reduction)) return too_small(bucket) ? -1 : reductions_.reduction_of[first];
  return chosen_.empty() ? -1 : chosen_[bucket];
}

bool ReductionAssignment::too_small(std::size_t bucket) const {
  const Reduction* reduction = of_parameter(parameters_.param_index(plan_.buckets()[bucket].front()));
  if (reductions_.exchange_codes || dynamic_cast<const CodecReduction*>(reduction) == nullptr) return false;
  const ProcessGroupRing* ring = group_.ring(c10::kCPU);
  return ring != nullptr && !ring->group()->sends_codes(plan_.dense_bytes(bucket));
}

Reduction* ReductionAssignment::of_bucket(std::size_t bucket) const {
  const int index = number_of_bucket(bucket);
  if (index < 0) return of_parameter(parameters_.param_index(plan_.buckets()[bucket].front()));
  return reductions_.reductions[static_cast<std::size_t>(index)].get();
}

bool ReductionAssignment::calls_back() const {
  return std::any_of(reductions_.reductions.begin(), reductions_.reductions.end(),
                     [](const auto& reduction) { return dynamic_cast<HookReduction*>(reduction.get()) != nullptr; });
}

void ReductionAssignment::set_divisor(int64_t divisor) const {
  for (const auto& reduction : reductions_.reductions) {
    if (auto* hook = dynamic_cast<HookReduction*>(reduction.get())) hook->set_divisor(divisor);
  }
}

namespace {

// Above this size a copy costs more than a separate operation.
constexpr std::size_t kDirectBytes = std::size_t{4} << 20;

}  // namespace

void Plan::check_gradient_dtypes(const std::vector<ModuleParameter>& parameters) {
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

Plan::Plan(std::vector<ModuleParameter> all, ReducerOptions given, const ReducerGroup& group)
    : options(std::move(given)),
      parameters(std::move(all)),
      buckets(options.caps_bytes),
      reductions(parameters, buckets, group) {
  check_gradient_dtypes(parameters.all());
}

void Plan::start() {
  buckets.start(describe());
  reductions.forget_choice();
  graph.forget(parameters.size());
}

void Plan::describe_again() {
  buckets.describe_again(describe());
  reductions.forget_choice();
}

std::optional<bool> Plan::follow_learned_order() {
  const std::optional<bool> changed = buckets.follow_learned();
  if (changed) reductions.forget_choice();
  return changed;
}

void Plan::exchange_order(ReducerGroup& group, const std::vector<std::size_t>& arrivals,
                          const std::vector<bool>& used_somewhere, std::vector<int32_t>& order) const {
  const std::vector<bool> all_busy;
  order = group.broadcast(buckets.order_to_send(arrivals, options.skip_unused ? used_somewhere : all_busy),
                          group.control_device(parameters.tensors().front()), "order of the gradients");
}

std::vector<PlannedGradient> Plan::describe() const {
  std::vector<PlannedGradient> gradients;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& parameter = parameters.tensors()[i];
    const c10::Device device = parameter.device();
    const c10::ScalarType dtype = bucket_dtype_of(i);
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
    const bool in_place = dtype == gradient_dtype_of(i);
    gradient.alone = gradient.sparse || (in_place && gradient.bytes() >= kDirectBytes);
  }
  return gradients;
}

// check_gradient_dtypes has seen that there is one.
c10::ScalarType Plan::gradient_dtype_of(std::size_t parameter) const {
  const at::Tensor& tensor = parameters.tensors()[parameter];
  return gradient_dtype(tensor).value_or(tensor.scalar_type());
}

c10::ScalarType Plan::bucket_dtype_of(std::size_t parameter) const {
  const c10::ScalarType own = gradient_dtype_of(parameter);
  if (parameters[parameter].sparse || !c10::isFloatingType(own)) return own;
  const bool exact = reductions.of_parameter(parameters.param_index(parameter)) == nullptr;
  return exact ? options.reduce_dtype.value_or(own) : at::kFloat;
}

bool Plan::may_skip() const {
  return options.skip_unused && (buckets.kept() < buckets.buckets().size() || !buckets.order_known());
}

}  // namespace ringdp
