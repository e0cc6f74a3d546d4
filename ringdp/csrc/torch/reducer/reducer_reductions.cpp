// Buckets that are not reduced exactly: which parameters have which method, their residuals, and whether what came of a
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
#include "torch/device_codec.h"
#include "torch/loss_scale.h"
#include "torch/reducer.h"

namespace ringdp {
namespace {

bool same_method(const Method* a, const Method* b) {
  if (dynamic_cast<const ChosenMethod*>(a) != nullptr && dynamic_cast<const ChosenMethod*>(b) != nullptr) return true;
  const auto* x = dynamic_cast<const NativeMethod*>(a);
  const auto* y = dynamic_cast<const NativeMethod*>(b);
  if (x == nullptr || y == nullptr) return a == b;
  return x->codec() == y->codec() && x->feedback() == y->feedback();
}

bool keeps_residuals(const Method* method) {
  if (const auto* chosen = dynamic_cast<const ChosenMethod*>(method)) return chosen->feedback();
  const auto* native = dynamic_cast<const NativeMethod*>(method);
  return native != nullptr && native->feedback();
}

bool all_finite(const at::Tensor& values) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  return at::isfinite(values).all().item<bool>();
}

}  // namespace

void Reducer::set_methods(MethodPlan plan) {
  MethodPlan before;  // goes when the lock is free: Python is told
  const Lock lock(mutex_);
  check_methods(plan);
  before = std::exchange(methods_, {});
  const auto method_before = [&](std::size_t i) {
    return before.methods.empty() || before.method_of[i] < 0 ? nullptr : before.methods[before.method_of[i]].get();
  };
  methods_ = std::move(plan);
  for (std::size_t i = 0; i < watch_.size(); ++i) {
    const Method* now = method_of(i);
    if (!keeps_residuals(now) || !same_method(method_before(i), now)) residuals_.drop(i);
  }
  exchange_.set_watching(looks_for_non_finite());
  exchange_.set_exchanging_codes(methods_.exchange_codes);
  lay_out_again();
}

void Reducer::check_methods(const MethodPlan& plan) {
  const auto refuse = [](ErrorKind kind, const std::string& text) { throw Error(kind, text); };
  throw_if_failed();
  if (active_) {
    refuse(
        ErrorKind::kState,
        "compression cannot change during a backward, nor after one that an exception left: change it between steps");
  }
  if (backward_due()) {
    refuse(ErrorKind::kState,
           "compression cannot change between a forward and its backward: change it after backward, or let go of the "
           "forward's output");
  }
  if (!plan.methods.empty() && exchange_.has_hook()) refuse(ErrorKind::kState, BucketExchange::kHookAndMethods);
  if (plan.methods.empty()) return;
  if (plan.method_of.size() != watch_.size() || plan.turns.size() != watch_.size()) {
    refuse(ErrorKind::kValue, "one method and one turn for each of " + std::to_string(watch_.size()) + " parameters");
  }
  for (std::size_t i = 0; i < watch_.size(); ++i) {
    const int index = plan.method_of[i];
    if (index >= static_cast<int>(plan.methods.size())) {
      refuse(ErrorKind::kValue, "parameter " + watch_[i].name + " has method " + std::to_string(index) + " of " +
                                    std::to_string(plan.methods.size()));
    }
    const auto* native = index < 0 ? nullptr : dynamic_cast<const NativeMethod*>(plan.methods[index].get());
    if (native == nullptr || group_size_ == 1) continue;
    if (is_plugin(native->codec()) && !watch_[i].tensor.is_cpu()) {
      refuse(ErrorKind::kValue, "the codec " + native->name() + " for parameter " + watch_[i].name +
                                    " is a C library's, for tensors on the CPU; this one is on " +
                                    watch_[i].tensor.device().str());
    }
    if (!exchange_.has_codecs(watch_[i].tensor.device(), plan.exchange_codes)) {
      refuse(ErrorKind::kValue,
             "the codec " + plan.methods[index]->name() + " for parameter " + watch_[i].name +
                 (plan.exchange_codes ? " needs kernels for the parameter's device; this one is on "
                                      : " needs the backend ring and a parameter on the CPU; this one is on ") +
                 watch_[i].tensor.device().str() + " and is reduced by " +
                 exchange_.group()->getBackend(watch_[i].tensor.device().type())->getBackendName() +
                 "; TORCH_DISTRIBUTED_DEBUG=DETAIL hides ring, too");
    }
  }
}

// The graph of a forward that synchronises is still there, and no backward has gone through it.
bool Reducer::backward_due() const { return armed_ && (demanded_ || !due_.expired()); }

bool Reducer::looks_for_non_finite() const { return watching_ || !methods_.methods.empty(); }

void Reducer::watch_finite(bool watch) {
  const Lock lock(mutex_);
  watching_ = watch;
  exchange_.set_watching(looks_for_non_finite());
}

void Reducer::set_loss_scale(double scale) {
  const Lock lock(mutex_);
  loss_scale_ = scale;
}

