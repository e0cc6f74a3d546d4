// All-reduce of sparse COO tensors: an all-gather of the numbers of elements, one of the elements, and a sum in rank
// order, which every rank computes. Bytes sent by each rank: (n-1) times its own elements and indices. Called by
// ProcessGroupRing on any thread, without the GIL; its stages run on the completion threads.
#pragma once

#include <ATen/core/Tensor.h>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "engine/group.h"
#include "torch/backend/hooks.h"
#include "torch/device/device_side.h"

namespace ringdp {

// All `tensors`, at least one, are added up, and all receive the coalesced sum. Ranks may hold different numbers of
// elements; shapes and types must agree.
c10::intrusive_ptr<c10d::Work> all_reduce_sparse(std::shared_ptr<GroupHandle> group,
                                                 std::shared_ptr<DeviceSide> devices, std::shared_ptr<Hooks> hooks,
                                                 const std::vector<at::Tensor>& tensors,
                                                 std::chrono::milliseconds timeout, bool async_op);

}  // namespace ringdp
