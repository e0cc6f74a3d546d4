// Buckets that are not reduced exactly: which parameters have which reduction, their residuals, and whether what came of a
// backward was finite.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"
#include "codec/plugin.h"
#include "torch/device/device_codec.h"
#include "torch/reducer/loss_scale.h"
#include "torch/reducer/reducer.h"

namespace ringdp {
namespace {

bool same_reduction(const Reduction* a, const Reduction* b) {
  if (dynamic_cast<const AutoReduction*>(a) != nullptr && dynamic_cast<const AutoReduction*>(b) != nullptr) return true;
  const auto* x = dynamic_cast<const CodecReduction*>(a);
  const auto* y = dynamic_cast<const CodecReduction*>(b);
  if (x == nullptr || y == nullptr) return a == b;
  return x->codec() == y->codec() && x->feedback() == y->feedback();
}

bool keeps_residuals(const Reduction* reduction) {
  if (const auto* chosen = dynamic_cast<const AutoReduction*>(reduction)) return chosen->feedback();
  const auto* native = dynamic_cast<const CodecReduction*>(reduction);
  return native != nullptr && native->feedback();
}

bool all_finite(const at::Tensor& values) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return at::isfinite(values).all().item<bool>();
}

}  // namespace

void Reducer::set_reductions(ReductionPlan plan) {
  ReductionPlan before;  // goes when the lock is free: Python is told
  const Lock lock(mutex_);
  check_reductions(plan);
  before = std::exchange(reduction_plan_, {});
  const auto reduction_before = [&](std::size_t i) {
    return before.reductions.empty() || before.reduction_of[i] < 0 ? nullptr
                                                                   : before.reductions[before.reduction_of[i]].get();
  };
  reduction_plan_ = std::move(plan);
  for (std::size_t i = 0; i < parameters_.all().size(); ++i) {
    const Reduction* now = reduction_of(i);
    if (!keeps_residuals(now) || !same_reduction(reduction_before(i), now)) residuals_.drop(i);
  }
  bucket_reducer_.set_watching(looks_for_non_finite());
  bucket_reducer_.set_exchanging_codes(reduction_plan_.exchange_codes);
  lay_out_again();
}

void Reducer::check_reductions(const ReductionPlan& plan) {
  const auto refuse = [](ErrorKind kind, const std::string& text) { throw Error(kind, text); };
  failure_.throw_if_failed(backward_.step());
  if (backward_.active()) {
    refuse(
        ErrorKind::kState,
        "compression cannot change during a backward, nor after one that an exception left: change it between steps");
  }
  if (backward_.due()) {
    refuse(ErrorKind::kState,
           "compression cannot change between a forward and its backward: change it after backward, or let go of the "
           "forward's output");
  }
  if (!plan.reductions.empty() && bucket_reducer_.has_hook())
    refuse(ErrorKind::kState, BucketReducer::kHookAndCompression);
  if (plan.reductions.empty()) return;
  if (plan.reduction_of.size() != parameters_.all().size() || plan.owner_offsets.size() != parameters_.all().size()) {
    refuse(ErrorKind::kValue, "one reduction and one owner offset for each of " +
                                  std::to_string(parameters_.all().size()) + " parameters");
  }
  for (std::size_t i = 0; i < parameters_.all().size(); ++i) {
    const int index = plan.reduction_of[i];
    if (index >= static_cast<int>(plan.reductions.size())) {
      refuse(ErrorKind::kValue, "parameter " + parameters_.all()[i].name + " has reduction " + std::to_string(index) +
                                    " of " + std::to_string(plan.reductions.size()));
    }
    const auto* native = index < 0 ? nullptr : dynamic_cast<const CodecReduction*>(plan.reductions[index].get());
    if (native == nullptr || group_.ranks() == 1) continue;
    if (is_plugin(native->codec()) && !parameters_.all()[i].tensor.is_cpu()) {
      refuse(ErrorKind::kValue, "the codec " + native->name() + " for parameter " + parameters_.all()[i].name +
                                    " is a C library's, for tensors on the CPU; this one is on " +
                                    parameters_.all()[i].tensor.device().str());
    }
    if (!bucket_reducer_.has_codecs(parameters_.all()[i].tensor.device(), plan.exchange_codes)) {
      refuse(ErrorKind::kValue,
             "the codec " + plan.reductions[index]->name() + " for parameter " + parameters_.all()[i].name +
                 (plan.exchange_codes ? " needs kernels for the parameter's device; this one is on "
                                      : " needs the backend ring and a parameter on the CPU; this one is on ") +
                 parameters_.all()[i].tensor.device().str() + " and is reduced by " +
                 group_.process_group()->getBackend(parameters_.all()[i].tensor.device().type())->getBackendName() +
                 "; TORCH_DISTRIBUTED_DEBUG=DETAIL hides ring, too");
    }
  }
}

