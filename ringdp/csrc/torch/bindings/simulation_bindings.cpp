// All-reduces, and the start of a job, in numbers: what ringdp/tools/simulate asks.
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "codec/codec.h"
#include "python_algorithms.h"
#include "simulation/simulation.h"
#include "simulation/start.h"
#include "torch/bindings/bindings.h"
#include "torch/bindings/without_python_lock.h"

namespace ringdp {
namespace {

namespace py = pybind11;

using HostRow = std::tuple<int, int, double, double>;  // ranks, site, bytes/s out and in

SimulatedNetwork network_from(const std::vector<HostRow>& hosts, const py::dict& settings) {
  SimulatedNetwork network;
  for (const auto& [ranks, site, up, down] : hosts) network.hosts.push_back({ranks, site, up, down});
  const auto number = [&](const char* name) { return settings[name].cast<double>(); };
  network.cores = settings["cores"].cast<int>();
  network.one_machine = settings["one_machine"].cast<bool>();
  network.memory_bytes_per_s = number("memory_bytes_per_s");
  network.latency_s = number("latency_s");
  network.latency_between_sites_s = number("latency_between_sites_s");
  network.site_bytes_per_s = number("site_bytes_per_s");
  network.wire_bytes_per_byte = number("wire_bytes_per_byte");
  network.burst_bytes = number("burst_bytes");
  network.costs = {.message_between_hosts = number("message_between_hosts_s"),
                   .message_within_host = number("message_within_host_s"),
                   .copy_between_hosts = number("copy_between_hosts_s"),
                   .copy_within_host = number("copy_within_host_s"),
                   .add = number("add_s"),
                   .encode = number("encode_s"),
                   .decode = number("decode_s")};
  return network;
}

Algorithm algorithm_from(const std::string& name) {
  for (const AlgorithmInfo& it : algorithms())
    if (it.name == name) return it.id;
  throw Error(ErrorKind::kValue, "no algorithm is called '" + name + "'");
}

py::list rows_of(const std::vector<SimulatedTraffic>& lines) {
  py::list out;
  for (const SimulatedTraffic& it : lines) out.append(py::make_tuple(it.bytes, it.busy_s));
  return out;
}

void check_signals() {
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

py::dict simulate(const std::vector<HostRow>& hosts, const py::dict& settings, std::size_t bytes,
                  const std::string& dtype, const std::string& algorithm, const std::string& codec, bool barrier,
                  bool far, Weights weights, double most_messages, double fold_from_messages) {
  SimulatedCall call;
  call.barrier = barrier;
  call.bytes = bytes;
  call.dtype = dtype_from(dtype);
  call.algorithm = algorithm_from(algorithm);
  if (!codec.empty()) call.codec = codec_by_name(codec);
  call.far = far;
  call.weights = std::move(weights);
  call.most_messages = most_messages;
  call.fold_from_messages = fold_from_messages;
  const SimulatedNetwork network = network_from(hosts, settings);
  SimulatedResult result;
  {
    const WithoutPythonLock no_lock;
    Simulation simulation(network, call);
    result = simulation.run(check_signals);
  }
  const char* const names[] = {"messages", "copies",     "sums",      "codes",  "memory",
                               "uplinks",  "site_lines", "downlinks", "latency"};
  static_assert(std::size(names) == CriticalPath::kParts);
  py::dict path;
  for (std::size_t i = 0; i < std::size(names); ++i) path[names[i]] = result.path.seconds[i];
  py::dict out;
  out["seconds"] = result.seconds;
  out["path"] = path;
  out["hops"] = result.path.hops;
  out["folded_hosts"] = result.folded_hosts;
  out["bytes"] = result.bytes;
  out["finish_s"] = result.finish_s;
  out["messages"] = result.messages;
  out["up"] = rows_of(result.up);
  out["down"] = rows_of(result.down);
  out["site_up"] = rows_of(result.site_up);
  out["events"] = result.events;
  return out;
}

std::vector<int> host_of_ranks(const std::vector<int>& ranks_of_hosts) {
  std::vector<int> out;
  for (std::size_t host = 0; host < ranks_of_hosts.size(); ++host)
    out.insert(out.end(), static_cast<std::size_t>(ranks_of_hosts[host]), static_cast<int>(host));
  return out;
}

StartCosts start_costs_from(const py::dict& costs) {
  const auto number = [&](const char* name) { return costs[name].cast<double>(); };
  return {.store_request_s = number("store_request_s"),
          .store_key_s = number("store_key_s"),
          .store_byte_s = number("store_byte_s"),
          .round_trip_s = number("round_trip_s"),
          .message_between_hosts_s = number("message_between_hosts_s"),
          .message_within_host_s = number("message_within_host_s"),
          .connection_s = number("connection_s"),
          .cores = costs["cores"].cast<int>()};
}

py::dict start(const std::vector<int>& ranks_of_hosts, int full_mesh_ranks, const py::dict& costs) {
  const StartCosts given = start_costs_from(costs);
  SimulatedStart found;
  {
    const WithoutPythonLock no_lock;
    found = simulate_start(host_of_ranks(ranks_of_hosts), full_mesh_ranks, given, check_signals);
  }
  py::dict out;
  out["seconds"] = found.seconds;
  out["records_s"] = found.records_s;
  out["requests"] = found.requests;
  out["mean_requests"] = found.mean_requests;
  out["store_bytes"] = found.store_bytes;
  out["rounds"] = found.rounds;
  out["connections"] = found.connections;
  return out;
}

py::dict loss(const std::vector<int>& ranks_of_hosts, int full_mesh_ranks, const py::dict& costs) {
  const SimulatedLoss found = simulate_loss(host_of_ranks(ranks_of_hosts), full_mesh_ranks, start_costs_from(costs));
  py::dict out;
  out["seconds"] = found.seconds;
  out["hops"] = found.hops;
  out["messages"] = found.messages;
  return out;
}

py::dict change(int members, const py::dict& costs) {
  const StartCosts given = start_costs_from(costs);
  SimulatedChange found;
  {
    const WithoutPythonLock no_lock;
    found = simulate_change(members, given, check_signals);
  }
  py::dict out;
  out["seconds"] = found.seconds;
  out["requests"] = found.requests;
  out["mean_requests"] = found.mean_requests;
  return out;
}

}  // namespace

void bind_simulation(py::module_& module) {
  module.def(
      "simulate", &simulate, py::arg("hosts"), py::arg("settings"), py::arg("bytes"), py::kw_only(),
      py::arg("dtype") = "float32", py::arg("algorithm") = "ring", py::arg("codec") = "", py::arg("barrier") = false,
      py::arg("far") = false, py::arg("weights") = Weights{}, py::arg("most_messages") = 1e7,
      py::arg("fold_from_messages") = 2e5,
      "An all-reduce by the core's own operations over links in numbers (csrc/simulation). `hosts`: of each its\n"
      "ranks, its site, and the bytes a second out of it and into it; `weights`: what each owns. Raises\n"
      "InvalidArgumentError for what cannot be simulated.");
  module.def("simulate_start", &start, py::arg("ranks_of_hosts"), py::arg("full_mesh_ranks"), py::arg("costs"),
             "The start of a job by the core's own reads of the store (csrc/simulation/start.h). Raises\n"
             "InvalidArgumentError where too many ranks connect with all others.");
  module.def("simulate_loss", &loss, py::arg("ranks_of_hosts"), py::arg("full_mesh_ranks"), py::arg("costs"),
             "How the ranks of a job hear of the loss of one of them, over their connections of the start.");
  module.def("simulate_change", &change, py::arg("members"), py::arg("costs"),
             "How the members of an elastic job agree, after the loss of one of them, by the store.");
}

}  // namespace ringdp
