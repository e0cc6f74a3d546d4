// TrainableParameters: all parameters of a module, and which of them required grad when the buckets were laid out.
// Owned by the Reducer, used under its lock.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

namespace ringdp {

struct ModuleParameter {
  at::Tensor tensor;
  std::string name;
  std::string used_in;  // "block.linear (Linear)", all of them where it is tied
  bool sparse = false;
};

class TrainableParameters {
 public:
  explicit TrainableParameters(std::vector<ModuleParameter> parameters);

  std::size_t size() const { return parameters_.size(); }
  const ModuleParameter& operator[](std::size_t index) const { return parameters_[index]; }
  bool trains(std::size_t index) const { return trains_[index] != 0; }
  // Among those that required grad at construction.
  std::size_t at_construction(std::size_t position) const { return at_construction_.at(position); }

  // One pass over the tensors' flags: whether any was frozen or unfrozen since the last accept().
  bool changed() const;
  std::vector<std::size_t> frozen() const;  // require grad no longer
  // "a.weight no longer requires grad; b.weight, b.bias require grad now": the changes, in at most about 200 characters.
  std::string describe_change() const;
  void accept();

 private:
  std::vector<std::size_t> flipped(bool now) const;

  std::vector<ModuleParameter> parameters_;
  std::vector<uint8_t> trains_;
  std::vector<std::size_t> at_construction_;
};

// The bytes of every rank, by rank; `mine` has the same length on all ranks. The operation is called `name`.
std::vector<std::vector<uint8_t>> gather_bytes(c10d::ProcessGroup& group, const std::vector<uint8_t>& mine,
                                               c10::Device device, const std::string& name);

}  // namespace ringdp
