// Rows of tables for Python, over tensors on the CPU. See kernels/rows.h and kernels/row_index.h.
#include "kernels/rows.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <pybind11/stl.h>

#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "kernels/float_mode.h"
#include "kernels/row_index.h"
#include "torch/bindings/bindings.h"
#include "torch/bindings/flat_tensors.h"

namespace ringdp {
namespace {

namespace py = pybind11;
using rows::Index;
using rows::Wire;

[[noreturn]] void refuse(const std::string& text) { throw Error(ErrorKind::kValue, text); }

Wire wire_of(const std::string& name) {
  if (name == "exact") return Wire::kExact;
  if (name == "bfloat16") return Wire::kBfloat16;
  if (name == "int8") return Wire::kInt8;
  refuse("a wire of rows is exact, bfloat16 or int8, not " + name);
}

std::size_t size_of(const at::Tensor& tensor, int64_t dimension) {
  return static_cast<std::size_t>(tensor.size(dimension));
}

void require_matrix(const at::Tensor& tensor, at::ScalarType type, const std::string& name) {
  require_flat(tensor, type, name);
  if (tensor.dim() != 2) refuse(name + " has " + std::to_string(tensor.dim()) + " dimensions, not 2");
}

void require_table(const at::Tensor& table) {
  require_matrix(table, table.scalar_type() == at::kDouble ? at::kDouble : at::kFloat, "a table");
}

// Calls body(T{}) with the type of the table's numbers.
template <class Body>
auto with_type(const at::Tensor& table, Body body) {
  return table.scalar_type() == at::kDouble ? body(double{}) : body(float{});
}

// Row numbers, all of them below `rows`.
std::span<const Index> indices(const at::Tensor& which, std::size_t rows) {
  require_flat(which, at::kInt, "numbers of rows");
  const std::span<const Index> out(which.const_data_ptr<Index>(), static_cast<std::size_t>(which.numel()));
  Index largest = -1;
  for (const Index it : out) largest = it > largest ? it : largest;
  if (largest >= 0 && static_cast<std::size_t>(largest) >= rows)
    refuse("row " + std::to_string(largest) + " of " + std::to_string(rows));
  return out;
}

at::ScalarType encoded_type(const at::Tensor& table, Wire wire) {
  return wire == Wire::kExact ? table.scalar_type() : wire == Wire::kBfloat16 ? at::kBFloat16 : at::kByte;
}

at::Tensor room_for(const at::Tensor& table, std::size_t count, Wire wire) {
  const int64_t width = table.size(1) + (wire == Wire::kInt8 ? static_cast<int64_t>(sizeof(float)) : 0);
  return at::empty({static_cast<int64_t>(count), width}, encoded_type(table, wire));
}

void require_encoded(const at::Tensor& code, const at::Tensor& table, Wire wire) {
  require_matrix(code, encoded_type(table, wire), "encoded rows");
  const int64_t width = table.size(1) + (wire == Wire::kInt8 ? static_cast<int64_t>(sizeof(float)) : 0);
  if (code.size(1) != width)
    refuse("encoded rows of " + std::to_string(code.size(1)) + ", not " + std::to_string(width));
}

std::byte* bytes(at::Tensor& tensor) { return static_cast<std::byte*>(tensor.mutable_data_ptr()); }
const std::byte* bytes(const at::Tensor& tensor) { return static_cast<const std::byte*>(tensor.const_data_ptr()); }

at::Tensor encoded_empty(const at::Tensor& table, std::size_t count, const std::string& wire) {
  require_table(table);
  return room_for(table, count, wire_of(wire));
}

at::Tensor gather(const at::Tensor& table, const at::Tensor& which, const std::string& name) {
  require_table(table);
  const Wire wire = wire_of(name);
  const py::gil_scoped_release no_gil;
  const FloatModeScope mode;
  const auto wanted = indices(which, size_of(table, 0));
  at::Tensor out = room_for(table, wanted.size(), wire);
  with_type(table,
            [&]<class T>(T) { rows::gather(bytes(out), table.const_data_ptr<T>(), wanted, size_of(table, 1), wire); });
  return out;
}

at::Tensor encode(const at::Tensor& source, const std::string& name) {
  require_table(source);
  const Wire wire = wire_of(name);
  const py::gil_scoped_release no_gil;
  const FloatModeScope mode;
  at::Tensor out = room_for(source, size_of(source, 0), wire);
  with_type(source, [&]<class T>(T) {
    rows::encode(bytes(out), source.const_data_ptr<T>(), size_of(source, 0), size_of(source, 1), wire);
  });
  return out;
}

void decode(const at::Tensor& code, at::Tensor& out, const std::string& name) {
  require_table(out);
  const Wire wire = wire_of(name);
  require_encoded(code, out, wire);
  if (code.size(0) != out.size(0)) refuse("room for other rows than there are");
  const py::gil_scoped_release no_gil;
  const FloatModeScope mode;
  with_type(out, [&]<class T>(T) {
    rows::decode(out.mutable_data_ptr<T>(), bytes(code), size_of(out, 0), size_of(out, 1), wire);
  });
}

// `begins` is checked, or made for bags of one.
rows::Bags bags_of(const at::Tensor& which, const std::optional<at::Tensor>& begins, std::size_t rows, bool mean,
                   std::vector<int64_t>& made) {
  const auto elements = indices(which, rows);
  if (!begins) {
    made.resize(elements.size());
    for (std::size_t i = 0; i < made.size(); ++i) made[i] = static_cast<int64_t>(i);
    return {elements, made, mean};
  }
  require_flat(*begins, at::kLong, "the bags' beginnings");
  const std::span<const int64_t> out(begins->const_data_ptr<int64_t>(), static_cast<std::size_t>(begins->numel()));
  int64_t before = 0;
  for (const int64_t it : out) {
    if (it < before || static_cast<std::size_t>(it) > elements.size() || (before == 0 && &it == &out[0] && it != 0))
      refuse("the bags' beginnings have to ascend from 0 to " + std::to_string(elements.size()) + " at most");
    before = it;
  }
  if (out.empty() && !elements.empty()) refuse("there are elements and no bags");
  return {elements, out, mean};
}

at::Tensor sum_bags(const at::Tensor& source, const at::Tensor& which, const std::optional<at::Tensor>& begins,
                    bool mean) {
  require_table(source);
  const py::gil_scoped_release no_gil;
  const FloatModeScope mode;
  std::vector<int64_t> made;
  const rows::Bags bags = bags_of(which, begins, size_of(source, 0), mean, made);
  at::Tensor out = at::empty({static_cast<int64_t>(bags.begins.size()), source.size(1)}, source.options());
  with_type(source, [&]<class T>(T) {
    rows::sum_bags(out.mutable_data_ptr<T>(), source.const_data_ptr<T>(), bags, size_of(source, 1));
  });
  return out;
}

at::Tensor spread_bags(const at::Tensor& gradients, const at::Tensor& which, const std::optional<at::Tensor>& begins,
                       bool mean, std::size_t count) {
  require_table(gradients);
  const py::gil_scoped_release no_gil;
  const FloatModeScope mode;
  std::vector<int64_t> made;
  const rows::Bags bags = bags_of(which, begins, count, mean, made);
  if (bags.begins.size() != size_of(gradients, 0)) refuse("gradients of other bags than there are");
  at::Tensor out = at::zeros({static_cast<int64_t>(count), gradients.size(1)}, gradients.options());
  with_type(gradients, [&]<class T>(T) {
    rows::spread_bags(out.mutable_data_ptr<T>(), gradients.const_data_ptr<T>(), bags, size_of(gradients, 1));
  });
  return out;
}

std::tuple<at::Tensor, at::Tensor> sum_rows(const at::Tensor& table, const std::vector<at::Tensor>& codes,
                                            const std::vector<at::Tensor>& which, const std::string& name,
                                            double divisor) {
  require_table(table);
  const Wire wire = wire_of(name);
  if (codes.size() != which.size()) refuse("as many lists of rows as of their numbers are needed");
  const py::gil_scoped_release no_gil;
  const FloatModeScope mode;
  std::vector<Index> all;
  for (std::size_t i = 0; i < codes.size(); ++i) {
    require_encoded(codes[i], table, wire);
    const auto some = indices(which[i], size_of(table, 0));
    if (some.size() != size_of(codes[i], 0)) refuse("as many rows as numbers of rows are needed");
    all.insert(all.end(), some.begin(), some.end());
  }
  const rows::Asked found = rows::distinct(all);
  const auto count = static_cast<int64_t>(found.ids.size());
  at::Tensor at = at::empty({count}, at::kInt);
  for (int64_t i = 0; i < count; ++i) at.mutable_data_ptr<Index>()[i] = static_cast<Index>(found.ids[i]);
  at::Tensor sums = at::zeros({count, table.size(1)}, table.options());
  with_type(table, [&]<class T>(T) {
    T* out = sums.mutable_data_ptr<T>();
    const Index* to = found.inverse.data();
    for (const at::Tensor& code : codes) {
      rows::add_encoded(out, bytes(code), {to, size_of(code, 0)}, size_of(table, 1), wire);
      to += code.size(0);
    }
    const auto by = static_cast<T>(divisor);
    if (by != 1)
      for (int64_t i = 0; i < sums.numel(); ++i) out[i] /= by;
  });
  return {at, sums};
}

rows::Rule rule_of(const std::string& name) {
  if (name == "sgd") return rows::Rule::kSgd;
  if (name == "adagrad") return rows::Rule::kAdagrad;
  if (name == "rowwise_adagrad") return rows::Rule::kRowwiseAdagrad;
  if (name == "adam") return rows::Rule::kAdam;
  refuse("there is no rule " + name);
}

void update_rows(const std::string& name, at::Tensor& table, std::vector<at::Tensor> states, const at::Tensor& which,
                 const at::Tensor& sums, double rate, double eps, std::pair<double, double> betas) {
  require_table(table);
  require_matrix(sums, table.scalar_type(), "the rows' gradients");
  const rows::Update how{rule_of(name), rate, eps, betas.first, betas.second};
  const std::size_t kept = how.rule == rows::Rule::kSgd ? 0 : how.rule == rows::Rule::kAdam ? 2 : 1;
  if (states.size() != kept) refuse(name + " keeps " + std::to_string(kept) + " tensors");
  for (const at::Tensor& state : states) {
    require_matrix(state, table.scalar_type(), "a state");
    if (state.size(0) != table.size(0) ||
        state.size(1) != (how.rule == rows::Rule::kRowwiseAdagrad ? 1 : table.size(1)))
      refuse("a state does not fit the table");
  }
  const py::gil_scoped_release no_gil;
  const FloatModeScope mode;
  const auto wanted = indices(which, size_of(table, 0));
  if (wanted.size() != size_of(sums, 0) || sums.size(1) != table.size(1)) refuse("a gradient for each row is needed");
  with_type(table, [&]<class T>(T) {
    const rows::Memory<T> memory{kept > 0 ? states[0].mutable_data_ptr<T>() : nullptr,
                                 kept > 1 ? states[1].mutable_data_ptr<T>() : nullptr};
    rows::update(how, table.mutable_data_ptr<T>(), memory, wanted, sums.const_data_ptr<T>(), size_of(table, 1));
  });
}

}  // namespace

void bind_rows(py::module_& module) {
  module.def("encoded_rows", &encoded_empty, py::arg("table"), py::arg("count"), py::arg("wire"),
             "Room for so many rows of a table as they travel: [count, dim], for int8 uint8 [count, dim + 4].");
  module.def("gather_rows", &gather, py::arg("table"), py::arg("which"), py::arg("wire"),
             "Rows `which` (int32) of a table, float32 or float64 [rows, dim], encoded; a negative number is zeros.");
  module.def("encode_rows", &encode, py::arg("rows"), py::arg("wire"), "All rows, encoded.");
  module.def("decode_rows", &decode, py::arg("code"), py::arg("out"), py::arg("wire"),
             "Put encoded rows into `out`, float32 or float64 [rows, dim].");
  module.def("sum_bags", &sum_bags, py::arg("rows"), py::arg("which"), py::arg("begins"), py::arg("mean"),
             "[bags, dim]: the sums, or means, of rows `which` (int32), from begins[b] (int64) on; None: bags of one.");
  module.def("spread_bags", &spread_bags, py::arg("gradients"), py::arg("which"), py::arg("begins"), py::arg("mean"),
             py::arg("count"), "The derivative of sum_bags: gradients [bags, dim] to gradients of rows [count, dim].");
  module.def("sum_rows", &sum_rows, py::arg("table"), py::arg("codes"), py::arg("which"), py::arg("wire"),
             py::arg("divisor"),
             "(rows, sums): of encoded gradients of rows of a table, list by list in order, the sum for each distinct\n"
             "row, by `divisor`; int32 [n] and [n, dim].");
  module.def(
      "update_rows", &update_rows, py::arg("rule"), py::arg("table"), py::arg("states"), py::arg("which"),
      py::arg("sums"), py::arg("rate"), py::arg("eps"), py::arg("betas"),
      "Update rows `which`, each given once, in place by \"sgd\", \"adagrad\", \"rowwise_adagrad\" or \"adam\".");
}

}  // namespace ringdp