bool Reducer::looks_for_non_finite() const { return watching_ || !reduction_plan_.reductions.empty(); }

void Reducer::watch_finite(bool watch) {
  const Lock lock(mutex_);
  watching_ = watch;
  bucket_reducer_.set_watching(looks_for_non_finite());
}

void Reducer::set_loss_scale(double scale) {
  const Lock lock(mutex_);
  loss_scale_ = scale;
}

// A power of two, so that residuals keep their bits when the scale changes; torch's scales are powers of two as a rule.
float Reducer::residual_scale() const {
  double scale = loss_scale_of_backward();
  if (scale == 1.0) scale = loss_scale_;
  return std::isfinite(scale) && scale > 0 ? static_cast<float>(std::exp2(std::floor(std::log2(scale)))) : 1.0f;
}

// Whether hooks may still issue operations after the last bucket was launched.
bool Reducer::calls_back() const {
  return bucket_reducer_.has_hook() ||
         std::any_of(reduction_plan_.reductions.begin(), reduction_plan_.reductions.end(),
                     [](const auto& reduction) { return dynamic_cast<HookReduction*>(reduction.get()) != nullptr; });
}

void Reducer::list_sections(Bucket& bucket, const at::Tensor& buffer, bool with_residuals) {
  bucket.sections.clear();
  bucket.feedback.clear();
  bucket.residuals.clear();
  bucket.non_finite.reset();
  const CodecReduction* reduction = BucketReducer::native(bucket);
  if (reduction == nullptr) return;
  auto* memory = buffer.mutable_data_ptr<float>();
  for (std::size_t position = 0; position < bucket.members.size(); ++position) {
    const std::size_t param_index = parameters_.param_index(bucket.members[position]);
    CompressedSection section;
    section.x = memory + bucket.memory.offsets[position];
    section.count = bucket.memory.lengths[position];
    section.owner_offset = reduction_plan_.owner_offsets[param_index];
    if (with_residuals && (reduction->feedback() || residuals_.all().contains(param_index))) {
      const auto numel = static_cast<int64_t>(section.count);
      const Residuals::Pair& pair = residuals_.of(param_index, numel, buffer.device());
      const cuda::Feedback feedback = pair.feedback();
      if (bucket_reducer_.exchanges_codes()) {
        bucket.feedback.push_back(feedback);
      } else {
        section.residual = feedback.both[*feedback.which];
        section.new_residual = feedback.both[1 - *feedback.which];
      }
      bucket.residuals.insert(bucket.residuals.end(), {pair.both[0], pair.both[1], pair.which});
    }
    bucket.sections.push_back(section);
  }
}

// The kernels that encode on a device set a flag there if a value was not finite.
void Reducer::take_flag(Bucket& bucket) {
  const c10::Device device = bucket.buffer.device();
  if (device.is_cpu() || BucketReducer::native(bucket) == nullptr) return;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (!flags_.contains(device)) {
    const auto options = at::TensorOptions().dtype(at::kInt).device(device);
    flags_.emplace(device, Flag{at::zeros({1}, options), c10::impl::VirtualGuardImpl(device.type()).getStream(device)});
  }
  const Flag& flag = flags_.at(device);
  bucket.non_finite = flag.seen;
  bucket.streams.push_back(flag.made_on);
}

// The verdicts of the reductions that are hooks and were used in this backward. Called without the lock, because they run
// Python code.
Reducer::HookReductions Reducer::ask_hook_reductions() {
  Lock lock(mutex_);
  HookReductions used;
  for (const Bucket& bucket : store_) {
    auto* reduction = dynamic_cast<HookReduction*>(bucket.reduction);
    if (reduction != nullptr && reduction->enabled() && bucket.sent_in == backward_.step())
      used.emplace(reduction, std::nullopt);
  }
  lock.unlock();
  for (auto& [reduction, finite] : used) finite = reduction->finite();
  return used;
}

