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
#include "torch/reducer/plan.h"

namespace ringdp {

inline double seconds(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration<double>(duration).count();
}

struct BucketTimes {
  using Clock = std::chrono::steady_clock;
  Clock::time_point launched;
  std::shared_ptr<std::atomic<Clock::time_point>> done;  // shared with the future that sets it
  double seconds = 0;                                    // from launch to the end of its reduction
  double exposed_s = 0;                                  // the end of backward waited for it
};

class ReductionStrategy;

// The last sending of a bucket with a codec.
struct BucketCodes {
  std::vector<CompressedSection> sections;
  std::vector<cuda::Feedback>
      feedback;  // of each section, if codes are exchanged (torch/backend/c10d_compressed_all_reduce.h)
  std::vector<at::Tensor> residuals;  // the memory of feedback; of an exact bucket the residuals added to it
  at::Tensor non_finite;              // int32 [1] on a device, of all buckets there: see C10dCompressedAllReduce
};

// The operation in flight of a bucket: a work, or a hook's future.
struct BucketOperation {
  ReductionStrategy* strategy = nullptr;  // that launched it; null: there is none
  c10::intrusive_ptr<c10d::Work> work;
  c10::intrusive_ptr<c10::ivalue::Future> future;
  c10d::CommHookInterface* hook = nullptr;  // that reduces the bucket, and made `future`; null: none
};

struct Bucket {
  std::size_t index = 0;
  std::vector<std::size_t> members;  // parameters, in the order of the buffer
  BucketMemory memory;
  std::string name;                    // "bucket 3: layer1.weight, layer1.bias"
  bool sparse = false;                 // one sparse gradient, which is then `buffer` itself
  bool direct = false;                 // one large gradient, reduced in autograd's memory: no memory between steps
  std::vector<double> factors;         // of each rank, not yet applied to its `gradients`; empty: none
  bool carries_marks = false;          // it has `marks`, if not sparse
  Reduction* reduction = nullptr;      // null: exactly
  bool too_small = false;              // for codes: reduced exactly, see ReductionAssignment::too_small
  c10::ScalarType dtype = at::kFloat;  // of the buffer; gradients of another type are cast to it, and the result back
  at::Tensor buffer;                   // [memory.numel + marks]: sent
  at::Tensor result;                   // receives the mean; undefined: the buffer does (see StepRepair)
  bool in_result = false;              // `result` has the input already: the gradients times a factor
  at::Tensor gradients;                // [memory.numel]: `buffer` without the marks
  // [parameters + 1]: above zero for parameters for which some rank had a gradient; the last one if some rank lacked
  // one; undefined in all but one bucket
  at::Tensor marks;
  std::vector<c10::Stream> streams;  // that wrote gradients, of device tensors

  BucketOperation operation;
  // Of the last sending, in step `sent_in`.
  int64_t sent_in = 0;
  BucketCodes codes;
  std::shared_ptr<FiniteReport> report;  // null: not checked
  BucketTimes times;
};

// The type that autograd gives the parameter's .grad (Tensor.grad_dtype); nullopt: the type that the backward
// computes.
std::optional<c10::ScalarType> gradient_dtype(const at::Tensor& parameter);

// Zeroed memory for a dense bucket, of its dtype, with `mark_count` elements behind the gradients. Large CPU buffers
// ask for huge pages.
void allocate_bucket(Bucket& bucket, c10::Device device, std::size_t mark_count);

// The gradient of `parameter` as part of the buffer, with its shape and, if it is dense, its strides (else row-major).
// Not a view in autograd's sense, so detach_() on it works.
at::Tensor gradient_view(const Bucket& bucket, std::size_t position, const at::Tensor& parameter);

// The [numel] elements of `flat` with the shape of `parameter` and, if it is dense, its strides.
at::Tensor as_parameter(const at::Tensor& flat, const at::Tensor& parameter);

// `gradient` as the buffer of a direct bucket of that type, sharing its memory. Undefined if that is impossible: other
// strides than all ranks use for `parameter`, or a graph of its own.
at::Tensor as_buffer(const at::Tensor& gradient, const at::Tensor& parameter, c10::ScalarType dtype);

// Whether the tensor has references besides this one. Its Python object, if there is one, counts only if Python uses
// it.
bool held_elsewhere(const at::Tensor& tensor);

// Whether more than `tensors` tensors share the memory of a tensor with plain memory.
bool other_tensors_on_memory(const at::Tensor& tensor, std::size_t tensors);

// Whether more than `tensors` tensors, a NumPy array or another process share its memory. False for a tensor without
// memory of its own (sparse, DTensor).
bool memory_held_elsewhere(const at::Tensor& tensor, std::size_t tensors = 1);

// Gives `gradient` memory of its own; the tensor and its values stay the same.
void leave_bucket(at::Tensor gradient);

// Orders the current stream after the work of other streams on the bucket. Does nothing on the CPU.
void remember_stream(Bucket& bucket);
void wait_for_streams(Bucket& bucket);

// dst = src for any strides, dtypes and devices; below autograd.
void copy_gradient(const at::Tensor& dst, const at::Tensor& src);

// A gradient times `factor`; 0 gives zeros also for infinities and NaNs. The first writes to `dst`, the second to
// `gradient` itself, the third to new memory, with autograd.
void copy_gradient_times(const at::Tensor& dst, const at::Tensor& src, double factor);
void multiply_gradient(const at::Tensor& gradient, double factor);
at::Tensor gradient_times(const at::Tensor& gradient, double factor);

}  // namespace ringdp
