// UsedMap: the parameters that were used in a backward, by this rank and by any rank. The ranks' marks are sent behind
// the gradients of the last bucket, and summed with them; if no bucket can have them they are an operation of their
// own. A parameter that no rank used keeps its .grad; one warning names those without gradient. Owned by the Reducer,
// used under its lock.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "torch/reducer/bucket_plan.h"
#include "torch/reducer/reducer_group.h"
#include "torch/reducer/trainable_parameters.h"

namespace ringdp {

// The treatment of a parameter without gradient at the end of backward.
enum class UnusedParameters {
  kFinish,  // zeros are sent for it, and one warning names it
  // the same without warning; its bucket may be launched as soon as the graph shows that no gradient will come
  kExpected,
  kForbidden  // DDP's error at the next forward
};

class UsedMap {
 public:
  UsedMap(const TrainableParameters& parameters, const ArrivalTracker& arrivals, ReducerGroup& group,
          UnusedParameters unused)
      : parameters_(parameters), arrivals_(arrivals), group_(group), unused_(unused) {}

  bool needed() const { return unused_ != UnusedParameters::kForbidden; }
  // This rank's part of the map, into a bucket's `marks` [parameters + 1]: 1 for parameters with gradient; the last
  // element is 1 where one lacks a gradient.
  void write(const at::Tensor& marks) const;
  // The same as an operation of its own, whose name ends in `note`. Without input this rank has used nothing and lacks
  // nothing.
  void launch(bool with_input, const std::string& note = {});
  // The last bucket has been reduced. `wanted`: the map is needed; otherwise it is read only at intervals, because
  // that waits for the device. `marks` are that bucket's, undefined if it has none.
  void end_backward(const at::Tensor& marks, bool wanted, int64_t step, bool joining);
  // This rank has run out of input (join), and repeats the operation of the others.
  void shadow();
  void forget() { somewhere_.clear(), some_rank_lacks_ = false; }
  void wait() const {
    if (work_) work_->wait();
  }
  void drop_operations() { work_ = before_ = nullptr; }

  bool used_somewhere(std::size_t parameter) const {
    return arrivals_.used(parameter) || somewhere_.empty() || somewhere_[parameter];
  }
  const std::vector<bool>& somewhere() const { return somewhere_; }  // by parameter; empty: it was not read

  // Warns once about `missing`, this rank's parameters without gradient. The ranks exchange once which of them each
  // lacks.
  void warn(const std::vector<std::size_t>& missing, int64_t step, bool joining);
  void warn_again() { warned_ = false; }

 private:
  bool looks_for_others(int64_t step, bool joining) const;
  void read(const at::Tensor& marks);

  const TrainableParameters& parameters_;
  const ArrivalTracker& arrivals_;
  ReducerGroup& group_;
  const UnusedParameters unused_;
  at::Tensor map_;  // if it is an operation of its own: int32 [parameters + 1]
  c10::intrusive_ptr<c10d::Work> work_;
  c10::intrusive_ptr<c10d::Work> before_;  // of the last backward, if that has not waited for it
  std::vector<bool> somewhere_;
  bool some_rank_lacks_ = false;  // some rank has no gradient for some parameter
  bool warned_ = false;
  bool ranks_named_ = false;  // whether the warning was given; the same on all ranks
};

}  // namespace ringdp
