// All-reduces in numbers: what ringdp/tools/simulate asks.
#include <pybind11/stl.h>

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "codec/codec.h"
#include "python_algorithms.h"
#include "simulation/simulation.h"
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

py::dict simulate(const std::vector<HostRow>& hosts, const py::dict& settings, std::size_t bytes,
                  const std::string& dtype, const std::string& algorithm, const std::string& codec, bool far,
                  Weights weights, double most_messages, double fold_from_messages) {
  SimulatedCall call;
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
    result = simulation.run([] {
      const py::gil_scoped_acquire gil;
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    });
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

}  // namespace

void bind_simulation(py::module_& module) {
  module.def(
      "simulate", &simulate, py::arg("hosts"), py::arg("settings"), py::arg("bytes"), py::kw_only(),
      py::arg("dtype") = "float32", py::arg("algorithm") = "ring", py::arg("codec") = "", py::arg("far") = false,
      py::arg("weights") = Weights{}, py::arg("most_messages") = 1e7, py::arg("fold_from_messages") = 2e5,
      "An all-reduce by the core's own operations over links in numbers (csrc/simulation). `hosts`: of each its\n"
      "ranks, its site, and the bytes a second out of it and into it; `weights`: what each owns. Raises "
      "InvalidArgumentError for what cannot\n"
      "be simulated.");
}

}  // namespace ringdp
