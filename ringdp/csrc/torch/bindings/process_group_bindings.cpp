// ringdp._C.create_process_group and NamedScope. Creating blocks until the rendezvous is over, without the GIL.
#include <pybind11/chrono.h>

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "base/error.h"
#include "base/log.h"
#include "collective/algorithm_table.h"
#include "meet/rendezvous.h"
#include "python_algorithms.h"
#include "python_naming.h"
#include "python_records.h"
#include "torch/backend/future_wait.h"
#include "torch/backend/process_group.h"
#include "torch/backend/store_adapter.h"
#include "torch/bindings/bindings.h"
#include "torch/device/device_side.h"

namespace ringdp {

TlsSettings tls_settings(const pybind11::dict& config) {
  TlsSettings tls;
  if (!config["tls"].cast<bool>()) return tls;
  tls.mode = TlsMode::kSecret;
  tls.library = config["tls_library"].cast<std::string>();
  tls.certificate = config["tls_cert"].cast<std::string>();
  tls.key = config["tls_key"].cast<std::string>();
  tls.authorities = config["tls_ca"].cast<std::string>();
  if (!tls.certificate.empty()) tls.mode = TlsMode::kCertificates;
  return tls;
}

namespace {

namespace py = pybind11;

// The Runtime of the default group, for the groups made from it. Weak: the groups own it.
std::mutex runtime_mutex;
std::weak_ptr<Runtime> world_runtime;
std::weak_ptr<ElasticGroup> world_elastic;     // the default group, if its members may change
std::vector<std::weak_ptr<Runtime>> runtimes;  // all of this process: ended at exit by shut_down_all

// torch's store may outlive a process group (the launcher's agent keeps it) and the next group has the same name: the
// (n+1)-th group of a name must not read keys of the n-th. All ranks make their groups in the same order.
std::string store_prefix(const std::string& group_id) {
  static std::map<std::string, int> made;
  std::lock_guard lock(runtime_mutex);
  return "ringdp/" + std::to_string(made[group_id]++) + "/";
}

// With the lock held. The members of an elastic job may have gone on in another Runtime.
std::shared_ptr<Runtime> present_runtime() {
  const auto elastic = world_elastic.lock();
  return elastic ? elastic->group()->share_runtime() : world_runtime.lock();
}

std::shared_ptr<Runtime> runtime_for(const std::vector<int>& global_ranks, int rank) {
  std::lock_guard lock(runtime_mutex);
  std::shared_ptr<Runtime> runtime = present_runtime();
  // An exception's traceback or a module may keep a group, and its Runtime, alive.
  if (!runtime || runtime->ended() || global_ranks.empty()) return nullptr;
  for (int member : global_ranks)
    if (member < 0 || member >= runtime->engine().world()) return nullptr;
  return global_ranks[static_cast<std::size_t>(rank)] == runtime->engine().rank() ? runtime : nullptr;
}

AlgorithmTables tables_of(const py::dict& config) { return tables_from(config["table"].cast<TuningLimits>()); }

RendezvousOptions rendezvous_options(const py::dict& config, int rank, int size) {
  RendezvousOptions options;
  options.rank = rank;
  options.world = size;
  options.epoch = config["epoch"].cast<uint32_t>();
  options.host.name = config["host_name"].cast<std::string>();
  options.host.id = config["host_id"].cast<std::string>();
  options.host.site = config["site"].cast<std::string>();
  options.links.streams = config["streams"].cast<int>();
  options.links.congestion = config["congestion"].cast<std::string>();
  options.addresses.interface = config["iface"].cast<std::string>();
  options.addresses.advertise = config["advertise"].cast<std::string>();
  if (!config["door"].is_none()) {
    const auto [folder, port, node, round_trip_us] =
        config["door"].cast<std::tuple<std::string, uint16_t, uint32_t, int64_t>>();
    options.addresses.door = {.folder = folder, .port = port, .node = node, .round_trip_us = round_trip_us};
  }
  options.links.transport = transport_named(config["transport"].cast<std::string>());
  options.links.checksums = config["checksum"].cast<bool>();
  options.links.tls = make_tls_context(tls_settings(config));
  options.links.full_mesh_ranks = config["full_mesh_ranks"].cast<int>();
  options.links.heals = config["heal_ms"].cast<int64_t>() > 0;
  options.addresses.several_hosts = config["several_hosts"].cast<bool>();
  options.tables.text = tables_text(tables_of(config));
  options.tables.source = config["table_source"].cast<std::string>();
  options.waiting.timeout_ms = config["connect_timeout_ms"].cast<int64_t>();
  if (!config["secret"].is_none()) {
    auto text = config["secret"].cast<std::string>();
    auto bytes = std::as_bytes(std::span(text.data(), text.size()));
    options.secret.assign(bytes.begin(), bytes.end());
  }
  if (!config["port_range"].is_none()) {
    auto range = config["port_range"].cast<std::pair<uint16_t, uint16_t>>();
    options.addresses.port_low = range.first;
    options.addresses.port_high = range.second;
  }
  return options;
}

EngineOptions engine_options_of(const py::dict& config) {
  EngineOptions options;
  options.spin_us = config["spin_us"].cast<int64_t>();
  options.stall_notice_ms = config["stall_notice_ms"].cast<int64_t>();
  options.host_silence_ms = config["host_silence_ms"].cast<int64_t>();
  options.heal_ms = config["heal_ms"].cast<int64_t>();
  options.rate_bytes_per_s = config["rate_bytes_per_s"].cast<int64_t>();
  options.dump_folder = config["dump_dir"].cast<std::string>();
  options.check_interrupt = check_python_signals;
  return options;
}

std::string describe_round_trip(const Runtime& runtime) {
  if (!runtime.far()) return "";
  return "; a round trip between hosts takes " + std::to_string(runtime.round_trip_us() / 1000) +
         " ms or more, so ranks exchange in pairs where nearer ones use a ring";
}

// What the hosts own by the map of uplinks; warns of hosts that the map does not name.
std::string describe_uplinks(const Runtime& runtime) {
  std::vector<std::size_t> rates;
  std::string unnamed;
  for (const Runtime::Uplink& it : runtime.uplinks()) {
    rates.push_back(it.bytes_per_s);
    if (!it.named) unnamed += (unnamed.empty() ? "" : ", ") + it.host;
  }
  if (!unnamed.empty())
    log(LogLevel::kWarning, "the map of uplinks does not name " + unnamed + ", which count as the fastest host in it");
  const Weights weights = owner_weights(rates);
  const uint64_t whole = std::accumulate(weights.begin(), weights.end(), uint64_t{0});
  std::string out;
  for (std::size_t host = 0; host < weights.size(); ++host)
    out += (host == 0 ? "; by the map of uplinks " : ", ") + runtime.uplinks()[host].host + " owns " +
           std::to_string((weights[host] * 100 + whole / 2) / whole) + " %";
  return out + (out.empty() ? "" : ", and up to direct_ranks ranks exchange in pairs where others use a ring");
}

// torch numbers the present members of the default group; in the Runtime each keeps its place.
std::vector<int> places_of(std::vector<int> global_ranks) {
  std::shared_ptr<ElasticGroup> elastic;
  {
    std::lock_guard lock(runtime_mutex);
    elastic = world_elastic.lock();
  }
  if (!elastic) return global_ranks;
  const std::vector<int> members = elastic->group()->view().members;
  for (int& rank : global_ranks) {
    if (rank < 0 || static_cast<std::size_t>(rank) >= members.size())
      throw Error(ErrorKind::kValue, "rank " + std::to_string(rank) + " is not one of the " +
                                         std::to_string(members.size()) + " ranks that are left");
    rank = members[static_cast<std::size_t>(rank)];
  }
  return global_ranks;
}

// `is_default`: later groups may use this Runtime, and not the one of an elastic job that has ended, which an object
// may still hold.
void remember(const std::shared_ptr<Runtime>& runtime, bool is_default) {
  std::lock_guard lock(runtime_mutex);
  std::erase_if(runtimes, [](const auto& it) { return it.expired(); });
  runtimes.push_back(runtime);
  if (!is_default) return;
  world_runtime = runtime;
  world_elastic.reset();
}

c10::intrusive_ptr<c10d::Backend> create_process_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                       std::chrono::milliseconds timeout, const std::string& group_id,
                                                       std::vector<int> global_ranks, const py::dict& config,
                                                       PendingMesh* pending, bool elastic) {
  RendezvousOptions options = rendezvous_options(config, rank, size);
  options.waiting.check_interrupt = check_python_signals;
  const EngineOptions engine_options = engine_options_of(config);
  const AlgorithmTables tables = tables_of(config);
  py::gil_scoped_release no_gil;
  global_ranks = places_of(std::move(global_ranks));
  std::shared_ptr<Runtime> runtime = runtime_for(global_ranks, rank);
  bool owns = runtime == nullptr;
  if (owns) {
    options.waiting.timeout_ms = std::min<int64_t>(options.waiting.timeout_ms, timeout.count());
    if (pending != nullptr) {
      if (pending->rank() != rank || pending->world() != size)
        throw Error(ErrorKind::kValue, "this process group is not of the ranks that have met");
      runtime = std::make_shared<Runtime>(rank, pending->take(), engine_options, tables);
    } else {
      StoreAdapter adapter(store, store_prefix(group_id));
      runtime = std::make_shared<Runtime>(adapter, options, engine_options, tables);
    }
    if (engine_options.rate_bytes_per_s > 0 && rank == 0)
      log(LogLevel::kWarning, "RINGDP_RATE: the ranks of this host together send at most " +
                                  std::to_string(engine_options.rate_bytes_per_s) +
                                  " bytes a second over TCP; leave the variable out for the network's own speed");
    if (rank == 0 && size > 1)
      log(LogLevel::kInfo, describe_all_reduce(runtime->tables_in_use(), runtime->hosts(), options.tables.source) +
                               describe_round_trip(*runtime) + describe_uplinks(*runtime));
    remember(runtime, global_ranks.empty());
    global_ranks.clear();
    for (int member = 0; member < size; ++member) global_ranks.push_back(member);
  } else if (tables != runtime->tables()) {
    throw Error(ErrorKind::kValue,
                "the algorithm table is the job's, fixed when its ranks met, and this group asks for another (" +
                    options.tables.source + "): leave RINGDP_TUNING and its file as they were");
  }
  if (elastic) {
    auto agreement = std::make_unique<StoreAgreement>(
        std::make_unique<StoreAdapter>(store->clone(), store_prefix(group_id) + "elastic/"));
    const AlgorithmTables in_use = runtime->tables_in_use();
    auto lasting = ElasticGroup::make(runtime, group_id, global_ranks, timeout.count(), in_use, std::move(agreement));
    {
      std::lock_guard lock(runtime_mutex);
      const auto world = world_elastic.lock();
      if (owns)
        world_elastic = lasting;
      else if (world)
        lasting->set_places(world->places_of_runtime());
    }
    return c10::make_intrusive<ProcessGroupRing>(std::move(lasting), std::move(runtime), owns);
  }
  auto group = std::make_shared<GroupHandle>(runtime, group_id, std::move(global_ranks), timeout.count(),
                                             runtime->tables_in_use());
  return c10::make_intrusive<ProcessGroupRing>(std::move(group), std::move(runtime), owns);
}

c10::intrusive_ptr<c10d::Backend> create_reconfigurable([[maybe_unused]] int rank, [[maybe_unused]] int size,
                                                        [[maybe_unused]] std::chrono::milliseconds timeout,
                                                        [[maybe_unused]] const std::string& group_id,
                                                        [[maybe_unused]] bool is_default,
                                                        [[maybe_unused]] const py::dict& config) {
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  Reconfigurer::Settings settings;
  settings.rendezvous = rendezvous_options(config, rank, size);
  settings.engine = engine_options_of(config);
  settings.tables = tables_of(config);
  settings.name = group_id;
  settings.timeout_ms = std::min<int64_t>(settings.rendezvous.waiting.timeout_ms, timeout.count());
  return c10::make_intrusive<ProcessGroupRing>(
      rank, size, timeout, std::move(settings),
      [is_default](const std::shared_ptr<Runtime>& runtime) { remember(runtime, is_default); });
#else
  throw Error(ErrorKind::kState, "this torch has no reconfigure: it came with 2.14");
#endif
}

std::unique_ptr<PendingMesh> make_pending_mesh(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                               const std::string& hello, std::chrono::milliseconds timeout,
                                               double first_notice_s, const py::dict& config) {
  RendezvousOptions options = rendezvous_options(config, rank, size);
  options.waiting.check_interrupt = check_python_signals;
  options.hello = hello;
  options.waiting.absent_ms = timeout.count();
  options.waiting.first_notice_ms = static_cast<int64_t>(first_notice_s * 1000);
  py::gil_scoped_release no_gil;
  StoreAdapter adapter(store, "");
  return std::make_unique<PendingMesh>(adapter, options);
}

// `store`: in which the members agree from then on.
void prepare_world(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const std::string& name, PendingMesh& pending,
                   const c10::intrusive_ptr<c10d::Store>& store, std::vector<int> places, const py::dict& config) {
  const EngineOptions options = engine_options_of(config);
  const AlgorithmTables tables = tables_of(config);
  const py::gil_scoped_release no_gil;
  const ProcessGroupRing* ring = ring_of(*group, c10::kCPU);
  if (ring == nullptr || !ring->elastic())
    throw Error(ErrorKind::kState, "the members of this process group cannot change");
  const int rank = pending.rank();
  auto runtime = std::make_shared<Runtime>(rank, pending.take(), options, tables);
  remember(runtime, /*is_default=*/false);
  ring->elastic()->prepare({.name = name,
                            .runtime = std::move(runtime),
                            .agreement = std::make_unique<StoreAgreement>(
                                std::make_unique<StoreAdapter>(store->clone(), name + "/elastic/")),
                            .places = std::move(places)});
}

std::vector<std::shared_ptr<Runtime>> all_runtimes() {
  std::vector<std::shared_ptr<Runtime>> all;
  std::lock_guard lock(runtime_mutex);
  for (const auto& it : runtimes)
    if (std::shared_ptr<Runtime> runtime = it.lock()) all.push_back(std::move(runtime));
  return all;
}

// Sets the reason of this rank's goodbye.
void set_farewell(const std::string& reason) {
  for (const auto& runtime : all_runtimes()) runtime->engine().set_farewell(reason);
}

// At exit, before Python's finalisation: a callback that takes its lock later would end the process.
void shut_down_all() {
  for (const auto& runtime : all_runtimes()) runtime->shut_down();
  Hooks::wait_for_all_abort_hooks();
}

std::pair<uint64_t, uint64_t> traffic() {
  std::lock_guard lock(runtime_mutex);
  std::shared_ptr<Runtime> runtime = present_runtime();
  if (!runtime) return {0, 0};
  const auto [sent, received] = runtime->engine().traffic();
  return {sent, received};
}

std::shared_ptr<Runtime> default_runtime() {
  std::lock_guard lock(runtime_mutex);
  return present_runtime();
}

std::vector<OperationRecord> default_operations() {
  const std::shared_ptr<Runtime> runtime = default_runtime();
  return runtime ? runtime->engine().recorder().all() : std::vector<OperationRecord>{};
}

std::tuple<std::vector<OperationRecord>, uint64_t, uint64_t> default_operations_since(uint64_t cursor) {
  const std::shared_ptr<Runtime> runtime = default_runtime();
  if (!runtime) return {{}, cursor, 0};
  return operations_since(runtime->engine().recorder(), cursor);
}

std::vector<RecordedGroup> default_recorded_groups() {
  const std::shared_ptr<Runtime> runtime = default_runtime();
  return runtime ? runtime->engine().recorder().groups() : std::vector<RecordedGroup>{};
}

std::map<int, std::string> default_transports() {
  std::lock_guard lock(runtime_mutex);
  std::shared_ptr<Runtime> runtime = present_runtime();
  return runtime ? runtime->transports() : std::map<int, std::string>();
}

// The group's rings, of all kinds of devices; one may serve several.
std::vector<ProcessGroupRing*> rings_of(c10d::ProcessGroup& group) {
  std::vector<ProcessGroupRing*> rings;
  for (const c10::Device& device : group.getDeviceTypes())
    if (ProcessGroupRing* ring = ring_of(group, device.type())) rings.push_back(ring);
  return rings;
}

}  // namespace

