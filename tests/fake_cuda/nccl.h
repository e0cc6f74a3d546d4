#pragma once

#include <torch/csrc/utils/pybind.h>

namespace fake_cuda {

// The class ProcessGroupNCCL, which a torch without CUDA does not have.
void bind_nccl(pybind11::module_& module);

}  // namespace fake_cuda
