// ringdp._C: the torch side (torch's bundled pybind11).
#include "torch/bindings/bindings.h"

#include "python_algorithms.h"
#include "python_errors.h"
#include "torch/backend/steps_made.h"

PYBIND11_MODULE(_C, module) {
  module.doc() = "ringdp's process group and reducer";
  ringdp::register_error_translator<ringdp::most_steps>();
  ringdp::bind_algorithms(module);
  ringdp::bind_work(module);
  ringdp::bind_process_group(module);
  ringdp::bind_elastic(module);
  ringdp::bind_door(module);
  ringdp::bind_python_stacks(module);
  ringdp::bind_watchdog(module);
  ringdp::bind_reductions(module);
  ringdp::bind_reducer(module);
  ringdp::bind_compression(module);
  ringdp::bind_simulation(module);
  ringdp::bind_small_sum(module);
  ringdp::bind_sparse_codes(module);
  ringdp::bind_rotation(module);
  ringdp::bind_rows(module);
  ringdp::bind_row_index(module);
  ringdp::bind_low_rank(module);
  ringdp::bind_mailbox(module);
  ringdp::bind_cuda_kernels(module);
  ringdp::bind_loss_scale(module);
  ringdp::bind_gradient_marks(module);
  ringdp::bind_module_snapshot(module);
  ringdp::bind_replica_hash(module);
}