void Reducer::look_at_reports(const HookReductions& hook_reductions) {
  bool known = true;
  bool finite = true;
  own_non_finite_ = -1;
  for (const Bucket& bucket : store_) {
    if (bucket.sent_in != backward_.step()) continue;
    std::optional<bool> one;
    const auto reduction = hook_reductions.find(dynamic_cast<HookReduction*>(bucket.reduction));
    if (bucket.report) {
      one = bucket.report->finite;
      if (own_non_finite_ < 0 && bucket.report->own != nullptr)
        own_non_finite_ = parameter_at(bucket, bucket.report->own);
    } else if (reduction != hook_reductions.end() && reduction->second) {
      one = reduction->second;
    } else if (bucket.non_finite.defined()) {
      continue;  // its device knows
    } else {
      one = look_at_result(bucket);
    }
    known &= one.has_value();
    finite &= one.value_or(true);
  }
  finite_ = known || !finite ? std::optional(finite) : std::nullopt;
}

// Checks a result that was not checked while it was reduced (sparse gradients, other backends). Not on a device, where this
// would wait for the device, and not for a user's hook, whose results may differ between ranks.
std::optional<bool> Reducer::look_at_result(const Bucket& bucket) {
  if (!backward_.active() || !looks_for_non_finite() || bucket_reducer_.has_hook()) return std::nullopt;
  const at::Tensor& result = bucket.sparse ? bucket.buffer._values() : bucket.gradients;
  if (result.is_cpu()) return all_finite(result);
  return flag_result(result) ? std::optional(true) : std::nullopt;
}

// The check of a result on a device sets the flag there, on which the residuals' commit depends. True if it does.
bool Reducer::flag_result(const at::Tensor& result) {
  const auto flag = flags_.find(result.device());
  if (flag == flags_.end() || !(result.is_floating_point() || result.is_complex())) return false;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const at::Tensor real = result.is_complex() ? at::view_as_real(result) : result;
  const c10::impl::VirtualGuardImpl device(result.device().type());
  const c10::OptionalDeviceGuard guard(result.device());
  device_codec(result.device().type())
      ->find_non_finite(real.contiguous(), flag->second.seen.mutable_data_ptr<int32_t>(),
                        device.getStream(result.device()));
  return true;
}

int64_t Reducer::parameter_at(const Bucket& bucket, const std::byte* address) const {
  const auto* begin = static_cast<const std::byte*>(bucket.buffer.const_data_ptr());
  const auto element = static_cast<std::size_t>(address - begin) / bucket.buffer.element_size();
  const auto& offsets = bucket.memory.offsets;
  const auto behind = std::upper_bound(offsets.begin(), offsets.end(), element);
  if (behind == offsets.begin()) return -1;
  const auto position = static_cast<std::size_t>(behind - offsets.begin()) - 1;
  return static_cast<int64_t>(parameters_.param_index(bucket.members[position]));
}

// Parameters that no rank used keep what they had.
void Reducer::commit_residuals() {
  if (!finite_.value_or(true)) return;
  std::vector<std::size_t> written;
  std::vector<std::size_t> exact;
  for (const Bucket& bucket : store_) {
    if (bucket.sent_in != backward_.step() || bucket.residuals.empty()) continue;
    auto& done = BucketReducer::native(bucket) == nullptr ? exact : written;
    for (std::size_t member : bucket.members) {
      if (used_.used_somewhere(member)) done.push_back(parameters_.param_index(member));
    }
  }
  for (const std::size_t param_index : exact) residuals_.drop(param_index);
  Residuals::Flags flags;
  for (const auto& [device, flag] : flags_) flags[device] = flag.seen;
  residuals_.commit(written, flags);
}

void Reducer::finish_hook_reductions(const HookReductions& used) {
  Lock lock(mutex_);
  if (used.empty()) return;
  const bool finite = finite_now().value_or(true);
  std::map<HookReduction*, std::vector<std::string>> unused;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!used_.used_somewhere(i))
      unused[dynamic_cast<HookReduction*>(reduction_of(parameters_.param_index(i)))].push_back(parameters_.names()[i]);
  }
  lock.unlock();
  for (const auto& [reduction, _] : used) reduction->commit(finite, unused[reduction]);
}

