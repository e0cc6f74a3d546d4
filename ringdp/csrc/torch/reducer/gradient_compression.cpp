#include "torch/reducer/gradient_compression.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "collective/compressed_plan.h"
#include "torch/backend/process_group.h"
#include "torch/bindings/bindings.h"
#include "torch/device/device_codec.h"
#include "torch/reducer/step_results.h"

namespace ringdp {

namespace {

at::TensorOptions floats_on(c10::Device device) { return at::TensorOptions().dtype(at::kFloat).device(device); }

c10::Stream current_stream(c10::Device device) {
  if (device.is_cpu()) return c10::Stream(c10::Stream::DEFAULT, device);
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// All flags combined in one on that device; undefined if there are none.
at::Tensor joined(const Residuals::Flags& flags, c10::Device device) {
  at::Tensor result;
  for (const auto& [where, flag] : flags) {
    const at::Tensor here = flag.to(device, /*non_blocking=*/!device.is_cpu());
    result = result.defined() ? at::maximum(result, here) : here;
  }
  return result;
}

}  // namespace

std::size_t Residuals::Pair::index() const {
  return index_ ? *index_ : static_cast<std::size_t>(which_.item<int32_t>());
}

int32_t* Residuals::Pair::which() const {
  if (!which_.defined())
    which_ = at::full({1}, static_cast<int64_t>(index()), floats_on(both_[0].device()).dtype(at::kInt));
  return which_.mutable_data_ptr<int32_t>();
}

cuda::Feedback Residuals::Pair::feedback(std::vector<at::Tensor>& kept) const {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  cuda::Feedback result;
  for (std::size_t i = 0; i < both_.size(); ++i) result.both[i] = both_[i].mutable_data_ptr<float>();
  result.which = which();
  kept.insert(kept.end(), {both_[0], both_[1], which_});
  return result;
}

at::Tensor Residuals::current(const std::string& name) const {
  const auto found = pairs_.find(name);
  return found == pairs_.end() || !found->second.left_ ? at::Tensor() : found->second.current();
}

const Residuals::Pair& Residuals::write(const std::string& name, int64_t numel, c10::Device device) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  Pair& pair = pairs_[name];
  const at::Tensor& first = pair.both_[0];
  if (!first.defined() || first.numel() != numel || first.device() != device) {
    pair = {};
    for (at::Tensor& memory : pair.both_) memory = at::zeros({numel}, floats_on(device));
  }
  pair.in_step_ = Pair::InStep::kWritten;
  return pair;
}

at::Tensor Residuals::send(const std::string& name) {
  const auto found = pairs_.find(name);
  if (found == pairs_.end()) return {};
  found->second.in_step_ = Pair::InStep::kSent;
  return found->second.current();
}

void Residuals::commit(const Flags& non_finite, const Names& unused) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::unordered_map<c10::Device, std::vector<int32_t*>> on_device;
  for (auto one = pairs_.begin(); one != pairs_.end();) {
    auto& [name, pair] = *one;
    const Pair::InStep in_step = std::exchange(pair.in_step_, Pair::InStep::kUntouched);
    const bool counts = in_step != Pair::InStep::kUntouched && !unused.contains(name);
    if (counts && in_step == Pair::InStep::kSent) {
      one = pairs_.erase(one);
      continue;
    }
    ++one;
    if (!counts) continue;
    if (!non_finite.empty() || pair.which_.defined()) on_device[pair.both_[0].device()].push_back(pair.which());
    if (!non_finite.empty())
      pair.index_.reset();
    else if (pair.index_)
      pair.index_ = 1 - *pair.index_;
    pair.left_ = true;
  }
  for (const auto& [device, which] : on_device) {
    const at::Tensor flag = joined(non_finite, device);
    const int32_t* seen = flag.defined() ? flag.const_data_ptr<int32_t>() : nullptr;
    const c10::OptionalDeviceGuard guard(device.is_cpu() ? std::nullopt : std::optional(device));
    device_codec(device.type())->commit(which, seen, current_stream(device));
  }
}

void Residuals::drop_step() {
  for (auto& [_, pair] : pairs_) pair.in_step_ = Pair::InStep::kUntouched;
}

void Residuals::set(const std::string& name, const at::Tensor& current) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  Pair& pair = pairs_[name] = {};
  pair.both_[0] = current.detach().reshape({-1}).to(at::kFloat, /*non_blocking=*/false, /*copy=*/true).contiguous();
  pair.both_[1] = at::zeros_like(pair.both_[0]);
  pair.left_ = true;
}

namespace {

using torch::autograd::get_current_graph_task_id;

constexpr int kNoBackward = -1;
constexpr std::size_t kKept = 64;  // backwards that may run at once, in different threads

class LossScales {
 public:
  void note(int backward, float scale) {
    std::scoped_lock lock(mutex_);
    for (Entry& entry : entries_) {
      if (entry.backward != backward) continue;
      entry.scale = scale;
      return;
    }
    entries_[next_++ % kKept] = {backward, scale};
  }

  float of(int backward) {
    std::scoped_lock lock(mutex_);
    for (const Entry& entry : entries_)
      if (entry.backward == backward) return entry.scale;
    return 1;
  }