void bind_process_group(py::module_& module) {
  py::class_<PendingMesh>(module, "PendingMesh",
                          "The connections after the rendezvous; each rank has the `hello` of all others.")
      .def(py::init(&make_pending_mesh), py::kw_only(), py::arg("store"), py::arg("rank"), py::arg("size"),
           py::arg("hello"), py::arg("timeout"), py::arg("first_notice_s"), py::arg("config"))
      .def("hellos", &PendingMesh::hellos)
      .def("close", &PendingMesh::close, py::arg("reason") = "", py::call_guard<py::gil_scoped_release>(),
           "Leave, unless a process group has taken the connections, and send the reason to the others; idempotent.");
  module.def("create_process_group", &create_process_group, py::kw_only(), py::arg("store"), py::arg("rank"),
             py::arg("size"), py::arg("timeout"), py::arg("group_id"), py::arg("global_ranks"), py::arg("config"),
             py::arg("pending").none(true) = nullptr, py::arg("elastic") = false,
             "`elastic`: the default group continues after the loss of members; its store must outlive them.");
  module.def("create_reconfigurable_process_group", &create_reconfigurable, py::kw_only(), py::arg("rank"),
             py::arg("size"), py::arg("timeout"), py::arg("group_id"), py::arg("is_default"), py::arg("config"),
             "A group without members, which connect by handles: see torch's reconfigure.");
  module.def("prepare_world", &prepare_world, py::kw_only(), py::arg("process_group"), py::arg("name"),
             py::arg("pending"), py::arg("store"), py::arg("places"), py::arg("config"),
             "Connections with newcomers, over which an elastic group may go on from now on (go_on_in, enter_world). "
             "`places`:\nby rank in them, the numbers that members have for good.");
  module.def("shut_down_all", &shut_down_all, py::call_guard<py::gil_scoped_release>(),
             "Leave all jobs and end the threads; for the end of the process.");
  module.def("set_farewell", &set_farewell, py::arg("reason"), py::call_guard<py::gil_scoped_release>(),
             "The reason of this process's goodbyes, for the other ranks' errors.");
  module.def("traffic", &traffic, "Bytes (sent, received) by this process over ring, all groups; (0, 0) without one.");
  bind_records(module);
  module.def("operations", &default_operations,
             "The last operations of the job's connections, as they were called; [] without a default group of ring.");
  module.def(
      "operations_since", &default_operations_since, py::arg("cursor"),
      "(records, cursor, lost): the operations that ended since the cursor of the last call (0: all that are kept).");
  module.def("recorded_groups", &default_recorded_groups, "The groups that those operations belong to.");
  bind_named_scope(module);
  bind_transports(module);
  module.def(
      "stage_cpu_tensors",
      [](const py::object& queues) {
        const void* made = queues.is_none() ? nullptr : PyCapsule_GetPointer(queues.ptr(), "ringdp::MakeCopyQueue");
        if (PyErr_Occurred() != nullptr) throw py::error_already_set();
        DeviceSide::stage_cpu_tensors(static_cast<const MakeCopyQueue*>(made));
      },
      py::arg("queues").none(true),
      "For tests: treat CPU tensors as if they were on a device. `queues`: a capsule with a MakeCopyQueue that stays "
      "until the\nprocess ends, which carries out the copies; None: no longer.");
  module.def("transports", &default_transports,
             "The transport to each other rank of the default group, {rank: name}; {} without one.");
  module.def(
      "group_transports",
      [](const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
        const ProcessGroupRing* ring = ring_of(*group, c10::kCPU);
        return ring == nullptr ? std::map<int, std::string>() : ring->group()->transports();
      },
      py::arg("process_group"),
      "The same for a group whose CPU tensors ring moves, by rank in the group; {} for another backend's.");
  module.def(
      "carried",
      [](const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
        std::map<int, std::tuple<uint64_t, double, double, uint64_t>> found;
        const ProcessGroupRing* ring = ring_of(*group, c10::kCPU);
        if (ring == nullptr) return found;
        const auto members = ring->group();
        const auto carried = members->engine()->carried();
        for (int rank = 0; rank < members->view().size; ++rank) {
          const auto it = carried.find(members->view().members[static_cast<std::size_t>(rank)]);
          if (it == carried.end()) continue;
          const NetworkPath::Carried& peer = it->second;
          found[rank] = {peer.bytes, static_cast<double>(peer.busy_us) * 1e-6,
                         static_cast<double>(peer.round_trip_us) * 1e-6, peer.bytes_per_s};
        }
        return found;
      },
      py::arg("process_group"), py::call_guard<py::gil_scoped_release>(),
      "By rank in the group, of the peers reached over TCP: bytes that have arrived there, the seconds in which there "
      "was "
      "something to carry, the round trip in seconds, and bytes a second lately.");
  module.def(
      "add_in_rank_order",
      [](const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
        for (ProcessGroupRing* ring : rings_of(*group)) ring->group()->add_in_rank_order();
      },
      py::arg("process_group"),
      "From now on all-reduces of the group over ring add each element in rank order: its bits do not depend on what "
      "else\n"
      "the tensor holds, on hosts and transports. All members call it between the same two operations.");
  module.def(
      "adds_in_rank_order",
      [](const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
        const auto rings = rings_of(*group);
        return std::any_of(rings.begin(), rings.end(),
                           [](ProcessGroupRing* ring) { return ring->group()->adds_in_rank_order(); });
      },
      py::arg("process_group"), "Whether add_in_rank_order was called for it.");
  module.def(
      "set_log_sink",
      [](py::function sink) {
        auto shared = std::make_shared<py::function>(std::move(sink));
        set_log_sink([shared](LogLevel level, const std::string& text) {
          if (Py_IsInitialized() == 0) return;
          py::gil_scoped_acquire gil;
          (*shared)(static_cast<int>(level), text);
        });
      },
      py::arg("sink"), "Where log lines go, called with (level, text) and levels 0 to 3 for debug to error.");
}

}  // namespace ringdp
