// BucketStore: the buckets' memory, and which part of it each parameter's .grad is. It writes a gradient, times the
// GradientFactors of the backward, into its part when it arrives, and hands the mean out when the bucket is reduced:
// .grad becomes the part itself, so there is no copy back. A large gradient is a bucket by itself, reduced where
// autograd left it. .grad keeps memory of its own where the options ask for it, where another wrapper reduces the same
// parameter, where the bucket has another dtype, in a graph of its own, and where the program has other tensors on
// that memory: as long as the program only zeroes a .grad, all tensors on its memory show the mean. What the program
// keeps of a .grad that it has let go keeps its memory and its values: the bucket gets other memory. Owned by the
// Reducer, used under its lock; but for `take`, which reads and writes only what belongs to its parameter and which
// the threads that run backward call without it, before they report that parameter.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <vector>

#include "torch/reducer/bucket.h"
#include "torch/reducer/bucket_plan.h"
#include "torch/reducer/gradient_hooks.h"
#include "torch/reducer/gradient_weights.h"
#include "torch/reducer/trainable_parameters.h"

namespace ringdp {

class BucketStore {
 public:
  BucketStore(const TrainableParameters& parameters, const BucketPlan& plan, const GradientHooks& hooks,
              const GradientFactors& factors, bool own_gradients)
      : parameters_(parameters), plan_(plan), hooks_(hooks), factors_(factors), own_gradients_(own_gradients) {}

  // The parameters are others. set_dtype follows for each.
  void start();
  // Its gradients have the first type, its bucket the second; the parameter has one of its own.
  void set_dtype(std::size_t parameter, c10::ScalarType gradient, c10::ScalarType bucket);
  // module.double() and the like give parameters other data, which hooks and buckets no longer fit; or its gradients
  // are to have another type.
  bool other_data() const;
  void release(std::size_t parameter);  // its .grad, if that is a part of a bucket, gets memory of its own

  // By the plan. `marks`: the last kept bucket has room for which parameters were used.
  void allocate(bool marks);
  void drop();
  bool empty() const { return buckets_.empty(); }  // until allocate
  // The program may know the address of the bucket's memory: it has another tensor or an array there, or has kept a
  // .grad there since its last mean.
  bool address_known(const Bucket& bucket) const;
  std::size_t size() const { return buckets_.size(); }
  Bucket& operator[](std::size_t index) { return buckets_[index]; }
  const Bucket& operator[](std::size_t index) const { return buckets_[index]; }
  auto begin() const { return buckets_.begin(); }
  auto end() const { return buckets_.end(); }
  // Zeros of what is sent of a bucket; `hooked`: as a hook gets it.
  at::Tensor zeros(std::size_t index, bool hooked);

  // Before a backward writes, also one that averages nothing: a bucket of which the program keeps what it has let go
  // gets other memory. Each .grad that it has not let go stays where it is.
  void leave_kept_memory();
  void begin_backward();  // that averages
  // Before autograd adds `gradient` to .grad. Returns what it is to add; undefined: nothing, it is in the bucket
  // already.
  at::Tensor take(std::size_t parameter, const at::Tensor& gradient);
  // .grad, or zeros where there is none, becomes the parameter's part of the bucket.
  void write(std::size_t parameter);
  // Where there are no buckets: .grad times what the GradientFactors have for a .grad that stays.
  void multiply(std::size_t parameter);
  // The mean becomes .grad. `keep_none`: not where .grad is None.
  void hand_out(std::size_t parameter, bool keep_none);
  void end_backward();
  void zero_gradients();

 private:
  struct Slot {  // of one parameter
    at::Tensor parameter;
    at::Tensor view;  // its part of the bucket
    bool direct = false;
    c10::ScalarType dtype = at::kFloat;           // its own when the buckets were planned
    c10::ScalarType gradient_dtype = at::kFloat;  // of .grad, then
    c10::ScalarType bucket_dtype = at::kFloat;
    int new_in = -1;          // autograd's number of the last backward that found .grad to be None
    bool fresh = false;       // .grad was None when the backward under way began
    bool handed_out = false;  // .grad has been the same since it was handed out
    bool weighted = false;    // what is in the view was multiplied by the factors of the backward under way
    bool copy_back = false;   // .grad stays as it is; the result is copied into it

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
