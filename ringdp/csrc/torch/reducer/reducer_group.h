// ReducerGroup: the process group over which gradients are averaged: its properties, the divisor of sums, and the
// small operations besides the buckets. Owned by the Reducer, used under its lock by the threads that run backward,
// without the GIL.
//
// Errors of buckets: adds the bucket's number and parameter names to any exception that an operation throws.
// Used by the Reducer, on the threads that run backward, without the GIL; it takes the GIL for Python exceptions.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <utility>
#include <vector>

namespace ringdp {

// Call inside a catch block. A ringdp::Error becomes its Python exception, because backward() preserves only those;
// torch's errors keep their type; a Python exception passes unchanged.
[[noreturn]] void rethrow_from_bucket(int64_t bucket, const std::string& name, int64_t step);

template <class Action>
void in_bucket(int64_t bucket, const std::string& name, int64_t step, Action&& action) {
  try {
    std::forward<Action>(action)();
  } catch (...) {
    rethrow_from_bucket(bucket, name, step);
  }
}

// The text of the exception being handled.
std::string current_error_text();

class ElasticGroup;
class ProcessGroupRing;

class ReducerGroup {
 public:
  // `average`: the backend has ReduceOp::AVG; otherwise gradients are multiplied by 1/ranks before they are summed.
  // `names_compared`: the backend raises on all ranks if an operation's names differ. `host_control`: control data
  // goes over the group's ring, from the CPU, without waiting for a device.
  ReducerGroup(c10::intrusive_ptr<c10d::ProcessGroup> group, bool average, bool names_compared, bool host_control);

  // Returns whether the new group has another number of ranks.
  bool replace(c10::intrusive_ptr<c10d::ProcessGroup> group, bool average, bool names_compared);

  const c10::intrusive_ptr<c10d::ProcessGroup>& process_group() const { return group_; }
  int rank() const { return group_->getRank(); }
  const std::shared_ptr<ElasticGroup>& elastic() const { return elastic_; }  // null: the members never change
  uint64_t view() const;    // the number of the present view in elastic jobs, else 0
  bool first_unit() const;  // see ElasticGroup
  void follow_view();       // the members may have changed (elastic jobs)
  int ranks() const { return ranks_; }
  // Bytes sent so far by this rank over all groups of ring; 0 with another backend.
  uint64_t bytes_sent() const;
  // The group's ring for that kind of device; null with another backend.
  ProcessGroupRing* ring(c10::DeviceType device) const;

  // Ranks that still have input (join); 0: all of them, with the backend's average if it has one.
  void set_divisor(int64_t divisor) { divisor_ = divisor; }
  int64_t divisor() const { return divisor_; }
  int64_t ranks_with_input() const { return divisor_ == 0 ? ranks_ : divisor_; }
  bool averages(const at::Tensor& buffer) const { return average_ && divisor_ == 0 && !buffer.is_sparse(); }

  bool host_control() const { return host_control_; }
  // The device of control data about this parameter's gradients.
  c10::Device control_device(const at::Tensor& parameter) const {
    return host_control_ ? c10::Device(c10::kCPU) : parameter.device();
  }
  // Waits for an operation of the group on this device; where another backend does it, for a failure of the ring beside
  // it as well, and throws that first.
  void wait(c10d::Work& work, c10::Device device) const;
  // Gathers the bytes of all ranks, by rank; `mine` has the same length on all ranks. `name` is the operation's.
  std::vector<std::vector<uint8_t>> gather(const std::vector<uint8_t>& mine, c10::Device device,
                                           const std::string& name);
  // Broadcasts rank 0's `mine`, which has the same length on all ranks.
  std::vector<int32_t> broadcast(const std::vector<int32_t>& mine, c10::Device device, const std::string& name);
  // Fails the wait of ranks for this one's buckets, by an operation with another name. Returns a sentence on the
  // result, for this rank's own error; empty if names are not compared.
  std::string notify_others(const std::string& what, c10::Device device);

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<ElasticGroup> elastic_;
  int ranks_;
  bool average_;
  bool names_compared_;
  bool host_control_;
  int64_t divisor_ = 0;
};

}  // namespace ringdp