 private:
  struct Entry {
    int backward = kNoBackward;
    float scale = 1;
  };

  std::mutex mutex_;
  std::array<Entry, kKept> entries_;
  std::size_t next_ = 0;
};

// Autograd numbers the backwards of a whole process.
LossScales& scales() {
  static LossScales all;
  return all;
}

}  // namespace

void note_loss_scale(float scale) {
  if (const int backward = get_current_graph_task_id(); backward != kNoBackward) scales().note(backward, scale);
}

float loss_scale_of_backward() {
  const int backward = get_current_graph_task_id();
  return backward == kNoBackward ? 1 : scales().of(backward);
}

void bind_loss_scale(pybind11::module_& module) {
  module.def("note_loss_scale", &note_loss_scale, pybind11::arg("scale"),
             "Inside a backward: its loss was multiplied by `scale`.");
  module.def("loss_scale_of_backward", &loss_scale_of_backward,
             "The loss scale of the backward under way; 1 where none was noted.");
}

namespace {

bool same_reduction(const Reduction* a, const Reduction* b) {
  if (is_auto(a) && is_auto(b)) return true;
  const auto* x = dynamic_cast<const CodecReduction*>(a);
  const auto* y = dynamic_cast<const CodecReduction*>(b);
  if (x == nullptr || y == nullptr) return a == b;
  return x->codec() == y->codec() && x->feedback() == y->feedback();
}

bool has_feedback(const Reduction* reduction) {
  if (const auto* chosen = dynamic_cast<const AutoReduction*>(reduction)) return chosen->feedback();
  const auto* native = dynamic_cast<const CodecReduction*>(reduction);
  return native != nullptr && native->feedback();
}

[[noreturn]] void refuse_residual(const std::string& text) { throw Error(ErrorKind::kValue, text); }

}  // namespace

ReductionPlan GradientCompression::set(ReductionPlan reductions) {
  const std::size_t count = parameters_.all().size();
  std::vector<const Reduction*> before(count);
  for (std::size_t i = 0; i < count && !reductions_.none(); ++i) {
    const int number = reductions_.number_of_parameter(i);
    if (number >= 0) before[i] = reductions_.all().reductions[static_cast<std::size_t>(number)].get();
  }
  ReductionPlan replaced = reductions_.replace(std::move(reductions));
  for (std::size_t i = 0; i < count; ++i) {
    const Reduction* now = reductions_.of_parameter(i);
    if (!has_feedback(now) || !same_reduction(before[i], now)) residuals_.drop(name_of(i));
  }
  return replaced;
}

ReductionPlan GradientCompression::clear() {
  residuals_.clear();
  return reductions_.replace({});
}

bool GradientCompression::keeps_residuals() const {
  const auto& all = reductions_.all().reductions;
  return std::any_of(all.begin(), all.end(), [](const auto& one) { return has_feedback(one.get()); });
}

// A power of two, so that residuals keep their bits when the scale changes; torch's scales are powers of two as a rule.
void GradientCompression::begin_backward() {
  double scale = loss_scale_of_backward();
  if (scale == 1.0) scale = program_scale_;
  residuals_.drop_step();  // of a backward that did not end
  scale_ = std::isfinite(scale) && scale > 0 ? static_cast<float>(std::exp2(std::floor(std::log2(scale)))) : 1.0f;
}

// The owner sends what the mean lacks, times the number of ranks; another rank sends what its own gradient lacks.
void GradientCompression::follow_members() {
  const ProcessGroupRing* ring = group_.ring(c10::kCPU);
  if (ring == nullptr || reductions_.none()) return;
  const GroupView now = ring->group()->all_reduce_view();
  const GroupView before = std::exchange(members_, now);
  const bool as_before = before.members == now.members && before.hosts == now.hosts && before.weights == now.weights;
  if (before.members.empty() || as_before) return;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (std::size_t index = 0; index < parameters_.all().size(); ++index) {
    const at::Tensor current = residuals_.current(name_of(index));
    if (!current.defined()) continue;
    const at::Tensor own = current.clone();
    scale_owned_part(before, index, own, static_cast<float>(before.size));
    scale_owned_part(now, index, own, 1.0f / static_cast<float>(now.size));
    residuals_.set(name_of(index), own);
  }
}

void GradientCompression::list_sections(Bucket& bucket, const CodecReduction& reduction, const at::Tensor& buffer,
                                        bool with_residuals) {
  auto* memory = buffer.mutable_data_ptr<float>();
  auto* result = bucket.result.defined() ? bucket.result.mutable_data_ptr<float>() : nullptr;
  for (std::size_t position = 0; position < bucket.members.size(); ++position) {
    const std::size_t param_index = parameters_.param_index(bucket.members[position]);
    CompressedSection section;
    section.x = memory + bucket.memory.offsets[position];
    if (result != nullptr) section.to = result + bucket.memory.offsets[position];
    section.count = bucket.memory.lengths[position];
    section.owner_offset = reductions_.owner_offset(param_index);
    const std::string& name = name_of(param_index);
    if (with_residuals && (reduction.feedback() || residuals_.contains(name))) {
      const Residuals::Pair& pair = residuals_.write(name, static_cast<int64_t>(section.count), buffer.device());
      if (exchanges_codes()) {
        bucket.codes.feedback.push_back(pair.feedback(bucket.codes.residuals));
      } else {
        const at::Tensor now = pair.current(), next = pair.next();
        section.residual = now.const_data_ptr<float>();
        section.new_residual = next.mutable_data_ptr<float>();
        bucket.codes.residuals.insert(bucket.codes.residuals.end(), {now, next});
      }
    }
    bucket.codes.sections.push_back(section);
  }
}