// Of all ranks: 0.
void Reducer::divide_by(int64_t ranks_with_input) {
  const int64_t before = group_.divisor();
  group_.set_divisor(ranks_with_input);
  if (before == ranks_with_input) return;
  for (const auto& reduction : reduction_plan_.reductions) {
    if (auto* hook = dynamic_cast<HookReduction*>(reduction.get())) hook->set_divisor(ranks_with_input);
  }
}

void Reducer::shadow_with(int64_t ranks_with_input) {
  const Lock lock(mutex_);
  divide_by(ranks_with_input);
}

std::optional<bool> Reducer::finite() {
  const Lock lock(mutex_);
  return finite_now();
}

// Waits for the devices if they have flags.
std::optional<bool> Reducer::finite_now() {
  for (const auto& [device, flag] : flags_)
    if (flag.seen.item<int32_t>() != 0) finite_ = false;
  return finite_;
}

std::vector<std::size_t> Reducer::non_finite() {
  const Lock lock(mutex_);
  std::vector<std::size_t> result;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& grad = parameters_.tensors()[i].grad();
    if (grad.defined() && !all_finite(grad.is_sparse() ? grad._values() : grad))
      result.push_back(parameters_.param_index(i));
  }
  return result;
}

int64_t Reducer::own_non_finite() {
  const Lock lock(mutex_);
  return own_non_finite_;
}

// A gradient lies in its bucket as its parameter lies in memory, where that is dense.
std::map<std::size_t, at::Tensor> Reducer::residuals() {
  const Lock lock(mutex_);
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::map<std::size_t, at::Tensor> result;
  for (const auto& [param_index, pair] : residuals_.all()) {
    result[param_index] = as_parameter(pair.current(), parameters_.all()[param_index].tensor).flatten().cpu().clone();
  }
  return result;
}

void Reducer::set_residuals(const std::map<std::size_t, at::Tensor>& residuals) {
  const Lock lock(mutex_);
  if (backward_.active()) throw Error(ErrorKind::kState, "residuals cannot be set during a backward");
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (const auto& [param_index, values] : residuals) {
    const bool known = param_index < parameters_.all().size() && keeps_residuals(reduction_of(param_index));
    if (!known || values.numel() != parameters_.all()[param_index].tensor.numel()) {
      throw Error(ErrorKind::kValue, "a residual of " + std::to_string(values.numel()) + " elements for parameter " +
                                         (param_index < parameters_.all().size()
                                              ? parameters_.all()[param_index].name + ", which has " +
                                                    std::to_string(parameters_.all()[param_index].tensor.numel()) +
                                                    (known ? " elements" : " elements and no error feedback")
                                              : std::to_string(param_index) + ", which does not exist"));
    }
  }
  residuals_.clear();
  for (const auto& [param_index, values] : residuals) {
    const at::Tensor& parameter = parameters_.all()[param_index].tensor;
    const at::Tensor current = at::empty({values.numel()}, parameter.options().dtype(at::kFloat));
    as_parameter(current, parameter).copy_(values.reshape(parameter.sizes()));
    residuals_.set(param_index, current);
  }
}

std::vector<BucketRow> Reducer::bucket_rows() {
  const Lock lock(mutex_);
  std::vector<BucketRow> rows;
  for (std::size_t index = 0; index < plan_.buckets().size(); ++index) {
    BucketRow row;
    row.index = index;
    row.name = describe_bucket(index, plan_.buckets()[index], parameters_.names());
    row.reduction = reduction_of_bucket(index);
    row.free = dynamic_cast<const AutoReduction*>(
                   reduction_of(parameters_.param_index(plan_.buckets()[index].front()))) != nullptr;
    const auto* native = dynamic_cast<const CodecReduction*>(bucket_reduction(index));
    for (std::size_t member : plan_.buckets()[index]) {
      const PlannedGradient& item = plan_.gradients()[member];
      row.parameters.push_back(parameters_.param_index(member));
      row.numel += item.numel;
      row.bytes_before += item.bytes();
      row.bytes_after +=
          native != nullptr && native->enabled() ? codec(native->codec()).encoded_bytes(item.numel) : item.bytes();
    }
    if (index < store_.size()) {
      if (const auto& report = store_[index].report) row.coding_s = static_cast<double>(report->coding_ns) * 1e-9;
      row.launched_s = static_cast<double>(nanoseconds(store_[index].times.launched) - stats_.launched_ns) * 1e-9;
      row.seconds = store_[index].times.seconds;
      row.exposed_s = store_[index].times.exposed_s;
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace ringdp
