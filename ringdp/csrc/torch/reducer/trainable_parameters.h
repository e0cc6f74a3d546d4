// TrainableParameters: all parameters of a module, and which of them required grad when the buckets were laid out. It
// detects parameters that were frozen or unfrozen since, and checks that all ranks agree. There are two numbers:
// `param_index` counts all parameters of the module, `parameter` those that require grad. Owned by the Reducer, used
// under its lock.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "torch/reducer/reducer_group.h"

namespace ringdp {

struct ModuleParameter {
  at::Tensor tensor;
  std::string name;
  std::string used_in;  // "block.linear (Linear)", several if it is tied
  bool sparse = false;
};

class TrainableParameters {
 public:
  explicit TrainableParameters(std::vector<ModuleParameter> parameters);

  const std::vector<ModuleParameter>& all() const { return all_; }
  // By tensor: its param_index, or -1.
  std::vector<int64_t> find(const std::vector<at::Tensor>& tensors) const;

  // Those that required grad at the last accept(), in the order of the module.
  const std::vector<at::Tensor>& tensors() const { return tensors_; }
  const std::vector<std::string>& names() const { return names_; }
  std::size_t size() const { return tensors_.size(); }
  std::size_t param_index(std::size_t parameter) const { return param_indices_[parameter]; }
  const ModuleParameter& operator[](std::size_t parameter) const { return all_[param_indices_[parameter]]; }
  // `position` counts those that required grad at construction; nullopt if this one does not any more.
  std::optional<std::size_t> since_construction(std::size_t position) const;

  // One pass over the tensors' flags: whether any was frozen or unfrozen since the last accept().
  bool changed() const;
  std::vector<std::size_t> frozen() const;  // param_indices of those that do not require grad any more
  // Exchanges the changes of all ranks. `left_over`: by param_index, whether this rank has a gradient that was not
  // averaged. Returns the frozen ones for which some rank has one. Throws on all ranks if they differ in
  // requires_grad.
  std::vector<std::size_t> agree_about_change(ReducerGroup& group, const std::vector<bool>& left_over) const;
  void accept();

 private:
  std::vector<std::size_t> flipped(bool now) const;
  std::string describe_change() const;
  void throw_where_they_differ(const std::vector<std::vector<uint8_t>>& ranks, int rank) const;

  std::vector<ModuleParameter> all_;
  std::vector<uint8_t> trains_;  // by param_index
  std::vector<std::size_t> at_construction_;
  std::vector<std::size_t> param_indices_;
  std::vector<at::Tensor> tensors_;
  std::vector<std::string> names_;
};

}  // namespace ringdp
