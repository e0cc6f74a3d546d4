// ringdp._core: the torch-free core for tests, benchmarks and tools (pip's pybind11, no torch type may pass here).
#include <pybind11/pybind11.h>

#include "python_errors.h"

PYBIND11_MODULE(_core, module) {
  module.doc() = "ringdp's core without torch, for tests and tools";
  ringdp::register_error_translator();
}
