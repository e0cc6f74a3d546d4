// BucketStore: the buckets' memory, and the part of it that is each parameter's .grad. It writes a gradient, times the
// GradientFactors of the backward, into its part when it arrives, and hands out the mean when the bucket is reduced:
// .grad becomes the part itself, without a copy back. A large gradient is a bucket by itself, reduced in autograd's
// memory. .grad keeps memory of its own if the options ask for it, another wrapper reduces the same parameter, the
// bucket has another dtype, .grad has a graph, or the program has other tensors on its memory: as long as the program
// only zeroes a .grad, all tensors on its memory have the mean. A tensor that the program keeps of a replaced .grad
// keeps its memory and values: the bucket gets other memory. Owned by the Reducer, used under its lock, except `take`,
// which accesses only the data of its parameter: the threads that run backward call it without the lock, before they
// report that parameter.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

#include "torch/reducer/bucket.h"
#include "torch/reducer/bucket_plan.h"
#include "torch/reducer/gradient_hooks.h"
#include "torch/reducer/gradient_weights.h"
#include "torch/reducer/plan.h"

namespace ringdp {

class BucketStore {
 public:
  BucketStore(const TrainableParameters& parameters, const BucketPlan& plan, const GradientHooks& hooks,
              const GradientFactors& factors, bool own_gradients)
      : parameters_(parameters), plan_(plan), hooks_(hooks), factors_(factors), own_gradients_(own_gradients) {}

  // New parameters. The caller then calls set_dtype for each.
  void start();
  // The types of its gradients and of its bucket; that of the parameter may be another one.
  void set_dtype(std::size_t parameter, c10::ScalarType gradient, c10::ScalarType bucket);
  // Whether the parameter's data was replaced (module.double() and the like), or its gradients' type, so that hooks
  // and buckets are outdated.
  bool other_data() const;
  void release(std::size_t parameter);  // gives its .grad, if that is a part of a bucket, memory of its own

  // Makes the buckets of the plan. `marks`: the last kept bucket has room for the marks of used parameters.
  void allocate(bool marks);
  void drop();
  bool empty() const { return buckets_.empty(); }  // before allocate
  // Whether the program may have the address of the bucket's memory: another tensor or an array on it, or a .grad kept
  // since its last mean.
  bool address_known(const Bucket& bucket) const;
  std::size_t size() const { return buckets_.size(); }
  Bucket& operator[](std::size_t index) { return buckets_[index]; }
  const Bucket& operator[](std::size_t index) const { return buckets_[index]; }
  auto begin() const { return buckets_.begin(); }
  auto end() const { return buckets_.end(); }
  // Zeros in place of the bucket's input; `hooked`: in the form for a hook.
  at::Tensor zeros(std::size_t index, bool hooked);

  // Before any backward writes: a bucket of which the program keeps a replaced .grad gets other memory. Each .grad
  // that was not replaced keeps its place.
  void leave_kept_memory();
  void begin_backward();  // that averages
  // Before autograd adds `gradient` to .grad. Returns the tensor to add; undefined: it is in the bucket already.
  at::Tensor take(std::size_t parameter, const at::Tensor& gradient);
  // Writes .grad, or zeros without one, into the parameter's part of the bucket.
  void write(std::size_t parameter);
  // Without buckets: multiplies .grad by the GradientFactors' `outgoing`.
  void multiply(std::size_t parameter);
  // The mean becomes .grad. `keep_none`: except if .grad is None.
  void hand_out(std::size_t parameter, bool keep_none);
  void end_backward();
  void zero_gradients();

 private:
  struct Slot {  // of one parameter
    at::Tensor parameter;
    at::Tensor view;  // its part of the bucket
    bool direct = false;
    c10::ScalarType dtype = at::kFloat;           // the parameter's, when the buckets were planned
    c10::ScalarType gradient_dtype = at::kFloat;  // of .grad, at the same time
    c10::ScalarType bucket_dtype = at::kFloat;
    int new_in = -1;          // autograd's number of the last backward that found .grad to be None
    bool fresh = false;       // .grad was None when the present backward began
    bool handed_out = false;  // .grad is the tensor that was handed out
    bool weighted = false;    // the view was multiplied by the factors of the present backward
    bool copy_back = false;   // the result is copied into .grad

    bool cast() const { return bucket_dtype != gradient_dtype; }
  };

  // Whether .grad has memory of its own.
  bool owns_gradient(std::size_t parameter) const { return own_gradients_ || hooks_.shared(parameter); }
  // The program may have another tensor on the memory of .grad.
  bool kept(const Slot& slot) const;
  std::size_t own_tensors(const Bucket& bucket) const;
  bool kept_from_before(const Bucket& bucket) const;
  void move_gradients();
  void give_memory(Bucket& bucket);
  void renew_memory(Bucket& bucket);
  void write_direct(std::size_t parameter, Bucket& bucket);
  void adopt(std::size_t parameter, at::Tensor& gradient);
  void renew_view(std::size_t parameter);

  const TrainableParameters& parameters_;
  const BucketPlan& plan_;
  const GradientHooks& hooks_;
  const GradientFactors& factors_;
  const bool own_gradients_;
  std::vector<Slot> slots_;
  std::vector<Bucket> buckets_;
};

}  // namespace ringdp