// A power of two, so that residuals keep their bits when the scale changes; torch's scales are powers of two as a rule.
float Reducer::residual_factor() const {
  double scale = loss_scale_of_backward();
  if (scale == 1.0) scale = loss_scale_;
  return std::isfinite(scale) && scale > 0 ? static_cast<float>(std::exp2(std::floor(std::log2(scale)))) : 1.0f;
}

// Hooks may have operations of their own still to come when their buckets have left.
bool Reducer::calls_back() const {
  return exchange_.has_hook() || std::any_of(methods_.methods.begin(), methods_.methods.end(), [](const auto& method) {
           return dynamic_cast<HookMethod*>(method.get()) != nullptr;
         });
}

void Reducer::list_sections(Bucket& bucket, const at::Tensor& buffer, bool with_residuals) {
  bucket.sections.clear();
  bucket.feedback.clear();
  bucket.residuals.clear();
  bucket.non_finite.reset();
  const NativeMethod* method = BucketExchange::native(bucket);
  if (method == nullptr) return;
  auto* memory = buffer.mutable_data_ptr<float>();
  for (std::size_t position = 0; position < bucket.members.size(); ++position) {
    const std::size_t watched = slots_[bucket.members[position]].watched;
    CompressedSection section;
    section.x = memory + bucket.plan.offsets[position];
    section.count = bucket.plan.lengths[position];
    section.turn = methods_.turns[watched];
    if (with_residuals && (method->feedback() || residuals_.all().contains(watched))) {
      const auto numel = static_cast<int64_t>(section.count);
      const Residuals::Pair& pair = residuals_.of(watched, numel, buffer.device());
      const cuda::Feedback feedback = pair.feedback();
      if (exchange_.exchanges_codes()) {
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

// Codes on a device tell there whether they were finite.
void Reducer::take_flag(Bucket& bucket) {
  const c10::Device device = bucket.buffer.device();
  if (device.is_cpu() || BucketExchange::native(bucket) == nullptr) return;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (!flags_.contains(device)) {
    const auto options = at::TensorOptions().dtype(at::kInt).device(device);
    flags_.emplace(device, Flag{at::zeros({1}, options), c10::impl::VirtualGuardImpl(device.type()).getStream(device)});
  }
  const Flag& flag = flags_.at(device);
  bucket.non_finite = flag.seen;
  bucket.streams.push_back(flag.made_on);
}

// Of the methods that are hooks and were used in this backward. Without the lock: Python answers.
Reducer::HookMethods Reducer::ask_hook_methods() {
  Lock lock(mutex_);
  HookMethods used;
  for (const Bucket& bucket : buckets_) {
    auto* method = dynamic_cast<HookMethod*>(bucket.method);
    if (method != nullptr && method->enabled() && bucket.sent_in == step_) used.emplace(method, std::nullopt);
  }
  lock.unlock();
  for (auto& [method, finite] : used) finite = method->finite();
  return used;
}

void Reducer::look_at_reports(const HookMethods& hook_methods) {
  bool known = true;
  bool finite = true;
  own_non_finite_ = -1;
  for (const Bucket& bucket : buckets_) {
    if (bucket.sent_in != step_) continue;
    std::optional<bool> one;
    const auto method = hook_methods.find(dynamic_cast<HookMethod*>(bucket.method));
    if (bucket.report) {
      one = bucket.report->finite;
      if (own_non_finite_ < 0 && bucket.report->own != nullptr)
        own_non_finite_ = watched_at(bucket, bucket.report->own);
    } else if (method != hook_methods.end() && method->second) {
      one = method->second;
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

// Where nobody looked while it was reduced: sparse gradients, other backends. On a device that would wait for the device;
// what the user's hook made of it need not be the same on all ranks.
std::optional<bool> Reducer::look_at_result(const Bucket& bucket) {
  if (!active_ || !looks_for_non_finite() || exchange_.has_hook()) return std::nullopt;
  const at::Tensor& result = bucket.sparse ? bucket.buffer._values() : bucket.gradients;
  if (result.is_cpu()) return all_finite(result);
  return flag_result(result) ? std::optional(true) : std::nullopt;
}

// Residuals on that device wait for the answer, there: true where it is in the flag.
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

int64_t Reducer::watched_at(const Bucket& bucket, const std::byte* address) const {
  const auto* begin = static_cast<const std::byte*>(bucket.buffer.const_data_ptr());
  const auto element = static_cast<std::size_t>(address - begin) / bucket.buffer.element_size();
  const auto& offsets = bucket.plan.offsets;
  const auto behind = std::upper_bound(offsets.begin(), offsets.end(), element);
  if (behind == offsets.begin()) return -1;
  const auto position = static_cast<std::size_t>(behind - offsets.begin()) - 1;
  return static_cast<int64_t>(slots_[bucket.members[position]].watched);
}

// Parameters that no rank used keep what they had.
void Reducer::commit_residuals() {
  if (!finite_.value_or(true)) return;
  std::vector<std::size_t> written;
  std::vector<std::size_t> paid;
  for (const Bucket& bucket : buckets_) {
    if (bucket.sent_in != step_ || bucket.residuals.empty()) continue;
    auto& done = BucketExchange::native(bucket) == nullptr ? paid : written;
    for (std::size_t member : bucket.members) {
      if (used_somewhere(member)) done.push_back(slots_[member].watched);
    }
  }
  for (const std::size_t watched : paid) residuals_.drop(watched);
  Residuals::Flags flags;
  for (const auto& [device, flag] : flags_) flags[device] = flag.seen;
  residuals_.commit(written, flags);
}

bool Reducer::used_somewhere(std::size_t parameter) const {
  return slots_[parameter].used || used_.somewhere.empty() || used_.somewhere[parameter];
}

void Reducer::finish_hook_methods(const HookMethods& used) {
  Lock lock(mutex_);
  if (used.empty()) return;
  const bool finite = finite_now().value_or(true);
  std::map<HookMethod*, std::vector<std::string>> unused;
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (!used_somewhere(i)) unused[dynamic_cast<HookMethod*>(slots_[i].method)].push_back(names_[i]);
  }
  lock.unlock();
  for (const auto& [method, _] : used) method->commit(finite, unused[method]);
}

// Of all ranks: 0.
void Reducer::divide_by(int64_t ranks_with_input) {
  const int64_t before = exchange_.divisor();
  exchange_.set_divisor(ranks_with_input);
  if (before == ranks_with_input) return;
  for (const auto& method : methods_.methods) {
    if (auto* hook = dynamic_cast<HookMethod*>(method.get())) hook->set_divisor(ranks_with_input);
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

// Waits for the devices, where they know more than the host.
std::optional<bool> Reducer::finite_now() {
  for (const auto& [device, flag] : flags_)
    if (flag.seen.item<int32_t>() != 0) finite_ = false;
  return finite_;
}

std::vector<std::size_t> Reducer::non_finite() {
  const Lock lock(mutex_);
  std::vector<std::size_t> result;
  for (const Slot& slot : slots_) {
    const at::Tensor& grad = slot.parameter.grad();
    if (grad.defined() && !all_finite(grad.is_sparse() ? grad._values() : grad)) result.push_back(slot.watched);
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
  for (const auto& [watched, pair] : residuals_.all()) {
    result[watched] = as_parameter(pair.current(), watch_[watched].tensor).flatten().cpu().clone();
  }
  return result;
}

void Reducer::set_residuals(const std::map<std::size_t, at::Tensor>& residuals) {
  const Lock lock(mutex_);
  if (active_) throw Error(ErrorKind::kState, "residuals cannot be set during a backward");
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (const auto& [watched, values] : residuals) {
    const bool known = watched < watch_.size() && keeps_residuals(method_of(watched));
    if (!known || values.numel() != watch_[watched].tensor.numel()) {
      throw Error(ErrorKind::kValue,
                  "a residual of " + std::to_string(values.numel()) + " elements for parameter " +
                      (watched < watch_.size()
                           ? watch_[watched].name + ", which has " + std::to_string(watch_[watched].tensor.numel()) +
                                 (known ? " elements" : " elements and no error feedback")
                           : std::to_string(watched) + ", which does not exist"));
    }
  }
  residuals_.clear();
  for (const auto& [watched, values] : residuals) {
    const at::Tensor& parameter = watch_[watched].tensor;
    const at::Tensor current = at::empty({values.numel()}, parameter.options().dtype(at::kFloat));
    as_parameter(current, parameter).copy_(values.reshape(parameter.sizes()));
    residuals_.set(watched, current);
  }
}

std::vector<BucketRow> Reducer::bucket_rows() {
  const Lock lock(mutex_);
  std::vector<BucketRow> rows;
  for (std::size_t index = 0; index < layout_.size(); ++index) {
    BucketRow row;
    row.index = index;
    row.name = describe_bucket(index, layout_[index], names_);
    row.method = method_of_bucket(index);
    row.free = dynamic_cast<const ChosenMethod*>(slots_[layout_[index].front()].method) != nullptr;
    const auto* native = dynamic_cast<const NativeMethod*>(bucket_method(index));
    for (std::size_t member : layout_[index]) {
      const LayoutItem& item = items_[member];
      row.parameters.push_back(slots_[member].watched);
      row.numel += item.numel;
      row.bytes_before += item.numel * item.element_bytes;
      row.bytes_after += native != nullptr && native->enabled() ? codec(native->codec()).encoded_bytes(item.numel)
                                                                : item.numel * item.element_bytes;
    }
    if (index < buckets_.size()) {
      if (const auto& report = buckets_[index].report) row.coding_s = static_cast<double>(report->coding_ns) * 1e-9;
      row.launched_s = static_cast<double>(nanoseconds(buckets_[index].times.launched) - stats_.launched_ns) * 1e-9;
      row.seconds = buckets_[index].times.seconds;
      row.exposed_s = buckets_[index].times.exposed_s;
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace ringdp
