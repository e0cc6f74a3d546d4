// JoinShadow: torch's Join, for ranks that run out of input before others. Before each backward the ranks with input
// count themselves, and divide by that number; a rank without input repeats ("shadows") their operations with zeros.
// Owned by the Reducer, used under its lock.
#pragma once

#include <cstdint>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <vector>

#include "torch/reducer/gradient_layout.h"
#include "torch/reducer/used_map.h"

namespace ringdp {

class JoinShadow {
 public:
  JoinShadow(GradientLayout& layout, UsedMap& used) : layout_(layout), used_(used) {}

  // ---- On a rank with input. `work`: their number, before a forward.
  void set_forward_work(c10::intrusive_ptr<c10d::Work> work, bool divide_by_all_ranks);
  void forget_forward_work() { forward_work_ = nullptr; }
  void begin_backward() { joining_ = forward_work_ != nullptr; }
  bool joining() const { return joining_; }  // some ranks may have run out of input, and repeat all buckets
  void divide();                             // divides the sums of this backward by the counted number
  void divide_by(int64_t ranks_with_input);  // 0: all ranks

  // ---- On a rank without input. During a forward of the others:
  void shadow_weight() { layout_.weights.shadow(); }
  std::vector<c10d::GradBucket> zero_buckets();
  FuturePointer shadow(c10d::GradBucket& zeros, int64_t step);
  void shadow_used_map();  // if it is an operation of its own

 private:
  GradientLayout& layout_;
  UsedMap& used_;
  c10::intrusive_ptr<c10d::Work> forward_work_;
  bool divide_by_all_ranks_ = true;
  bool joining_ = false;
};

}  // namespace ringdp
