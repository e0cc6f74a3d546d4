// tests.core._core: the torch-free core for tests and benchmarks (pip's pybind11, no torch type may pass here).
// Several ranks may live in one process, each on a thread of its own; every call that can block releases the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>

#include "base/log.h"
#include "collective/algorithm_table.h"
#include "core_group.h"
#include "core_reconfiguration.h"
#include "engine/group.h"
#include "faulty.h"
#include "kernels/kernels.h"
#include "meet/store.h"
#include "python_algorithms.h"
#include "python_codecs.h"
#include "python_errors.h"
#include "python_naming.h"
#include "python_records.h"
#include "slow_device.h"
#include "transport/congestion.h"

namespace ringdp {
namespace {

void check_interrupt() {
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

std::shared_ptr<Runtime> make_runtime(
    const std::shared_ptr<Store>& store, int rank, int world, int64_t timeout_ms, int64_t spin_us,
    const std::string& secret, uint32_t epoch, int64_t stall_notice_ms, std::size_t segment_bytes, uint64_t fault_seed,
    const std::string& host_id, const TuningLimits& table, const std::string& table_source,
    const std::string& transport, std::size_t shm_ring_bytes, int64_t rate_bytes_per_s, bool checksums,
    uint64_t flip_within, int full_mesh_ranks, const std::string& site, const std::string& dump_folder, int streams,
    const std::string& congestion, int64_t heal_ms, bool tls, const std::string& door, const std::string& host_name) {
  const AlgorithmTables tables = tables_from(table);
  RendezvousOptions rendezvous;
  rendezvous.rank = rank;
  rendezvous.world = world;
  rendezvous.waiting.timeout_ms = timeout_ms;
  rendezvous.epoch = epoch;
  rendezvous.host.id = host_id;
  rendezvous.host.name = host_name;
  rendezvous.host.site = site;
  rendezvous.links.streams = streams;
  rendezvous.links.congestion = congestion;
  rendezvous.tables.text = tables_text(tables);
  rendezvous.tables.source = table_source;
  rendezvous.links.transport = transport_named(transport);
  rendezvous.links.shm_ring_bytes = shm_ring_bytes;
  rendezvous.links.checksums = checksums;
  if (tls) rendezvous.links.tls = make_tls_context({.mode = TlsMode::kSecret});
  rendezvous.addresses.door.folder = door;
  rendezvous.links.full_mesh_ranks = full_mesh_ranks;
  rendezvous.waiting.check_interrupt = check_interrupt;
  auto bytes = std::as_bytes(std::span(secret.data(), secret.size()));
  rendezvous.secret.assign(bytes.begin(), bytes.end());
  EngineOptions options;
  options.spin_us = spin_us;
  options.stall_notice_ms = stall_notice_ms;
  options.rate_bytes_per_s = rate_bytes_per_s;
  options.dump_folder = dump_folder;
  options.heal_ms = heal_ms;
  rendezvous.links.heals = heal_ms > 0;
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

// A store that Python keeps, for ranks that are processes: `set(key, value)`, and `find(key)` which gives None for
// what is not there. What they raise passes through.
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

}  // namespace
}  // namespace ringdp

PYBIND11_MODULE(_core, module) {
  using namespace ringdp;
  using NoGil = py::call_guard<py::gil_scoped_release>;
  module.doc() = "ringdp's core without torch, for tests and benchmarks";
  register_error_translator<>();

  py::class_<Store, std::shared_ptr<Store>>(module, "Store", "The key-value service of a rendezvous.");
  py::class_<CallbackStore, Store, std::shared_ptr<CallbackStore>>(module, "CallbackStore", "A store kept in Python.")
      .def(py::init<py::function, py::function>(), py::arg("set"), py::arg("find"));
  py::class_<MemoryStore, Store, std::shared_ptr<MemoryStore>>(module, "MemoryStore",
                                                               "A store for ranks that are threads.")
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
           py::arg("heal_ms") = 4000, py::arg("tls") = false, py::arg("door") = "", py::arg("host_name") = "",
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
  bind_algorithms(module);
  bind_reconfiguration(module, check_interrupt);
  bind_groups(module);

  // Never destroyed: operations may be under way when the process ends.
  py::class_<SlowDevice, std::unique_ptr<SlowDevice, py::nodelete>>(
      module, "SlowDevice", "A device whose copies are late and out of order, as the seed says.")
      .def(py::init<uint64_t>(), py::arg("seed"))
      .def("hold", &SlowDevice::hold, py::arg("still"), NoGil(), "While true, no copy gets done.")
      .def(
          "queues",
          [](SlowDevice& device) {
            return py::capsule(new MakeCopyQueue([&device] { return device.make_queue(); }), "ringdp::MakeCopyQueue");
          },
          "What `_C.stage_cpu_tensors` takes.");

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
      "built_in_table", [] { return limits_of(AlgorithmTables{}); },
      "The limits of the built-in algorithm table: {'one_host.fold_sent_bytes': bytes, …}.");
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
