// Reconfiguration (meet/reconfiguration.h) for Python, without torch: part of _core, included by core_module.cpp alone.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "collective/algorithm_table.h"
#include "engine/group.h"
#include "meet/reconfiguration.h"

namespace ringdp {

// Destroyed without the GIL: a thread that is joined then may be asking for it.
inline std::shared_ptr<Runtime> hold_runtime(std::unique_ptr<Runtime> runtime) {
  return std::shared_ptr<Runtime>(runtime.release(), [](Runtime* it) {
    if (PyGILState_Check() == 0) return delete it;
    pybind11::gil_scoped_release no_gil;
    delete it;
  });
}

inline void bind_reconfiguration(pybind11::module_& module, void (*check_interrupt)()) {
  namespace py = pybind11;
  py::class_<Reconfiguration>(module, "Reconfiguration", "One rank's part in meetings by handles, without a store.")
      .def(py::init([](const std::string& secret, const std::string& transport, bool checksums,
                       const std::string& interface, bool tls) {
             RendezvousOptions options;
             const auto bytes = std::as_bytes(std::span(secret.data(), secret.size()));
             options.secret.assign(bytes.begin(), bytes.end());
             options.links.transport = transport_named(transport);
             options.links.checksums = checksums;
             if (tls) options.links.tls = make_tls_context({.mode = TlsMode::kSecret});
             options.addresses.interface = interface;
             options.tables.text = tables_text(tables_from(TuningLimits{}));
             return std::make_unique<Reconfiguration>(std::move(options));
           }),
           py::kw_only(), py::arg("secret") = py::bytes(), py::arg("transport") = "auto", py::arg("checksums") = false,
           py::arg("interface") = "", py::arg("tls") = false)
      .def("handle", &Reconfiguration::handle, py::call_guard<py::gil_scoped_release>())
      .def(
          "meet",
          [check_interrupt](Reconfiguration& self, int64_t uuid, std::vector<std::string> handles, bool ordered,
                            int64_t timeout_ms) {
            const Reconfiguration::Members members{uuid, std::move(handles), ordered};
            py::gil_scoped_release no_gil;
            Reconfiguration::Outcome met = self.meet(members, timeout_ms, check_interrupt);
            EngineOptions options;
            options.check_interrupt = check_interrupt;
            auto runtime = std::make_unique<Runtime>(met.rank, std::move(met.mesh), std::move(options));
            return std::tuple(met.rank, met.world, hold_runtime(std::move(runtime)));
          },
          py::arg("uuid"), py::arg("handles"), py::kw_only(), py::arg("ordered") = true, py::arg("timeout_ms") = 30'000,
          "Blocks until all are connected: (rank, world, Runtime).");
}

}  // namespace ringdp
