// Groups (engine/group.h) for Python, without torch: collectives over flat buffers. Part of _core, included by
// core_module.cpp alone. Any thread with the GIL; every call that can block releases it.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "codec/codec.h"
#include "collective/algorithm_table.h"
#include "engine/group.h"
#include "kernels/kernels.h"
#include "python_algorithms.h"
#include "python_codecs.h"

namespace ringdp {

namespace py = pybind11;

inline ReduceOp op_from(const std::string& name) {
  for (int i = 0; i < kReduceOpCount; ++i)
    if (reduce_op_name(static_cast<ReduceOp>(i)) == name) return static_cast<ReduceOp>(i);
  throw Error(ErrorKind::kValue, "no reduction is called '" + name + "'");
}

// The memory of a Python buffer for as long as this lives: it keeps the exporter's lock.
class BufferView {
 public:
  explicit BufferView(const py::buffer& buffer) : view_(std::make_shared<Py_buffer>()) {
    if (PyObject_GetBuffer(buffer.ptr(), view_.get(), PyBUF_WRITABLE | PyBUF_C_CONTIGUOUS) != 0)
      throw py::error_already_set();
    view_ = std::shared_ptr<Py_buffer>(view_.get(), [keep = view_](Py_buffer* raw) {
      py::gil_scoped_acquire gil;
      PyBuffer_Release(raw);
    });
  }
  std::span<std::byte> bytes() const {
    return {static_cast<std::byte*>(view_->buf), static_cast<std::size_t>(view_->len)};
  }

 private:
  std::shared_ptr<Py_buffer> view_;  // shared with the operation that uses the memory
};

class PythonWork {
 public:
  PythonWork(std::shared_ptr<Engine> engine, std::shared_ptr<Work> work)
      : engine_(std::move(engine)), work_(std::move(work)) {}
  void wait(int64_t timeout_ms) {
    engine_->wait(*work_, timeout_ms > 0 ? Deadline::after_ms(timeout_ms) : Deadline::never());
  }
  bool done() const { return work_->finished(); }
  int source() const { return work_->source(); }

 private:
  std::shared_ptr<Engine> engine_;
  std::shared_ptr<Work> work_;
};

// A FiniteReport with the buffers that its address is in.
struct PythonReport {
  std::shared_ptr<FiniteReport> report;  // shared with the operation
  std::vector<std::span<std::byte>> buffers;
  std::size_t element_bytes = sizeof(float);

  std::optional<std::pair<std::size_t, std::size_t>> own() const {
    for (std::size_t i = 0; i < buffers.size(); ++i) {
      const std::byte* begin = buffers[i].data();
      if (report->own != nullptr && report->own >= begin && report->own < begin + buffers[i].size())
        return std::pair(i, static_cast<std::size_t>(report->own - begin) / element_bytes);
    }
    return std::nullopt;
  }
};

// A group of the ranks `members` of a Runtime; buffers are flat and writable, [count] elements of `dtype`.
class PythonGroup {
 public:
  PythonGroup(std::shared_ptr<Runtime> runtime, const std::string& name, std::vector<int> members, int64_t timeout_ms,
              const std::optional<TuningLimits>& table) {
    const AlgorithmTables tables = table ? tables_from(*table) : runtime->tables_in_use();
    group_ = std::make_unique<GroupHandle>(std::move(runtime), name, std::move(members), timeout_ms, tables);
  }

  ~PythonGroup() {
    py::gil_scoped_release no_gil;
    group_.reset();
  }