void GradientCompression::add_residuals(Bucket& bucket) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (std::size_t position = 0; position < bucket.members.size(); ++position) {
    const std::size_t param_index = parameters_.param_index(bucket.members[position]);
    const at::Tensor current = residuals_.send(name_of(param_index));
    if (!current.defined()) continue;
    const at::Tensor residual = current.clone();
    scale_owned_part(param_index, residual, static_cast<float>(group_.ranks_with_input()));
    bucket.gradients.flatten()
        .narrow(0, static_cast<int64_t>(bucket.memory.offsets[position]),
                static_cast<int64_t>(bucket.memory.lengths[position]))
        .add_(residual, scale_);
  }
}

void GradientCompression::commit(const UsedMap& used, const OverflowReport& overflow) {
  if (residuals_.empty()) return;
  if (!overflow.finite_on_host().value_or(true)) return residuals_.drop_step();
  Residuals::Names unused;
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    if (!used.used_somewhere(i)) unused.insert(parameters_.names()[i]);
  residuals_.commit(overflow.flags(), unused);
}

// `residual` has the memory layout of the gradient.
void GradientCompression::scale_owned_part(std::size_t param_index, const at::Tensor& residual, float factor) const {
  ProcessGroupRing* ring = group_.ring(c10::kCPU);
  if (ring == nullptr) return;
  scale_owned_part(ring->group()->all_reduce_view(), param_index, residual, factor);
}

void GradientCompression::scale_owned_part(const GroupView& members, std::size_t param_index,
                                           const at::Tensor& residual, float factor) const {
  const auto count = static_cast<std::size_t>(residual.numel());
  for (const auto& [begin, end] : owned_elements(members, count, reductions_.owner_offset(param_index)))
    residual.narrow(0, static_cast<int64_t>(begin), static_cast<int64_t>(end - begin)).mul_(factor);
}

GradientCompression::ByParameter GradientCompression::take_residuals(const std::vector<std::size_t>& param_indices) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  ByParameter result;
  for (const std::size_t index : param_indices) {
    const at::Tensor current = residuals_.current(name_of(index));
    if (!current.defined()) continue;
    const at::Tensor residual = current.clone();
    scale_owned_part(index, residual, static_cast<float>(group_.ranks()));
    result[index] = residual;
    residuals_.drop(name_of(index));
  }
  return result;
}

void GradientCompression::give_residuals(const ByParameter& residuals) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (const auto& [index, values] : residuals) {
    if (index >= parameters_.all().size() || values.numel() != parameters_.all()[index].tensor.numel())
      refuse_residual("the residual of parameter " + std::to_string(index) + " has " + std::to_string(values.numel()) +
                      " elements");
    const at::Tensor own = values.flatten().to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
    scale_owned_part(index, own, 1.0f / static_cast<float>(group_.ranks()));
    residuals_.set(name_of(index), own);
  }
}

// In its bucket a gradient has the memory layout of its parameter, if that is dense.
GradientCompression::ByParameter GradientCompression::residuals() const {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  ByParameter result;
  for (std::size_t index = 0; index < parameters_.all().size(); ++index) {
    const ModuleParameter& parameter = parameters_.all()[index];
    const at::Tensor current = residuals_.current(parameter.name);
    if (current.defined()) result[index] = as_parameter(current, parameter.tensor).flatten().cpu().clone();
  }
  return result;
}

void GradientCompression::set_residuals(const ByParameter& residuals) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const std::vector<ModuleParameter>& all = parameters_.all();
  for (const auto& [index, values] : residuals) {
    const std::string what = "a residual of " + std::to_string(values.numel()) + " elements for parameter ";
    if (index >= all.size()) refuse_residual(what + std::to_string(index) + ", which does not exist");
    const bool kept = has_feedback(reductions_.of_parameter(index));
    if (!kept || values.numel() != all[index].tensor.numel()) {
      refuse_residual(what + all[index].name + ", which has " + std::to_string(all[index].tensor.numel()) +
                      (kept ? " elements" : " elements and no error feedback"));
    }
  }
  residuals_.clear();
  for (const auto& [index, values] : residuals) {
    const at::Tensor& parameter = all[index].tensor;
    const at::Tensor current = at::empty({values.numel()}, parameter.options().dtype(at::kFloat));
    as_parameter(current, parameter).copy_(values.reshape(parameter.sizes()));
    residuals_.set(all[index].name, current);
  }
}

}  // namespace ringdp
