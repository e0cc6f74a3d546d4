"""The mean over the ranks, for hooks that continue with it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ringdp.hooks.futures import after
from ringdp.job.backend import has_average


def all_reduce_mean(
    tensor: Tensor, group: dist.ProcessGroup, then: Callable[[Tensor], Tensor]
) -> torch.futures.Future[Tensor]:
    """Average `tensor` over the group's ranks, in place, and complete with the result of `then` on the mean.

    Rounded once where the group's backend has ``ReduceOp.AVG``. Elsewhere parts of 1/n are added up, for the bits of
    the reducer and of torch's DDP; of sparse tensors the sum is divided.
    """
    in_one = has_average(group, tensor.device.type) and not tensor.is_sparse
    operation = dist.ReduceOp.AVG if in_one else dist.ReduceOp.SUM
    if not in_one and not tensor.is_sparse:
        tensor.mul_(1.0 / group.size())
    reduced = dist.all_reduce(tensor, operation, group=group, async_op=True).get_future()
    ranks = group.size() if tensor.is_sparse else 1

    def finish(reduced: list[Tensor]) -> Tensor:
        [result] = reduced
        return then(result if ranks == 1 else result.div_(ranks))

    return after(reduced, finish, tensor.device)