  PythonWork all_reduce(const py::buffer& buffer, const std::string& dtype, const std::string& op,
                        std::vector<double> factors) {
    BufferView view(buffer);
    return issue({view}, [&](CallOptions options) {
      options.factors = std::move(factors);
      return group_->all_reduce(view.bytes(), dtype_from(dtype), op_from(op), std::move(options));
    });
  }
  std::pair<PythonWork, PythonReport> all_reduce_watched(const py::buffer& buffer, const std::string& dtype,
                                                         const std::string& op) {
    BufferView view(buffer);
    PythonReport report{std::make_shared<FiniteReport>(), {view.bytes()}, dtype_size(dtype_from(dtype))};
    PythonWork work = issue({view}, [&](CallOptions options) {
      options.finite = report.report;
      return group_->all_reduce(view.bytes(), dtype_from(dtype), op_from(op), std::move(options));
    });
    return {std::move(work), std::move(report)};
  }
  // `buffers[i]`: float32, section i. Residuals: one for each section, or None for all.
  std::pair<PythonWork, PythonReport> all_reduce_compressed(const std::vector<py::buffer>& buffers,
                                                            const std::vector<uint32_t>& owner_offsets,
                                                            const std::string& codec,
                                                            const std::vector<py::buffer>& residuals,
                                                            const std::vector<py::buffer>& new_residuals,
                                                            float loss_scale, std::optional<std::size_t> divisor) {
    if (owner_offsets.size() != buffers.size() || residuals.size() != new_residuals.size() ||
        (!residuals.empty() && residuals.size() != buffers.size()))
      throw Error(ErrorKind::kValue, "as many owner offsets, residuals and new residuals as buffers");
    std::vector<BufferView> views;
    const auto inputs = bytes_of(buffers, views), old = bytes_of(residuals, views),
               next = bytes_of(new_residuals, views);
    std::vector<CompressedSection> sections;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      CompressedSection& it = sections.emplace_back();
      it.x = reinterpret_cast<float*>(inputs[i].data());
      it.count = inputs[i].size() / sizeof(float);
      if (inputs[i].size() % sizeof(float) != 0)
        throw Error(ErrorKind::kValue, "buffer " + std::to_string(i) + " has " + std::to_string(inputs[i].size()) +
                                           " bytes: not a multiple of 4 (float32)");
      it.owner_offset = owner_offsets[i];
      if (old.empty()) continue;
      if (old[i].size() != inputs[i].size() || next[i].size() != inputs[i].size())
        throw Error(ErrorKind::kValue, "residuals of another size than buffer " + std::to_string(i));
      it.residual = reinterpret_cast<const float*>(old[i].data());
      it.new_residual = reinterpret_cast<float*>(next[i].data());
    }
    const Compression compression{codec_by_name(codec), loss_scale,
                                  divisor.value_or(static_cast<std::size_t>(group_->view().size))};
    PythonReport report{std::make_shared<FiniteReport>(), inputs};
    PythonWork work = issue(std::move(views), [&](CallOptions options) {
      options.finite = report.report;
      return group_->all_reduce_compressed(std::move(sections), compression, std::move(options));
    });
    return {std::move(work), std::move(report)};
  }
  // For benchmarks: the time of calls without Python, in seconds for each.
  std::vector<double> time_all_reduce(const py::buffer& buffer, const std::string& dtype, int count, bool watched) {
    BufferView view(buffer);
    DType type = dtype_from(dtype);
    std::vector<double> seconds;
    py::gil_scoped_release no_gil;
    for (int i = 0; i < count; ++i) {
      auto start = std::chrono::steady_clock::now();
      CallOptions options;
      options.caller_waits = true;
      if (watched) options.finite = std::make_shared<FiniteReport>();
      group_->wait(*group_->all_reduce(view.bytes(), type, ReduceOp::kSum, std::move(options)));
      seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return seconds;
  }
  PythonWork broadcast(const py::buffer& buffer, const std::string& dtype, int root) {
    BufferView view(buffer);
    return issue({view}, [&](CallOptions options) {
      return group_->broadcast(view.bytes(), dtype_from(dtype), root, std::move(options));
    });
  }
  PythonWork all_gather(const py::buffer& input, const std::vector<py::buffer>& outputs, const std::string& dtype) {
    std::vector<BufferView> views{BufferView(input)};
    auto blocks = bytes_of(outputs, views);
    return issue(views, [&](CallOptions options) {
      return group_->all_gather(views[0].bytes(), blocks, dtype_from(dtype), std::move(options));
    });
  }
  PythonWork reduce_scatter(const std::vector<py::buffer>& inputs, const py::buffer& output, const std::string& dtype,
                            const std::string& op) {
    std::vector<BufferView> views{BufferView(output)};
    auto chunks = bytes_of(inputs, views);
    return issue(views, [&](CallOptions options) {
      return group_->reduce_scatter(chunks, views[0].bytes(), dtype_from(dtype), op_from(op), std::move(options));
    });
  }
  PythonWork reduce(const py::buffer& buffer, const std::string& dtype, int root, const std::string& op) {
    BufferView view(buffer);
    return issue({view}, [&](CallOptions options) {
      return group_->reduce(view.bytes(), dtype_from(dtype), op_from(op), root, std::move(options));
    });
  }
  PythonWork gather(const py::buffer& input, const std::vector<py::buffer>& outputs, const std::string& dtype,
                    int root) {
    std::vector<BufferView> views{BufferView(input)};
    auto blocks = bytes_of(outputs, views);
    return issue(views, [&](CallOptions options) {
      return group_->gather(views[0].bytes(), blocks, dtype_from(dtype), root, std::move(options));
    });
  }
  PythonWork scatter(const std::vector<py::buffer>& inputs, const py::buffer& output, const std::string& dtype,
                     int root) {
    std::vector<BufferView> views{BufferView(output)};
    auto chunks = bytes_of(inputs, views);
    return issue(views, [&](CallOptions options) {
      return group_->scatter(chunks, views[0].bytes(), dtype_from(dtype), root, std::move(options));
    });
  }
  PythonWork all_to_all(const std::vector<py::buffer>& inputs, const std::vector<py::buffer>& outputs,
                        const std::string& dtype) {
    std::vector<BufferView> views;
    auto chunks = bytes_of(inputs, views), blocks = bytes_of(outputs, views);
    return issue(views, [&](CallOptions options) {
      return group_->all_to_all(chunks, blocks, dtype_from(dtype), std::move(options));
    });
  }
  PythonWork send(const py::buffer& buffer, const std::string& dtype, int to, int32_t tag) {
    BufferView view(buffer);
    return issue({view}, [&](CallOptions options) {
      return group_->send(view.bytes(), dtype_from(dtype), to, tag, std::move(options));
    });
  }
  PythonWork receive(const py::buffer& buffer, const std::string& dtype, int from, int32_t tag) {
    BufferView view(buffer);
    return issue({view}, [&](CallOptions options) {
      return group_->receive(view.bytes(), dtype_from(dtype), from, tag, std::move(options));
    });
  }
  PythonWork barrier() {
    return issue({}, [&](CallOptions options) { return group_->barrier(std::move(options)); });
  }
  void add_in_rank_order() { group_->add_in_rank_order(); }
  void close() { group_->close(); }
  int rank() const { return group_->view().rank; }
  int size() const { return group_->view().size; }
  std::vector<int> hosts() const { return group_->view().hosts; }

 private:
  static std::vector<std::span<std::byte>> bytes_of(const std::vector<py::buffer>& buffers,
                                                    std::vector<BufferView>& views) {
    std::vector<std::span<std::byte>> out;
    for (const py::buffer& buffer : buffers) out.push_back(views.emplace_back(buffer).bytes());
    return out;
  }

  template <typename Call>
  PythonWork issue(std::vector<BufferView> views, Call call) {
    CallOptions options;
    options.keep_alive = std::make_shared<std::vector<BufferView>>(std::move(views));
    py::gil_scoped_release no_gil;
    return {group_->engine(), call(std::move(options))};
  }

  std::unique_ptr<GroupHandle> group_;
};

inline void bind_groups(pybind11::module_& module) {
  using NoGil = py::call_guard<py::gil_scoped_release>;
  py::class_<PythonWork>(module, "Work", "An operation in flight.")
      .def("wait", &PythonWork::wait, py::arg("timeout_ms") = 0, NoGil())
      .def("done", &PythonWork::done)
      .def("source", &PythonWork::source,
           "Of a message received: the sender's rank in the group; -1 before it is known.");
  py::class_<PythonReport>(module, "FiniteReport",
                           "What an all-reduce saw of infinities and NaNs; read when it is done.")
      .def_property_readonly("finite", [](const PythonReport& self) { return self.report->finite; })
      .def_property_readonly("own", &PythonReport::own,
                             "(buffer, element) of this rank's first input that was not finite, or None.");
  py::class_<PythonGroup>(module, "Group", "Collectives of some ranks of a Runtime.")
      .def(py::init<std::shared_ptr<Runtime>, const std::string&, std::vector<int>, int64_t,
                    const std::optional<TuningLimits>&>(),
           py::arg("runtime"), py::arg("name"), py::arg("members"), py::kw_only(), py::arg("timeout_ms") = 30'000,
           py::arg("table") = py::none(), "`table`: the Runtime's, unless another is given.")
      .def("all_reduce", &PythonGroup::all_reduce, py::arg("buffer"), py::arg("dtype"), py::arg("op") = "SUM",
           py::kw_only(), py::arg("factors") = std::vector<double>(),
           "`factors`: of each rank, by which its float32 or float64 input is multiplied first; the same on all ranks.")
      .def("all_reduce_watched", &PythonGroup::all_reduce_watched, py::arg("buffer"), py::arg("dtype"),
           py::arg("op") = "SUM", "As all_reduce: (Work, FiniteReport).")
      .def(
          "all_reduce_compressed", &PythonGroup::all_reduce_compressed, py::arg("buffers"), py::arg("owner_offsets"),
          py::arg("codec"), py::kw_only(), py::arg("residuals") = std::vector<py::buffer>{},
          py::arg("new_residuals") = std::vector<py::buffer>{}, py::arg("loss_scale") = 1.0F,
          py::arg("divisor") = py::none(),
          "Mean over all ranks of float32 buffers, one for each parameter, as codes on the wire; (Work, FiniteReport).")
      .def("time_all_reduce", &PythonGroup::time_all_reduce, py::arg("buffer"), py::arg("dtype"), py::arg("count"),
           py::kw_only(), py::arg("watched") = false,
           "All-reduce (SUM, in place) `count` times and wait for each, all in C++; the seconds of each.")
      .def("broadcast", &PythonGroup::broadcast, py::arg("buffer"), py::arg("dtype"), py::arg("root"))
      .def("all_gather", &PythonGroup::all_gather, py::arg("input"), py::arg("outputs"), py::arg("dtype"))
      .def("reduce_scatter", &PythonGroup::reduce_scatter, py::arg("inputs"), py::arg("output"), py::arg("dtype"),
           py::arg("op") = "SUM")
      .def("reduce", &PythonGroup::reduce, py::arg("buffer"), py::arg("dtype"), py::arg("root"), py::arg("op") = "SUM")
      .def("gather", &PythonGroup::gather, py::arg("input"), py::arg("outputs"), py::arg("dtype"), py::arg("root"))
      .def("scatter", &PythonGroup::scatter, py::arg("inputs"), py::arg("output"), py::arg("dtype"), py::arg("root"))
      .def("all_to_all", &PythonGroup::all_to_all, py::arg("inputs"), py::arg("outputs"), py::arg("dtype"))
      .def("send", &PythonGroup::send, py::arg("buffer"), py::arg("dtype"), py::arg("to"), py::kw_only(),
           py::arg("tag") = 0)
      .def("receive", &PythonGroup::receive, py::arg("buffer"), py::arg("dtype"), py::arg("source"), py::kw_only(),
           py::arg("tag") = 0, "From rank `source`, or from any rank with -1; see Work.source.")
      .def("barrier", &PythonGroup::barrier)
      .def("add_in_rank_order", &PythonGroup::add_in_rank_order, "For all-reduces from now on.")
      .def("close", &PythonGroup::close, NoGil())
      .def_property_readonly("rank", &PythonGroup::rank)
      .def_property_readonly("size", &PythonGroup::size)
      .def_property_readonly("hosts", &PythonGroup::hosts,
                             "hosts[r]: number of rank r's host; hosts are numbered as they first appear.");
}

}  // namespace ringdp
