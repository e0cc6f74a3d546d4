#include "torch/reducer/trainable_parameters.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/tensor.h>

#include <utility>

#include "base/naming.h"
#include "torch/reducer/messages.h"

namespace ringdp {

TrainableParameters::TrainableParameters(std::vector<ModuleParameter> parameters)
    : parameters_(std::move(parameters)), trains_(parameters_.size()) {
  accept();
  for (std::size_t i = 0; i < size(); ++i) {
    if (trains(i)) at_construction_.push_back(i);
  }
}

bool TrainableParameters::changed() const {
  for (std::size_t i = 0; i < size(); ++i) {
    if (parameters_[i].tensor.requires_grad() != trains(i)) return true;
  }
  return false;
}

std::vector<std::size_t> TrainableParameters::flipped(bool now) const {
  std::vector<std::size_t> result;
  for (std::size_t i = 0; i < size(); ++i) {
    if (parameters_[i].tensor.requires_grad() == now && trains(i) != now) result.push_back(i);
  }
  return result;
}

std::vector<std::size_t> TrainableParameters::frozen() const { return flipped(false); }

std::string TrainableParameters::describe_change() const {
  std::vector<std::string> names;
  names.reserve(size());
  for (const ModuleParameter& parameter : parameters_) names.push_back(parameter.name);
  std::string text;
  for (bool now : {false, true}) {
    const std::vector<std::size_t> members = flipped(now);
    if (members.empty()) continue;
    if (!text.empty()) text += "; ";
    text += describe_names(members, names) + (members.size() == 1 ? " requires" : " require");
    text += now ? " grad now" : " grad no longer";
  }
  return text;
}

void TrainableParameters::accept() {
  for (std::size_t i = 0; i < size(); ++i) trains_[i] = parameters_[i].tensor.requires_grad() ? 1 : 0;
}

std::vector<std::vector<uint8_t>> gather_bytes(c10d::ProcessGroup& group, const std::vector<uint8_t>& mine,
                                               c10::Device device, const std::string& name) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::vector<at::Tensor> sent{at::tensor(mine, at::kByte).to(device)};
  std::vector<std::vector<at::Tensor>> received(1);
  for (int rank = 0; rank < group.getSize(); ++rank) received[0].push_back(at::empty_like(sent[0]));
  {
    const NamedScope scope(name);
    group.allgather(received, sent)->wait();
  }
  std::vector<std::vector<uint8_t>> result;
  for (const at::Tensor& bytes : received[0]) {
    const at::Tensor here = bytes.cpu().contiguous();
    const uint8_t* first = here.const_data_ptr<uint8_t>();
    result.emplace_back(first, first + here.numel());
  }
  return result;
}

}  // namespace ringdp
