// GradientCompression: the residuals of codes, and adding them to the next gradients. On the owner of a mean, a
// residual is what the mean lacks; on other ranks what the rank's gradient lacks (docs/reference/wire_format.md).
// Residuals of a backward count only if all of its gradients were finite. Owned by the Reducer, used under its lock.
//
// The loss scale of a backward: ringdp.amp notes it, the reducers that average the gradients read it. Stored by
// autograd's number of that backward, so losses with different scales do not mix; for the last few backwards only. Any
// thread that runs a part of the backward; no GIL needed.
//
// Residuals: the part of each parameter's gradient that compression has left out, to be added in the next step (error
// feedback). Each has two buffers: a step reads the current one and writes the other, which becomes current only if
// the step counts. Only `commit` decides this. They are stored by the parameter's name, so buckets may change. Owner
// and thread: a Reducer has one and uses it under its lock; in Python the states of compressors have one
// (compression/exchange/states.py), whose calls hold the GIL. Operations in flight keep the tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "collective/operation.h"
#include "cuda/kernels.h"
#include "torch/reducer/bucket.h"
#include "torch/reducer/plan.h"
#include "torch/reducer/reducer_group.h"

namespace ringdp {

class OverflowReport;
class UsedMap;

class Residuals {
 public:
  using Names = std::unordered_set<std::string>;
  using Flags =
      std::unordered_map<c10::Device, at::Tensor>;  // int32 [1] on that device: not 0: an element was not finite

  // The two buffers of one residual: float32 [numel] in the order of the gradient's memory, without loss scale, zeros
  // at first. Elements that are never written (in two levels, those that this rank does not carry) stay zero.
  class Pair {
   public:
    at::Tensor current() const { return both_[index()]; }
    at::Tensor next() const { return both_[1 - index()]; }
    // For kernels, which read the index on their device, so that the host need not wait for it. `kept`: receives the
    // memory that they use.
    cuda::Feedback feedback(std::vector<at::Tensor>& kept) const;

   private:
    friend class Residuals;
    enum class InStep { kUntouched, kWritten, kSent };

    std::size_t index() const;  // waits for the device if only that has it
    int32_t* which() const;

    std::array<at::Tensor, 2> both_;
    std::optional<std::size_t> index_ = 0;  // of the current one; nullopt: a device has decided
    mutable at::Tensor which_;              // the index on the device: int32 [1], made for the first kernel
    bool left_ = false;                     // a step that counts has written it, or `set`
    InStep in_step_ = InStep::kUntouched;
  };

  // The current residual; undefined if no step has left one.
  at::Tensor current(const std::string& name) const;
  bool contains(const std::string& name) const { return pairs_.contains(name); }  // true for zeros, too
  bool empty() const { return pairs_.empty(); }

  // For a step that reads the current one and writes all of the next one.
  const Pair& write(const std::string& name, int64_t numel, c10::Device device);
  // For a step that sends the current one with the exact gradient: if it counts, no residual is left. Undefined if
  // there is none.
  at::Tensor send(const std::string& name);
  // The step has ended, finite as far as the host checked; `non_finite` are the flags of devices. Its residuals become
  // current, except those of parameters that no rank used. On a device this is queued on the current stream.
  void commit(const Flags& non_finite, const Names& unused);
  // The step does not count.
  void drop_step();

  void set(const std::string& name, const at::Tensor& current);  // copies
  void drop(const std::string& name) { pairs_.erase(name); }
  void clear() { pairs_.clear(); }

 private:
  std::map<std::string, Pair> pairs_;
};

// Called inside a backward, by the hook of the scaled loss. Does nothing outside of a backward.
void note_loss_scale(float scale);

// The scale of the backward in which this is called; 1 if its loss was not scaled.
float loss_scale_of_backward();

class GradientCompression {
 public:
  using ByParameter = std::map<std::size_t, at::Tensor>;  // of the module

  GradientCompression(const TrainableParameters& parameters, ReductionAssignment& reductions, ReducerGroup& group)
      : parameters_(parameters), reductions_(reductions), group_(group) {}

  // Replaces the reductions. Keeps residuals of parameters whose reduction does not change. Returns the old
  // reductions, to be released without the lock.
  ReductionPlan set(ReductionPlan reductions);
  ReductionPlan clear();  // also all residuals

  bool keeps_residuals() const;  // of some parameter
  bool exchanges_codes() const { return reductions_.all().exchange_codes; }

  // ---- A backward. Set by torch's scaler; ringdp's calls note_loss_scale instead.
  void set_loss_scale(double scale) { program_scale_ = scale; }
  void begin_backward();
  // The group may have new members (elastic jobs): converts residuals for the new owners of the mean's parts. Called
  // between the operations of one view and those of the next.
  void follow_members();
  float loss_scale() const { return scale_; }  // a power of two: gradients are that much larger than residuals
  // Bucket.codes for `buffer`, which is the bucket's or replaces it; with residuals if the gradients are this rank's.
  void list_sections(Bucket& bucket, const CodecReduction& reduction, const at::Tensor& buffer, bool with_residuals);
  // Adds residuals of earlier codes to an exact bucket. When the step counts, no residual remains.
  void add_residuals(Bucket& bucket);
  // The backward has ended. Its residuals become the current ones if all gradients were finite, except those of
  // parameters that no rank used.
  void commit(const UsedMap& used, const OverflowReport& overflow);

  // ---- Residuals, for the program, in units of this rank's gradient: float32 [numel], in the order of its memory.
  // `take` removes them; `give` overwrites them.
  ByParameter take_residuals(const std::vector<std::size_t>& param_indices);
  void give_residuals(const ByParameter& residuals);
  // In their own units: float32 [numel] in the parameter's row-major order, on the CPU. Copies.
  ByParameter residuals() const;
  void set_residuals(const ByParameter& residuals);
  void clear_residuals() { residuals_.clear(); }

 private:
  const std::string& name_of(std::size_t param_index) const { return parameters_.all()[param_index].name; }
  void scale_owned_part(std::size_t param_index, const at::Tensor& residual, float factor) const;
  void scale_owned_part(const GroupView& members, std::size_t param_index, const at::Tensor& residual,
                        float factor) const;

  const TrainableParameters& parameters_;
  ReductionAssignment& reductions_;
  ReducerGroup& group_;
  Residuals residuals_;
  GroupView members_;  // the view of the residuals, in elastic jobs
  double program_scale_ = 1.0;
  float scale_ = 1.0f;
};

}  // namespace ringdp
