// ringdp._core: the torch-free core for tests, benchmarks and tools (pip's pybind11, no torch type may pass here).
// Several ranks may live in one process, each on a thread of its own; every call that can block releases the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <optional>

#include "base/log.h"
#include "collective/tuning.h"
#include "core_reconfiguration.h"
#include "engine/group.h"
#include "kernels/kernels.h"
#include "mesh/addresses.h"
#include "mesh/store.h"
#include "python_codecs.h"
#include "python_errors.h"
#include "python_naming.h"
#include "python_records.h"
#include "python_transports.h"
#include "transport/congestion.h"
#include "transport/faulty.h"

namespace ringdp {
namespace {

namespace py = pybind11;

DType dtype_from(const std::string& name) {
  for (int i = 0; i < kDTypeCount; ++i)
    if (dtype_name(static_cast<DType>(i)) == name) return static_cast<DType>(i);
  throw Error(ErrorKind::kValue, "no element type is called '" + name + "'");
}

ReduceOp op_from(const std::string& name) {
  for (int i = 0; i < kReduceOpCount; ++i)
    if (reduce_op_name(static_cast<ReduceOp>(i)) == name) return static_cast<ReduceOp>(i);
  throw Error(ErrorKind::kValue, "no reduction is called '" + name + "'");
}

// The memory of a Python buffer for as long as this lives: it keeps the exporter's lock.
class View {
 public:
  explicit View(const py::buffer& buffer) : view_(std::make_shared<Py_buffer>()) {
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

void check_interrupt() {
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

std::shared_ptr<Runtime> make_runtime(const std::shared_ptr<Store>& store, int rank, int world, int64_t timeout_ms,
                                      int64_t spin_us, const std::string& secret, uint32_t epoch,
                                      int64_t stall_notice_ms, std::size_t segment_bytes, uint64_t fault_seed,
                                      const std::string& host_id, const TuningLimits& table,
                                      const std::string& table_source, const std::string& transport,
                                      std::size_t shm_ring_bytes, int64_t rate_bytes_per_s, bool checksums,
                                      uint64_t flip_within, int full_mesh_ranks, const std::string& site,
                                      const std::string& dump_folder, int streams, const std::string& congestion,
                                      int64_t heal_ms) {
  const AlgorithmTables tables = tables_from(table);
  RendezvousOptions rendezvous;
  rendezvous.rank = rank;
  rendezvous.world = world;
  rendezvous.timeout_ms = timeout_ms;
  rendezvous.epoch = epoch;
  rendezvous.host_id = host_id;
  rendezvous.site = site;
  rendezvous.streams = streams;
  rendezvous.congestion = congestion;
  rendezvous.tables = tables_text(tables);
  rendezvous.tables_source = table_source;
  rendezvous.transport = transport_named(transport);
  rendezvous.shm_ring_bytes = shm_ring_bytes;
  rendezvous.checksums = checksums;
  rendezvous.full_mesh_ranks = full_mesh_ranks;
  rendezvous.check_interrupt = check_interrupt;
  auto bytes = std::as_bytes(std::span(secret.data(), secret.size()));
  rendezvous.secret.assign(bytes.begin(), bytes.end());
  EngineOptions options;
  options.spin_us = spin_us;
  options.stall_notice_ms = stall_notice_ms;
  options.rate_bytes_per_s = rate_bytes_per_s;
  options.dump_folder = dump_folder;
  options.heal_ms = heal_ms;
  rendezvous.heals = heal_ms > 0;
  options.check_interrupt = check_interrupt;
  if (segment_bytes < kGranuleBytes || segment_bytes > kSegmentBytes)
    throw Error(ErrorKind::kValue, "segment_bytes must be " + std::to_string(kGranuleBytes) + " to " +
                                       std::to_string(kSegmentBytes) + ", not " + std::to_string(segment_bytes));
  options.segment_bytes = segment_bytes;
  if (fault_seed != 0)
    options.wrap_channel = [=](std::unique_ptr<Channel> channel, int peer) -> std::unique_ptr<Channel> {
      return std::make_unique<FaultyChannel>(std::move(channel), fault_seed * 1'000'003 + rank * 1009 + peer,
                                             flip_within);
    };
  // Not by a call guard: pybind11 would then register the new object without the GIL, too.
  py::gil_scoped_release meeting;
  return hold_runtime(std::make_unique<Runtime>(*store, rendezvous, std::move(options), tables));
}

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

// A store that Python keeps, for ranks that are processes: `set(key, value)`, and `find(key)` which gives None for what is
// not there. What they raise passes through.
class CallbackStore final : public Store {
 public:
  CallbackStore(py::function set, py::function find) : set_(std::move(set)), find_(std::move(find)) {}
  void set(const std::string& key, const std::string& value) override {
    py::gil_scoped_acquire gil;
    set_(key, value);
  }
  std::string set_first(const std::string& key, const std::string& value) override {  // nearly: two may come at once
    if (auto there = find(key)) return *there;
    set(key, value);
    return value;
  }
  std::optional<std::string> find(const std::string& key) override {
    py::gil_scoped_acquire gil;
    return find_(key).cast<std::optional<std::string>>();
  }

 private:
  py::function set_;
  py::function find_;
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
    View view(buffer);
    return issue({view}, [&](CallOptions options) {
      options.factors = std::move(factors);
      return group_->all_reduce(view.bytes(), dtype_from(dtype), op_from(op), std::move(options));
    });
  }
  std::pair<PythonWork, PythonReport> all_reduce_watched(const py::buffer& buffer, const std::string& dtype,
                                                         const std::string& op) {
    View view(buffer);
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
    std::vector<View> views;
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
  // For benchmarks: what a call takes that nothing of Python is part of. Seconds of each.
  std::vector<double> time_all_reduce(const py::buffer& buffer, const std::string& dtype, int count, bool watched) {
    View view(buffer);
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
    View view(buffer);
    return issue({view}, [&](CallOptions options) {
      return group_->broadcast(view.bytes(), dtype_from(dtype), root, std::move(options));
    });
  }
  PythonWork all_gather(const py::buffer& input, const std::vector<py::buffer>& outputs, const std::string& dtype) {
    std::vector<View> views{View(input)};
    auto blocks = bytes_of(outputs, views);
    return issue(views, [&](CallOptions options) {
      return group_->all_gather(views[0].bytes(), blocks, dtype_from(dtype), std::move(options));
    });
  }
  PythonWork reduce_scatter(const std::vector<py::buffer>& inputs, const py::buffer& output, const std::string& dtype,
                            const std::string& op) {
    std::vector<View> views{View(output)};
    auto chunks = bytes_of(inputs, views);
    return issue(views, [&](CallOptions options) {
      return group_->reduce_scatter(chunks, views[0].bytes(), dtype_from(dtype), op_from(op), std::move(options));
    });
  }
  PythonWork reduce(const py::buffer& buffer, const std::string& dtype, int root, const std::string& op) {
    View view(buffer);
    return issue({view}, [&](CallOptions options) {
      return group_->reduce(view.bytes(), dtype_from(dtype), op_from(op), root, std::move(options));
    });
  }
  PythonWork gather(const py::buffer& input, const std::vector<py::buffer>& outputs, const std::string& dtype,
                    int root) {
    std::vector<View> views{View(input)};
    auto blocks = bytes_of(outputs, views);
    return issue(views, [&](CallOptions options) {
      return group_->gather(views[0].bytes(), blocks, dtype_from(dtype), root, std::move(options));
    });
  }
  PythonWork scatter(const std::vector<py::buffer>& inputs, const py::buffer& output, const std::string& dtype,
                     int root) {
    std::vector<View> views{View(output)};
    auto chunks = bytes_of(inputs, views);
    return issue(views, [&](CallOptions options) {
      return group_->scatter(chunks, views[0].bytes(), dtype_from(dtype), root, std::move(options));
    });
  }
  PythonWork all_to_all(const std::vector<py::buffer>& inputs, const std::vector<py::buffer>& outputs,
                        const std::string& dtype) {
    std::vector<View> views;
    auto chunks = bytes_of(inputs, views), blocks = bytes_of(outputs, views);
    return issue(views, [&](CallOptions options) {
      return group_->all_to_all(chunks, blocks, dtype_from(dtype), std::move(options));
    });
  }
  PythonWork send(const py::buffer& buffer, const std::string& dtype, int to, int32_t tag) {
    View view(buffer);
    return issue({view}, [&](CallOptions options) {
      return group_->send(view.bytes(), dtype_from(dtype), to, tag, std::move(options));
    });
  }
  PythonWork receive(const py::buffer& buffer, const std::string& dtype, int from, int32_t tag) {
    View view(buffer);
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
  static std::vector<std::span<std::byte>> bytes_of(const std::vector<py::buffer>& buffers, std::vector<View>& views) {
    std::vector<std::span<std::byte>> out;
    for (const py::buffer& buffer : buffers) out.push_back(views.emplace_back(buffer).bytes());
    return out;
  }

  template <typename Call>
  PythonWork issue(std::vector<View> views, Call call) {
    CallOptions options;
    options.keep_alive = std::make_shared<std::vector<View>>(std::move(views));
    py::gil_scoped_release no_gil;
    return {group_->engine(), call(std::move(options))};
  }

  std::unique_ptr<GroupHandle> group_;
};

py::list algorithm_rows() {
  py::list out;
  for (const AlgorithmInfo& it : algorithms()) {
    py::dict row;
    row["name"] = it.name;
    row["number"] = static_cast<int>(it.id);
    row["all_reduce"] = it.reduces_all;
    out.append(row);
  }
  return out;
}

std::string algorithm_for(int world, const std::string& dtype, std::size_t bytes, const TuningLimits& table,
                          std::optional<std::vector<int>> hosts, bool rank_order) {
  if (!hosts) hosts.emplace(static_cast<std::size_t>(world), 0);
  if (hosts->size() != static_cast<std::size_t>(world))
    throw Error(ErrorKind::kValue,
                "hosts has " + std::to_string(hosts->size()) + " entries for " + std::to_string(world) + " ranks");
  const AlgorithmTable& limits = tables_from(table).of(layout_of(*hosts));
  return std::string(algorithm_name(choose_all_reduce(limits, *hosts, dtype_from(dtype), bytes, rank_order)));
}

}  // namespace
}  // namespace ringdp

PYBIND11_MODULE(_core, module) {
  using namespace ringdp;
  using NoGil = py::call_guard<py::gil_scoped_release>;
  module.doc() = "ringdp's core without torch, for tests and tools";
  register_error_translator();

  py::class_<Store, std::shared_ptr<Store>>(module, "Store", "Where ranks meet.");
  py::class_<CallbackStore, Store, std::shared_ptr<CallbackStore>>(module, "CallbackStore", "A store kept in Python.")
      .def(py::init<py::function, py::function>(), py::arg("set"), py::arg("find"));
  py::class_<MemoryStore, Store, std::shared_ptr<MemoryStore>>(module, "MemoryStore",
                                                               "Where ranks that are threads meet.")
      .def(py::init<>())
      .def("set", &MemoryStore::set, py::arg("key"), py::arg("value"), NoGil())
      .def(
          "get",
          [](MemoryStore& self, const std::string& key, int64_t timeout_ms) {
            return self.get(key, Deadline::after_ms(timeout_ms));
          },
          py::arg("key"), py::kw_only(), py::arg("timeout_ms") = 10'000, NoGil(),
          "The value, or None when it is not there in time.");
  bind_records(module);
  py::class_<Runtime, std::shared_ptr<Runtime>>(module, "Runtime", "One rank: connections, engine, threads.")
      .def(py::init(&make_runtime), py::arg("store"), py::arg("rank"), py::arg("world"), py::kw_only(),
           py::arg("timeout_ms") = 30'000, py::arg("spin_us") = 50, py::arg("secret") = py::bytes(),
           py::arg("epoch") = 0, py::arg("stall_notice_ms") = 10'000, py::arg("segment_bytes") = kSegmentBytes,
           py::arg("fault_seed") = 0, py::arg("host_id") = "", py::arg("table") = TuningLimits{},
           py::arg("table_source") = "built in", py::arg("transport") = "auto", py::arg("shm_ring_bytes") = 0,
           py::arg("rate_bytes_per_s") = 0, py::arg("checksums") = false, py::arg("flip_within") = 0,
           py::arg("full_mesh_ranks") = kFullMeshRanks, py::arg("site") = "", py::arg("dump_folder") = "",
           py::arg("streams") = kAutomaticStreams, py::arg("congestion") = std::string(kAutomaticCongestion),
           py::arg("heal_ms") = 4000,
           "`segment_bytes` and `fault_seed` (not 0: short reads and writes, refusals) change timing, never results. "
           "With a `fault_seed`, one bit of the first `flip_within` bytes from each peer flips.")
      .def("shut_down", &Runtime::shut_down, NoGil())
      .def(
          "set_farewell", [](Runtime& self, const std::string& reason) { self.engine().set_farewell(reason); },
          py::arg("reason"), NoGil())
      .def("transports", &Runtime::transports, "What carries bytes to each other rank: {rank: name}.")
      .def(
          "operations", [](Runtime& self) { return self.engine().recorder().all(); },
          "The last operations, as they were called, those in flight among them.")
      .def(
          "operations_since",
          [](Runtime& self, uint64_t cursor) { return operations_since(self.engine().recorder(), cursor); },
          py::arg("cursor"),
          "(records, cursor, lost): what has ended since the cursor of the last call (0: all that is remembered).")
      .def("recorded_groups", [](Runtime& self) { return self.engine().recorder().groups(); })
      .def("bytes_sent", [](Runtime& self) { return self.engine().traffic().sent; })
      .def(
          "bytes_sent_to", [](Runtime& self, int peer) { return self.engine().bytes_sent_to(peer); }, py::arg("peer"))
      .def("bytes_received", [](Runtime& self) { return self.engine().traffic().received; });
  bind_named_scope(module);
  bind_codecs(module);
  bind_transports(module);
  bind_reconfiguration(module, check_interrupt);
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

  module.def(
      "set_log_sink",
      [](py::object sink) {
        if (sink.is_none()) return set_log_sink({});
        auto shared = std::make_shared<py::object>(std::move(sink));
        set_log_sink([shared](LogLevel level, const std::string& text) {
          py::gil_scoped_acquire gil;
          (*shared)(static_cast<int>(level), text);
        });
      },
      py::arg("sink"),
      "Where log lines go, called with (level, text) and levels 0 to 3 for debug to error; None drops them.");
  module.def(
      "algorithms", &algorithm_rows,
      "The algorithms of collectives, a dict each: name, number (on the wire), all_reduce (whether all-reduces use it; "
      "these are in the order in which they are asked whether they fit).");
  module.def("all_reduce_algorithm", &algorithm_for, py::arg("world"), py::arg("dtype"), py::arg("bytes"),
             py::kw_only(), py::arg("table") = TuningLimits{}, py::arg("hosts") = py::none(),
             py::arg("rank_order") = false,
             "Name of the algorithm taken; `hosts[r]` is the number of rank r's host, by default all are on one.");
  module.def(
      "built_in_table", [] { return limits_of(AlgorithmTables{}); },
      "The limits of the built-in algorithm table: {'one_host.fold_sent_bytes': bytes, …}.");
  module.def(
      "network_interfaces",
      [](const std::optional<std::string>& spec) {
        const std::vector<Interface> all = interfaces();
        py::list out;
        for (const Interface& it : spec ? select_interfaces(all, *spec) : all) {
          py::dict row;
          row["name"] = it.name;
          row["ip"] = it.ip;
          row["prefix_bits"] = it.prefix_bits;
          row["loopback"] = it.is_loopback;
          row["running"] = it.running;
          out.append(row);
        }
        return out;
      },
      py::arg("spec") = py::none(),
      "The addresses of this host, a dict each: name, ip, prefix_bits, loopback, running (has a carrier). `spec`: "
      "those\n"
      "that RINGDP_IFACE=spec chooses, in its order; None: all.");
  module.def("isa", [] { return std::string(isa_name(current_isa())); }, "The instruction set in use.");
  module.def(
      "reduction_supported",
      [](const std::string& dtype, const std::string& op) {
        return reduction_supported(dtype_from(dtype), op_from(op));
      },
      py::arg("dtype"), py::arg("op"));
  module.def("dtypes", [] {
    std::vector<std::string> names;
    for (int i = 0; i < kDTypeCount; ++i) names.emplace_back(dtype_name(static_cast<DType>(i)));
    return names;
  });
}
