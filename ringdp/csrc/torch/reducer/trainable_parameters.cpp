#include "torch/reducer/trainable_parameters.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "base/error.h"
#include "torch/reducer/messages.h"

namespace ringdp {
namespace {

constexpr uint8_t kTrains = 1;
constexpr uint8_t kLeftOver = 2;  // it has a gradient that was not averaged
constexpr const char* kSameEverywhere = "freeze and unfreeze the same parameters on all ranks, before the same forward";

}  // namespace

TrainableParameters::TrainableParameters(std::vector<ModuleParameter> parameters)
    : all_(std::move(parameters)), trains_(all_.size()) {
  accept();
  at_construction_ = param_indices_;
}

std::vector<int64_t> TrainableParameters::find(const std::vector<at::Tensor>& tensors) const {
  std::unordered_map<const c10::TensorImpl*, int64_t> numbers;
  for (std::size_t i = 0; i < all_.size(); ++i)
    numbers.emplace(all_[i].tensor.unsafeGetTensorImpl(), static_cast<int64_t>(i));
  std::vector<int64_t> result;
  result.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    const auto found = numbers.find(tensor.unsafeGetTensorImpl());
    result.push_back(found == numbers.end() ? -1 : found->second);
  }
  return result;
}

std::optional<std::size_t> TrainableParameters::since_construction(std::size_t position) const {
  const auto found = std::lower_bound(param_indices_.begin(), param_indices_.end(), at_construction_.at(position));
  if (found == param_indices_.end() || *found != at_construction_[position]) return std::nullopt;
  return static_cast<std::size_t>(found - param_indices_.begin());
}

bool TrainableParameters::changed() const {
  for (std::size_t i = 0; i < all_.size(); ++i) {
    if (all_[i].tensor.requires_grad() != (trains_[i] != 0)) return true;
  }
  return false;
}

std::vector<std::size_t> TrainableParameters::flipped(bool now) const {
  std::vector<std::size_t> result;
  for (std::size_t i = 0; i < all_.size(); ++i) {
    if (all_[i].tensor.requires_grad() == now && (trains_[i] != 0) != now) result.push_back(i);
  }
  return result;
}

std::vector<std::size_t> TrainableParameters::frozen() const { return flipped(false); }

// "a.weight requires grad no longer; b.weight, b.bias require grad now", in at most about 200 characters.
std::string TrainableParameters::describe_change() const {
  std::vector<std::string> names;
  names.reserve(all_.size());
  for (const ModuleParameter& parameter : all_) names.push_back(parameter.name);
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
  param_indices_.clear();
  tensors_.clear();
  names_.clear();
  for (std::size_t i = 0; i < all_.size(); ++i) {
    trains_[i] = all_[i].tensor.requires_grad() ? 1 : 0;
    if (trains_[i] == 0) continue;
    param_indices_.push_back(i);
    tensors_.push_back(all_[i].tensor);
    names_.push_back(all_[i].name);
  }
}

std::vector<std::size_t> TrainableParameters::agree_about_change(ReducerGroup& group,
                                                                 const std::vector<bool>& left_over) const {
  std::vector<uint8_t> mine(all_.size());
  for (std::size_t i = 0; i < mine.size(); ++i) {
    mine[i] = all_[i].tensor.requires_grad() ? kTrains : 0;
    if (left_over[i]) mine[i] |= kLeftOver;
  }
  const std::string change = describe_change();
  std::vector<std::vector<uint8_t>> ranks;
  try {
    ranks = group.gather(mine, group.control_device(all_.front().tensor), change);
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::kMismatch) throw;
    ErrorContext context = error.context();
    context.name = change;
    context.advice = kSameEverywhere;
    throw Error(error.kind(), "before this forward " + change + ", and not all ranks did the same: " + error.what(),
                context);
  }
  throw_where_they_differ(ranks, group.rank());
  std::vector<std::size_t> result;
  for (std::size_t i : frozen()) {
    if (std::any_of(ranks.begin(), ranks.end(), [i](const auto& rank) { return (rank[i] & kLeftOver) != 0; }))
      result.push_back(i);
  }
  return result;
}

void TrainableParameters::throw_where_they_differ(const std::vector<std::vector<uint8_t>>& ranks, int rank) const {
  std::vector<std::vector<bool>> trains;
  for (const auto& flags : ranks) {
    std::vector<bool>& one = trains.emplace_back();
    for (const uint8_t flag : flags) one.push_back((flag & kTrains) != 0);
  }
  std::vector<std::string> names;
  for (const ModuleParameter& parameter : all_) names.push_back(parameter.name);
  const TrainingDisagreement found = requires_grad_disagreement(trains, names);
  if (found.text.empty()) return;
  ErrorContext context;
  context.rank = rank;
  context.name = found.first_name;
  context.advice = kSameEverywhere;
  throw Error(ErrorKind::kMismatch, found.text + " Freeze and unfreeze the same on all ranks, before the same forward.",
              context);
}

}  // namespace ringdp
