// In place of torch's header, which is written for a CUDA that is there.
#pragma once

#include <c10/util/Exception.h>

#include "cuda_runtime.h"

#define C10_CUDA_CHECK(call) TORCH_CHECK((call) == cudaSuccess, "CUDA error in " #call)
#define C10_CUDA_CHECK_WARN(call) C10_CUDA_CHECK(call)
