// A bucket: one flat buffer of several gradients, each gradient a view of it.
// Owned by the Reducer, touched only under its lock.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <vector>

#include "collective/compressed.h"
#include "collective/finite.h"
#include "cuda/kernels.h"
#include "torch/reducer/bucket_plan.h"
#include "torch/reducer/reduction.h"

namespace ringdp {

inline double seconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

struct BucketTimes {
  using Clock = std::chrono::steady_clock;
  Clock::time_point launched;
  std::shared_ptr<std::atomic<Clock::time_point>> done;  // shared with the future that sets it
  double seconds = 0;                                    // from its launch until it was reduced
  double exposed_s = 0;                                  // for which the end of backward waited for it
};

class ReductionStrategy;

// Of a bucket that a codec reduces, the last time it was sent.
struct BucketCodes {
  std::vector<CompressedSection> sections;
  std::vector<cuda::Feedback>
      feedback;  // of each section, where codes are exchanged (torch/reducer/c10d_compressed_all_reduce.h)
  std::vector<at::Tensor> residuals;  // the memory they point to; of an exact bucket those that were added to it
  at::Tensor non_finite;              // int32 [1] on a device, of all buckets there: see C10dCompressedAllReduce
};

// What a bucket waits for: a work, or a hook's future.
struct BucketOperation {
  ReductionStrategy* strategy = nullptr;  // that launched it; null: nothing is under way
  c10::intrusive_ptr<c10d::Work> work;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  c10d::CommHookInterface* hook = nullptr;  // that reduces the bucket, and whose result `future` is; null: none
};

struct Bucket {
  std::size_t index = 0;
  std::vector<std::size_t> members;  // parameters, in the order of the buffer
  BucketMemory memory;
  std::string name;                    // "bucket 3: layer1.weight, layer1.bias"
  bool sparse = false;                 // one sparse gradient, which is then `buffer` itself
  bool direct = false;                 // one large gradient, reduced where autograd left it: no memory between steps
  std::vector<double> factors;         // of each rank, by which its `gradients` are still to be multiplied; empty: none
  bool carries_marks = false;          // it has `marks`, unless it is sparse
  Reduction* reduction = nullptr;      // null: exactly
  bool too_small = false;              // for the codec that `reduction` is: exactly, see ReductionAssignment::too_small
  c10::ScalarType dtype = at::kFloat;  // of the buffer; a gradient of another one is cast in, and the result back
  at::Tensor buffer;                   // [memory.numel + marks]: what is sent
  at::Tensor result;                   // where the mean goes; undefined: into the buffer (see StepRepair)
  bool in_result = false;              // what is sent is there already: the gradients times a factor
  at::Tensor gradients;                // [memory.numel]: the same memory without the marks
  // [parameters + 1]: above zero for parameters for which some rank had a gradient; the last one if some rank lacked
  // one; undefined in all but one bucket
  at::Tensor marks;
  std::vector<c10::Stream> streams;  // device tensors: the streams that wrote gradients

  BucketOperation operation;
  // The last time it was sent, in step `sent_in`.
  int64_t sent_in = 0;
  BucketCodes codes;
  std::shared_ptr<FiniteReport> report;  // null: not checked
  BucketTimes times;
};

// The type that autograd gives the parameter's .grad (Tensor.grad_dtype); nullopt: whichever the backward computes.
std::optional<c10::ScalarType> gradient_dtype(const at::Tensor& parameter);

// Zeroed memory for a dense bucket, of its dtype, with `mark_count` elements behind the gradients. Large CPU buffers
// ask for huge pages.
void allocate_bucket(Bucket& bucket, c10::Device device, std::size_t mark_count);

// The gradient of `parameter` as part of the buffer: its shape, its strides where it is dense (else row-major). Not a
// view in autograd's sense, so detach_() on it works.
at::Tensor gradient_view(const Bucket& bucket, std::size_t position, const at::Tensor& parameter);

// The memory of [numel] elements as a gradient lies in it: the shape of `parameter`, its strides where it is dense.
at::Tensor as_parameter(const at::Tensor& flat, const at::Tensor& parameter);

// `gradient` as the buffer of a direct bucket of that type, sharing its memory. Undefined where that is impossible:
// other strides than all ranks use for `parameter`, a graph of its own.
at::Tensor as_buffer(const at::Tensor& gradient, const at::Tensor& parameter, c10::ScalarType dtype);

// Whether the tensor has references beside this one. Its Python object, if there is one, counts only if Python uses it.
bool held_elsewhere(const at::Tensor& tensor);

// Whether more than `tensors` tensors use the memory of one that has plain memory.
bool other_tensors_on_memory(const at::Tensor& tensor, std::size_t tensors);

// Whether more than `tensors` tensors use its memory, or a NumPy array, or another process. False for a tensor without
// memory of its own (sparse, DTensor).
bool memory_held_elsewhere(const at::Tensor& tensor, std::size_t tensors = 1);

// `gradient` stays the same tensor, with the same values, in memory of its own.
void leave_bucket(at::Tensor gradient);

// Work of other streams on the bucket before what the current stream does next. Nothing on the CPU.
void remember_stream(Bucket& bucket);
void wait_for_streams(Bucket& bucket);

// dst = src whatever their strides, dtypes and devices; not seen by autograd.
void copy_gradient(const at::Tensor& dst, const at::Tensor& src);

// A gradient times `factor`, where 0 gives zeros also for what is not finite. The first writes to `dst`, the second to
// `gradient` itself, the third to new memory, seen by autograd.
void copy_gradient_times(const at::Tensor& dst, const at::Tensor& src, double factor);
void multiply_gradient(const at::Tensor& gradient, double factor);
at::Tensor gradient_times(const at::Tensor& gradient, double factor);

}  // namespace ringdp
