"""RingDP(reproducible=True): the bits of an element's mean depend on the ranks' gradients of that element alone.

The group's all-reduces add in rank order (``_C.add_in_rank_order``). What reads whole buckets is refused: see
`ringdp.refusals`.
"""

from __future__ import annotations

import torch.distributed as dist

from ringdp import refusals, values
from ringdp.ddp.features import Feature, FeaturedDDP
from ringdp.job.backend import BACKEND, backend_of


class Reproducible(Feature):
    """RingDP's argument ``reproducible``."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = values.flag("RingDP", "reproducible", wanted)

    def in_use(self, ddp: FeaturedDDP) -> dict[str, str]:
        return {"reproducible": ""} if self._wanted else {}

    def settings(self) -> dict[str, str]:
        return {"reproducible": "True"} if self._wanted else {}

    def before_reducer(self, ddp: FeaturedDDP) -> None:
        self.group_replaced(ddp, ddp.process_group)

    def group_replaced(self, ddp: FeaturedDDP, group: dist.ProcessGroup) -> None:
        """Let its all-reduces add in rank order. All ranks call it between the same two operations.

        Raises:
            InvalidArgumentError: another backend than ring moves tensors on this kind of device.
        """
        from ringdp import _C

        if not self._wanted:
            return
        backend = backend_of(group, ddp.device_type)
        if backend != BACKEND:
            refusals.refuse("reproducible", "backend", f"{backend} for tensors on {ddp.device_type}")
        _C.add_in_rank_order(group)
