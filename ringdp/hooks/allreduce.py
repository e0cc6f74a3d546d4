"""The mean of the gradients as they are: the reduction without a hook, written as one."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from ringdp.hooks.average import all_reduce_mean


def allreduce_hook(state: dist.ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average the bucket over the ranks of the group `state` (None: the default group), in place."""
    return all_reduce_mean(bucket.buffer(), state or _default_group(), lambda mean: mean)


def _default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    return group
