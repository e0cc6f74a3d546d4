"""RingDP(reproducible=True): the bits of an element's mean depend on the ranks' gradients of that element alone.

The group's all-reduces add in rank order (``_C.add_in_rank_order``). What reads whole buckets is refused: see
`ringdp.refusals`.
"""

from __future__ import annotations

import torch.distributed as dist

from ringdp import refusals
from ringdp.job.backend import BACKEND, backend_of


def add_in_rank_order(group: dist.ProcessGroup, device_type: str) -> None:
    """Let all-reduces of the group add in rank order from now on. All ranks call it between the same two operations.

    Raises:
        InvalidArgumentError: another backend than ring moves tensors on this kind of device.
    """
    from ringdp import _C

    backend = backend_of(group, device_type)
    if backend != BACKEND:
        refusals.refuse("reproducible", "backend", f"{backend} for tensors on {device_type}")
    _C.add_in_rank_order(group)
