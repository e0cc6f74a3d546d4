// What the core can choose from, for Python: algorithms, transports, the host's network interfaces and the instruction
// set. Header only: each module that binds this has pybind11 internals of its own.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <vector>

#include "base/error.h"
#include "collective/algorithm_table.h"
#include "kernels/kernels.h"
#include "meet/addresses.h"
#include "transport/transport.h"

namespace ringdp {

namespace py = pybind11;

inline DType dtype_from(const std::string& name) {
  for (int i = 0; i < kDTypeCount; ++i)
    if (dtype_name(static_cast<DType>(i)) == name) return static_cast<DType>(i);
  throw Error(ErrorKind::kValue, "no element type is called '" + name + "'");
}

inline py::list algorithm_rows() {
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

inline std::string algorithm_for(int world, const std::string& dtype, std::size_t bytes, const TuningLimits& table,
                                 std::optional<std::vector<int>> hosts, bool rank_order) {
  if (!hosts) hosts.emplace(static_cast<std::size_t>(world), 0);
  if (hosts->size() != static_cast<std::size_t>(world))
    throw Error(ErrorKind::kValue,
                "hosts has " + std::to_string(hosts->size()) + " entries for " + std::to_string(world) + " ranks");
  const AlgorithmTable& limits = tables_from(table).of(layout_of(*hosts));
  return std::string(algorithm_name(choose_all_reduce(limits, *hosts, dtype_from(dtype), bytes, rank_order)));
}

inline void bind_algorithms(py::module_& module) {
  module.def(
      "algorithms", &algorithm_rows,
      "The algorithms of collectives, a dict each: name, number (on the wire), all_reduce (whether all-reduces use it; "
      "these are in the order in which they are asked whether they fit).");
  module.def("all_reduce_algorithm", &algorithm_for, py::arg("world"), py::arg("dtype"), py::arg("bytes"),
             py::kw_only(), py::arg("table") = TuningLimits{}, py::arg("hosts") = py::none(),
             py::arg("rank_order") = false,
             "Name of the algorithm taken; `hosts[r]` is the number of rank r's host, by default all are on one.");
  module.def(
      "owner_weights", [](const std::vector<std::size_t>& rates) { return owner_weights(rates); }, py::arg("rates"),
      "How much of a buffer each host owns, by the rates of the hosts' links; empty: all own alike.");
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
}

// The table of transports for Python (transport/transport.h): the values of RINGDP_TRANSPORT, and which transports
// stay inside a host.
inline void bind_transports(pybind11::module_& module) {
  namespace py = pybind11;
  module.def(
      "registered_transports",
      [] {
        py::list out;
        for (const Transport* it : transports()) {
          py::dict row;
          row["name"] = it->name;
          row["title"] = it->title;
          row["same_host"] = it->same_host;
          row["direct"] = it->direct;
          row["checksums"] = it->checksums;
          out.append(row);
        }
        return out;
      },
      "All transports, in the order in which RINGDP_TRANSPORT=auto prefers them: a dict for each.");
  module.def("openssl_version", &openssl_version, py::arg("library") = "",
             "Of the OpenSSL that RINGDP_TLS would use. Raises SystemResourceError where there is none.");
}

}  // namespace ringdp
