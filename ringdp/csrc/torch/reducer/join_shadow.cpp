#include "torch/reducer/join_shadow.h"

#include <utility>

namespace ringdp {

void JoinShadow::set_forward_work(c10::intrusive_ptr<c10d::Work> work, bool divide_by_all_ranks) {
  forward_work_ = std::move(work);
  divide_by_all_ranks_ = divide_by_all_ranks;
}

void JoinShadow::divide() {
  const auto work = std::exchange(forward_work_, nullptr);
  if (!work) return divide_by(0);
  work->wait();
  divide_by(divide_by_all_ranks_ ? layout_.group.ranks() : work->result()[0].item<int64_t>());
}

void JoinShadow::divide_by(int64_t ranks_with_input) {
  const int64_t before = layout_.group.divisor();
  layout_.group.set_divisor(ranks_with_input);
  if (before != ranks_with_input) layout_.reductions.set_divisor(ranks_with_input);
}

std::vector<c10d::GradBucket> JoinShadow::zero_buckets() {
  layout_.allocate();
  std::vector<c10d::GradBucket> result;
  for (const Bucket& bucket : layout_.store) {
    at::Tensor zeros = layout_.store.zeros(bucket.index, layout_.buckets.hooked(bucket));
    result.push_back(layout_.buckets.describe(bucket, std::move(zeros), layout_.store.size()));
  }
  return result;
}

FuturePointer JoinShadow::shadow(c10d::GradBucket& zeros, int64_t step) {
  TORCH_CHECK(zeros.getIndex() < layout_.store.size(), "bucket ", zeros.getIndex(), " is out of range: there are ",
              layout_.store.size());
  return layout_.buckets.shadow(layout_.store[zeros.getIndex()], zeros, step);
}

void JoinShadow::shadow_used_map() {
  if (layout_.sends_used_map()) used_.shadow();
}

}  // namespace ringdp
