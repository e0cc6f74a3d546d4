"""Post-local SGD: gradients are averaged for some steps, then only parameters, every few steps.

Lin, Stich, Patel, Jaggi, "Don't use large mini-batches, use local SGD", arXiv 1808.07217. torch's hook and averager do
the work; this function gives both the same settings. `ringdp.LocalSGD` does the same without a hook, compressed and
overlapped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

from ringdp.errors import InvalidArgumentError


@dataclasses.dataclass(frozen=True)
class LocalSGD:
    """``model.register_comm_hook(it.state, it.hook)`` once, and ``it.average(model)`` after each optimizer step."""

    state: PostLocalSGDState
    averager: PeriodicModelAverager

    @property
    def hook(self) -> Callable[[PostLocalSGDState, GradBucket], torch.futures.Future[torch.Tensor]]:
        return post_localSGD_hook

    def average(self, model: nn.Module) -> None:
        """Count a step, and average the parameters over all ranks when a round ends."""
        self.averager.average_parameters(model.parameters())


def post_local_sgd(
    *,
    warmup_steps: int,
    period: int,
    ranks_together: int = 1,
    process_group: dist.ProcessGroup | None = None,
) -> LocalSGD:
    """For torch's DDP and `ringdp.RingDP`. All ranks must call.

    Args:
        warmup_steps: steps in which gradients are averaged over all ranks.
        period: then parameters are averaged every so many steps; at least 2.
        ranks_together: then gradients are still averaged over this many ranks next to each other, for example a
            host's; a divisor of the world size.
        process_group: of the model; None is the default group. With `ranks_together` above 1 it must be.

    Raises:
        InvalidArgumentError: a number that cannot be used.
    """
    if warmup_steps < 0 or period < 2:
        raise InvalidArgumentError(
            f"post_local_sgd needs warmup_steps >= 0 and period >= 2, not {warmup_steps}, {period}"
        )
    ranks = dist.get_world_size(process_group)
    if ranks_together < 1 or ranks % ranks_together or (ranks_together > 1 and process_group is not None):
        raise InvalidArgumentError(
            f"ranks_together must be a divisor of the default group's {ranks} ranks, not {ranks_together}"
        )
    subgroup = None
    if ranks_together > 1:
        subgroup = dist.new_subgroups(group_size=ranks_together)[0] if ranks_together < ranks else dist.group.WORLD
    state = PostLocalSGDState(process_group, subgroup, warmup_steps, post_local_gradient_allreduce=ranks_together > 1)
    return LocalSGD(state, PeriodicModelAverager(period, warmup_steps, process_group))
