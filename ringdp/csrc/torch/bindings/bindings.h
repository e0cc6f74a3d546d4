// One function per header that Python sees; bindings.cpp calls them all. The GIL is held while they run.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <utility>

#include "transport/tls.h"

namespace ringdp {

// For a C++ object that keeps a Python function: its last copy may be destroyed by a thread without the GIL.
inline std::shared_ptr<pybind11::function> shared_function(pybind11::function function) {
  return {new pybind11::function(std::move(function)), [](pybind11::function* it) {
            if (Py_IsInitialized() == 0) return;
            const pybind11::gil_scoped_acquire gil;
            delete it;
          }};
}

TlsSettings tls_settings(const pybind11::dict& config);  // of a RingConfig

void bind_compression(pybind11::module_& module);
void bind_cuda_kernels(pybind11::module_& module);
void bind_door(pybind11::module_& module);
void bind_elastic(pybind11::module_& module);
void bind_gradient_marks(pybind11::module_& module);
void bind_watchdog(pybind11::module_& module);
void bind_loss_scale(pybind11::module_& module);
void bind_reductions(pybind11::module_& module);
void bind_module_snapshot(pybind11::module_& module);
void bind_python_stacks(pybind11::module_& module);
void bind_process_group(pybind11::module_& module);
void bind_reducer(pybind11::module_& module);
void bind_replica_hash(pybind11::module_& module);
void bind_rotation(pybind11::module_& module);
void bind_row_index(pybind11::module_& module);
void bind_rows(pybind11::module_& module);
void bind_simulation(pybind11::module_& module);
void bind_small_sum(pybind11::module_& module);
void bind_sparse_codes(pybind11::module_& module);
void bind_low_rank(pybind11::module_& module);
void bind_mailbox(pybind11::module_& module);
void bind_work(pybind11::module_& module);

}  // namespace ringdp
