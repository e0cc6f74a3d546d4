// The table of transports for Python (transport/transport.h): the values of RINGDP_TRANSPORT, and which transports
// stay inside a host. Included by both modules: tests/core/core_module.cpp with pip's pybind11, torch/bindings with
// torch's.
#pragma once

#include <pybind11/pybind11.h>

#include "transport/transport.h"

namespace ringdp {

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
}

}  // namespace ringdp
