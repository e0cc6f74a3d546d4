// Distinct ids and the rows of a growing table for Python, over tensors on the CPU. See kernels/row_index.h.
#include "kernels/row_index.h"

#include <ATen/ops/empty.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "base/error.h"
#include "kernels/float_mode.h"
#include "torch/bindings/bindings.h"
#include "torch/bindings/flat_tensors.h"

namespace ringdp {
namespace {

namespace py = pybind11;
using rows::Asked;
using rows::Index;
using rows::RowDirectory;

constexpr int64_t kMostIds = int64_t{1} << 30;

std::span<const int64_t> numbers(const at::Tensor& tensor, const std::string& name) {
  require_flat(tensor, at::kLong, name);
  if (tensor.numel() > kMostIds) throw Error(ErrorKind::kValue, name + ": more than 2^30 at once");
  return {tensor.const_data_ptr<int64_t>(), static_cast<std::size_t>(tensor.numel())};
}

template <class T>
at::Tensor tensor_of(const std::vector<T>& values) {
  at::Tensor out = at::empty({static_cast<int64_t>(values.size())}, sizeof(T) == sizeof(Index) ? at::kInt : at::kLong);
  std::copy(values.begin(), values.end(), out.mutable_data_ptr<T>());
  return out;
}

using AskedTensors = std::tuple<at::Tensor, std::vector<int64_t>, at::Tensor>;

AskedTensors ask_rows(const at::Tensor& ids, uint64_t count, uint64_t factor, uint64_t ranks) {
  const auto list = numbers(ids, "ids");
  if (ranks == 0 || count == 0 || (count - 1) > std::numeric_limits<int64_t>::max() / std::max<uint64_t>(factor, 1))
    throw Error(ErrorKind::kValue, "a table of " + std::to_string(count) + " rows cannot be dealt");
  if (std::any_of(list.begin(), list.end(), [&](int64_t id) { return static_cast<uint64_t>(id) >= count; }))
    throw Error(ErrorKind::kValue, "an id is not one of " + std::to_string(count) + " rows");
  const py::gil_scoped_release no_gil;
  const Asked found = rows::ask(list, {count, factor, ranks});
  at::Tensor local = at::empty({static_cast<int64_t>(found.ids.size())}, at::kInt);
  std::transform(found.ids.begin(), found.ids.end(), local.mutable_data_ptr<Index>(),
                 [](int64_t id) { return static_cast<Index>(id); });
  return {local, found.per_owner, tensor_of(found.inverse)};
}

AskedTensors ask_hashed(const at::Tensor& ids, uint64_t ranks, bool count) {
  const auto list = numbers(ids, "ids");
  if (ranks == 0) throw Error(ErrorKind::kValue, "ranks must be at least 1");
  const py::gil_scoped_release no_gil;
  const Asked found = rows::ask_hashed(list, ranks);
  at::Tensor pairs = at::empty({static_cast<int64_t>(found.ids.size()), 2}, at::kLong);
  auto* out = pairs.mutable_data_ptr<int64_t>();
  for (std::size_t i = 0; i < found.ids.size(); ++i) {
    out[2 * i] = found.ids[i];
    out[2 * i + 1] = count ? found.times[i] : 0;
  }
  return {pairs, found.per_owner, tensor_of(found.inverse)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> look_up(RowDirectory& directory, const at::Tensor& pairs,
                                                       int64_t clock) {
  const auto list = numbers(pairs, "ids with their numbers");
  if (pairs.dim() != 2 || pairs.size(1) != 2) throw Error(ErrorKind::kValue, "pairs of an id and a number are needed");
  std::vector<int64_t> ids(list.size() / 2), times(list.size() / 2);
  RowDirectory::Found found;
  {
    const py::gil_scoped_release no_gil;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      ids[i] = list[2 * i];
      times[i] = list[2 * i + 1];
    }
    found = directory.look_up(ids, times, clock);
  }
  return {tensor_of(found.rows), tensor_of(found.new_ids), tensor_of(found.new_rows)};
}

// int64 [n, 4]: id, step of its last occurrence, how often it occurred, its row or -1.
at::Tensor entries(const RowDirectory& directory, int64_t clock) {
  const auto found = directory.entries(clock);
  at::Tensor out = at::empty({static_cast<int64_t>(found.size()), 4}, at::kLong);
  auto* to = out.mutable_data_ptr<int64_t>();
  for (const auto& it : found) {
    for (const int64_t value : {it.id, it.seen, it.times, static_cast<int64_t>(it.row)}) *to++ = value;
  }
  return out;
}

at::Tensor add(RowDirectory& directory, const at::Tensor& known) {
  const auto list = numbers(known, "entries");
  if (known.dim() != 2 || known.size(1) != 4) throw Error(ErrorKind::kValue, "entries of four numbers are needed");
  std::vector<Index> out;
  for (std::size_t i = 0; i < list.size(); i += 4)
    out.push_back(directory.add({list[i], list[i + 1], list[i + 2], static_cast<Index>(list[i + 3])}));
  return tensor_of(out);
}

void fill_rows(at::Tensor& table, const at::Tensor& which, const at::Tensor& ids, uint64_t seed, double size) {
  const bool wide = table.scalar_type() == at::kDouble;
  require_flat(table, wide ? at::kDouble : at::kFloat, "a table");
  require_flat(which, at::kInt, "numbers of rows");
  const auto list = numbers(ids, "ids");
  if (table.dim() != 2 || which.numel() != ids.numel()) throw Error(ErrorKind::kValue, "an id for each row is needed");
  const auto dim = static_cast<std::size_t>(table.size(1));
  const FloatModeScope mode;
  for (std::size_t i = 0; i < list.size(); ++i) {
    const Index at = which.const_data_ptr<Index>()[i];
    if (at < 0 || at >= table.size(0)) throw Error(ErrorKind::kValue, "row " + std::to_string(at));
    if (wide)
      rows::fill_row(table.mutable_data_ptr<double>() + at * dim, dim, list[i], seed, size);
    else
      rows::fill_row(table.mutable_data_ptr<float>() + at * dim, dim, list[i], seed, size);
  }
}

}  // namespace

void bind_row_index(py::module_& module) {
  module.def("ask_rows", &ask_rows, py::arg("ids"), py::arg("rows"), py::arg("factor"), py::arg("ranks"),
             "(asked, per owner, inverse): the distinct `ids`, int64, of a table whose row id * factor % rows = place\n"
             "is row place // ranks of rank place % ranks, as int32 rows of their owners, owner by owner.");
  module.def("ask_hashed", &ask_hashed, py::arg("ids"), py::arg("ranks"), py::arg("count"),
             "(asked, per owner, inverse): the distinct `ids`, any int64, as pairs [n, 2] of an id and how often it\n"
             "occurs, 0 with count=False; owner by owner.");
  module.def(
      "owner_of_ids",
      [](const at::Tensor& ids, uint64_t ranks) {
        std::vector<int64_t> out;
        for (const int64_t id : numbers(ids, "ids")) out.push_back(static_cast<int64_t>(rows::hash_of(id) % ranks));
        return tensor_of(out);
      },
      py::arg("ids"), py::arg("ranks"), "Which rank owns each id of a growing table, int64.");
  module.def("fill_rows", &fill_rows, py::arg("table"), py::arg("which"), py::arg("ids"), py::arg("seed"),
             py::arg("size"), "Nearly normal numbers times `size` for rows `which`, of their ids and the seed alone.");
  py::class_<RowDirectory>(module, "RowDirectory", "Which ids of a growing table have a row on this rank.")
      .def(py::init<uint64_t, uint64_t>(), py::arg("admit_after"), py::arg("evict_after"))
      .def("look_up", &look_up, py::arg("pairs"), py::arg("clock"),
           "(rows, new ids, new rows) of pairs of an id and how often it occurs now; a row of -1: there is none.")
      .def("count", &RowDirectory::count, py::arg("clock"), "How many ids have a row.")
      .def_property_readonly("capacity", &RowDirectory::capacity, "One above the largest row there ever was.")
      .def("entries", &entries, py::arg("clock"),
           "int64 [n, 4], by id: id, step of its last occurrence, how often it occurred, its row or -1.")
      .def("add", &add, py::arg("entries"), "Take over such entries; the rows they get here, int32.");
}

}  // namespace ringdp
