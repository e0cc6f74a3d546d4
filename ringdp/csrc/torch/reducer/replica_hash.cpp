#include "torch/reducer/replica_hash.h"

#include <algorithm>
#include <span>
#include <string>

#include "base/error.h"
#include "kernels/hash64.h"
#include "torch/bindings/bindings.h"

namespace ringdp {
namespace {

namespace py = pybind11;

constexpr uint64_t kPlaceMultiplier = 0xBF58476D1CE4E5B9ULL;

// The bytes in memory order, if there are no gaps or repetitions: ranks have equal strides.
uint64_t hash_of(const at::Tensor& tensor, std::size_t begin, std::size_t end, uint64_t seed) {
  const at::Tensor dense = tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous();
  const auto* first = static_cast<const std::byte*>(dense.const_data_ptr());
  return hash64(std::span(first + begin, end - begin), seed);
}

uint64_t seed_of(std::size_t tensor, std::size_t begin) {
  return (static_cast<uint64_t>(tensor) + 1) * kPlaceMultiplier + begin;
}

}  // namespace

ReplicaHash::ReplicaHash(std::vector<at::Tensor> tensors) : tensors_(std::move(tensors)) {
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    if (tensors_[i].is_cpu() && tensors_[i].layout() == at::kStrided) continue;
    throw Error(ErrorKind::kValue, "tensor " + std::to_string(i) + " is " + c10::str(tensors_[i].layout()) + " on " +
                                       c10::str(tensors_[i].device()) + "; it must be strided, on the CPU");
  }
  for (const at::Tensor& it : tensors_) ends_.push_back(bytes() + it.nbytes());
}

template <class Visit>
void ReplicaHash::for_pieces(std::size_t part, std::size_t parts, Visit visit) const {
  const std::size_t total = bytes();
  const std::size_t first = total / parts * part + std::min(part, total % parts);
  const std::size_t last = first + total / parts + (part < total % parts ? 1 : 0);
  auto i = static_cast<std::size_t>(std::upper_bound(ends_.begin(), ends_.end(), first) - ends_.begin());
  for (; i < tensors_.size(); ++i) {
    const std::size_t offset = i == 0 ? 0 : ends_[i - 1];
    if (offset >= last) return;
    const std::size_t begin = std::max(first, offset), end = std::min(last, ends_[i]);
    if (begin < end) visit(i, begin - offset, end - offset);
  }
}

uint64_t ReplicaHash::part(std::size_t part, std::size_t parts) const {
  uint64_t sum = 0;
  for_pieces(part, parts, [&](std::size_t i, std::size_t begin, std::size_t end) {
    sum += hash_of(tensors_[i], begin, end, seed_of(i, begin));
  });
  return sum;
}

std::pair<std::size_t, std::size_t> ReplicaHash::tensors_in(std::size_t part, std::size_t parts) const {
  std::pair<std::size_t, std::size_t> range{tensors_.size(), 0};
  for_pieces(part, parts, [&](std::size_t i, std::size_t, std::size_t) {
    range.first = std::min(range.first, i);
    range.second = i + 1;
  });
  range.first = std::min(range.first, range.second);
  return range;
}

std::vector<uint64_t> ReplicaHash::each() const {
  std::vector<uint64_t> out;
  for (const at::Tensor& it : tensors_) out.push_back(hash_of(it, 0, it.nbytes(), 0));
  return out;
}

void bind_replica_hash(py::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<ReplicaHash>(module, "ReplicaHash", "64-bit hashes of tensors that all ranks should have alike.")
      .def(py::init<std::vector<at::Tensor>>(), py::arg("tensors"))
      .def("part", &ReplicaHash::part, py::arg("part"), py::arg("parts"), NoGil(),
           "Of the bytes of all tensors, one after the other: of the `part`-th of `parts` about equal ones.")
      .def("tensors_in", &ReplicaHash::tensors_in, py::arg("part"), py::arg("parts"), NoGil(),
           "The tensors with bytes in that part: the index of the first, and one past the last.")
      .def("each", &ReplicaHash::each, NoGil(), "Of each tensor.")
      .def_property_readonly("bytes", &ReplicaHash::bytes);
}

}  // namespace ringdp
