"""RingDP in an elastic job (``ringrun --elastic``): operations that it repeats without a lost rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ringdp import config, refusals
from ringdp.job.backend import BACKEND, backend_of
from ringdp.job.elastic import as_unit, is_elastic


def steps_are_repaired(wrapper: Any) -> bool:
    """Whether the wrapper's group goes on without lost ranks.

    Raises:
        InvalidArgumentError: the job is elastic, and this wrapper's group is not, or has no such group.
    """
    group = wrapper.process_group
    if backend_of(group, wrapper.device_type) == BACKEND and is_elastic(group):
        return True
    if config.elastic() and dist.get_world_size() > 1:
        refusals.refuse("elastic", "group")
    return False


def broadcast_in_unit(group: dist.ProcessGroup, what: str, tensors: list[torch.Tensor], broadcast: Any) -> None:
    """`broadcast()` writes rank 0's values into these; made again, the new rank 0 sends those that it had before."""
    before = [tensor.detach().clone() for tensor in tensors] if is_elastic(group) else []
    first = True

    def body() -> None:
        nonlocal first
        if not first:
            with torch.no_grad():
                for tensor, kept in zip(tensors, before, strict=True):
                    tensor.copy_(kept)
        first = False
        broadcast()

    as_unit(group, what, body)
