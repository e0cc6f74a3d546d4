// ReducerGroup: the process group that gradients are averaged over: what can be relied on there, by how many ranks a
// sum is divided, and the small operations beside the buckets. Owned by the Reducer, used under its lock by the
// threads that run backward, without the GIL.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace ringdp {

class ProcessGroupRing;

class ReducerGroup {
 public:
  // `average`: the backend has ReduceOp::AVG; otherwise gradients are multiplied by 1/ranks before they are summed.
  // `names_compared`: the backend raises on all ranks where an operation's names differ.
  // `host_control`: control data goes over the group's ring, from the CPU, without waiting for a device.
  ReducerGroup(c10::intrusive_ptr<c10d::ProcessGroup> group, bool average, bool names_compared, bool host_control);

  // Returns whether the new group has another number of ranks.
  bool replace(c10::intrusive_ptr<c10d::ProcessGroup> group, bool average, bool names_compared);

  const c10::intrusive_ptr<c10d::ProcessGroup>& process_group() const { return group_; }
  int rank() const { return group_->getRank(); }
  bool members_may_change() const;
  uint64_t view() const;    // where the members may change: the number of the present ones; else 0
  bool first_unit() const;  // see ElasticGroup
  void follow_view();       // the members may have changed (elastic jobs)
  int ranks() const { return ranks_; }
  // So far, by this rank to all ranks, of all groups of ring; 0 where another backend has the group.
  uint64_t bytes_sent() const;
  // The group's ring for that kind of device; null where another backend has it.
  ProcessGroupRing* ring(c10::DeviceType device) const;

  // Ranks that still have input (join); 0: all of them, by the backend's average where it has one.
  void set_divisor(int64_t divisor) { divisor_ = divisor; }
  int64_t divisor() const { return divisor_; }
  int64_t ranks_with_input() const { return divisor_ == 0 ? ranks_ : divisor_; }
  bool averages(const at::Tensor& buffer) const { return average_ && divisor_ == 0 && !buffer.is_sparse(); }

  bool host_control() const { return host_control_; }
  // Where control data about this parameter's gradients lies.
  c10::Device control_device(const at::Tensor& parameter) const {
    return host_control_ ? c10::Device(c10::kCPU) : parameter.device();
  }
  // The bytes of every rank, by rank; `mine` has the same length on all ranks. The operation is called `name`.
  std::vector<std::vector<uint8_t>> gather(const std::vector<uint8_t>& mine, c10::Device device,
                                           const std::string& name);
  // What rank 0 gives; `mine` has the same length on all ranks.
  std::vector<int32_t> broadcast(const std::vector<int32_t>& mine, c10::Device device, const std::string& name);
  // Ranks that wait for this one's buckets learn why they do not come: from an operation with another name, which fails
  // there. Returns a sentence on the result, for this rank's own error; nothing where names are not compared.
  std::string notify_others(const std::string& what, c10::Device device);

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  int ranks_;
  bool average_;
  bool names_compared_;
  bool host_control_;
  int64_t divisor_ = 0;
};

}  // namespace ringdp
