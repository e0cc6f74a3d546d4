#include "torch/reducer/used_map.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/real.h>
#include <ATen/ops/tensor.h>

#include <utility>

#include "base/naming.h"
#include "torch/backend/process_group.h"
#include "torch/reducer/messages.h"

namespace ringdp {

void UsedMap::write(const at::Tensor& marks) const {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  marks.fill_(1);
  bool lacking = false;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (arrivals_.used(i)) continue;
    marks.select(0, static_cast<int64_t>(i)).zero_();
    lacking = true;
  }
  if (!lacking) marks.select(0, static_cast<int64_t>(parameters_.size())).zero_();
}

void UsedMap::launch(bool with_input, const std::string& note) {
  std::vector<int32_t> used(parameters_.size() + 1, 0);
  for (std::size_t i = 0; with_input && i < parameters_.size(); ++i) (arrivals_.used(i) ? used[i] : used.back()) = 1;
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  map_ = at::tensor(used, at::kInt).to(group_.control_device(parameters_.tensors().front()));
  const NamedScope scope("which parameters were used" + note);
  std::vector<at::Tensor> tensors{map_};
  work_ = group_.process_group()->allreduce(tensors);
}

void UsedMap::end_backward(const at::Tensor& marks, bool wanted, int64_t step, bool joining) {
  forget();
  if (needed() && (wanted || looks_for_others(step, joining))) read(marks);
  // The host waits for it only when it reads it, or one backward later: the device's buckets have not ended either.
  if (group_.host_control()) {
    if (work_) group_.ring(c10::kCPU)->finish_before_shutdown(work_);
    std::swap(work_, before_);
  }
  if (auto work = std::exchange(work_, nullptr)) group_.wait(*work, map_.device());
}

void UsedMap::read(const at::Tensor& marks) {
  at::Tensor counts;
  if (work_) {
    group_.wait(*std::exchange(work_, nullptr), map_.device());
    counts = map_;
  } else {
    if (!marks.defined()) return;
    counts = at::real(marks);
  }
  const at::Tensor flags = counts.gt(0).cpu().contiguous();
  const bool* flag = flags.const_data_ptr<bool>();
  somewhere_.assign(flag, flag + parameters_.size());
  some_rank_lacks_ = flag[parameters_.size()];
}

void UsedMap::shadow() {
  if (auto before = std::exchange(before_, nullptr)) before->wait();
  launch(/*with_input=*/false);
  group_.wait(*std::exchange(work_, nullptr), map_.device());
}

bool UsedMap::looks_for_others(int64_t step, bool joining) const {
  if (unused_ != UnusedParameters::kFinish || arrivals_.static_graph() || ranks_named_ || joining) return false;
  if (group_.members_may_change()) return false;  // it takes an operation after the step
  const bool cheap = parameters_.tensors().front().is_cpu() && !group_.host_control();
  return group_.ranks() > 1 && (cheap || (step & (step - 1)) == 0);
}

void UsedMap::warn(const std::vector<std::size_t>& missing, int64_t step, bool joining) {
  if (unused_ != UnusedParameters::kFinish || arrivals_.static_graph()) return;
  std::vector<std::vector<uint8_t>> ranks;
  if (looks_for_others(step, joining) && some_rank_lacks_) {
    ranks_named_ = true;
    std::vector<uint8_t> mine;
    for (std::size_t i = 0; i < parameters_.size(); ++i) mine.push_back(arrivals_.used(i) ? 1 : 0);
    ranks = group_.gather(mine, group_.control_device(parameters_.tensors().front()), "which ranks lack gradients");
  }
  if (missing.empty() || std::exchange(warned_, true)) return;
  const std::string which = ranks.empty() ? unused_here(missing, somewhere_, parameters_.names())
                                          : unused_by_ranks(ranks, parameters_.names());
  TORCH_WARN(
      "parameters without gradient in step ", step, " on rank ", group_.rank(), ". ", which,
      " This warning appears once; find_unused_parameters=True declares that it is intended, False makes it an error.");
}

}  // namespace ringdp
