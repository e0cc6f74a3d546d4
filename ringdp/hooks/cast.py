"""Gradients averaged in float16 or bfloat16: half the bytes, and no more than a cast.

On ring the sum is float32 and rounded once; on other backends each addition rounds. `ddp_hook("fp16")` sums in float32
everywhere.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from ringdp.hooks.allreduce import _default_group
from ringdp.hooks.average import all_reduce_mean
from ringdp.hooks.futures import after
from ringdp.job.backend import has_average


def fp16_hook(state: dist.ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average in float16 over the group `state` (None: the default group); what is above 65504 becomes infinite."""
    return _average_as(torch.float16, state or _default_group(), bucket)


def bf16_hook(state: dist.ProcessGroup | None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average in bfloat16 over the group `state` (None: the default group)."""
    return _average_as(torch.bfloat16, state or _default_group(), bucket)


def _average_as(dtype: torch.dtype, group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    buffer = bucket.buffer()
    if not buffer.is_floating_point() or buffer.is_sparse:
        return all_reduce_mean(buffer, group, lambda mean: mean)
    if has_average(group, buffer.device.type):
        return all_reduce_mean(buffer.to(dtype), group, buffer.copy_)
    # Divided first: a sum of n gradients could leave float16's range where their mean does not.
    sent = (buffer / group.size()).to(dtype)
    reduced = dist.all_reduce(sent, group=group, async_op=True).get_future()
    return after(reduced, lambda summed: buffer.copy_(summed[0]), buffer.device)
