"""RingDP in an elastic job (``ringrun --elastic``): operations that it repeats without a lost rank."""

from __future__ import annotations

import torch.distributed as dist

from ringdp import config, refusals
from ringdp.ddp.features import Feature, FeaturedDDP
from ringdp.job.backend import BACKEND, backend_of
from ringdp.job.elastic import is_elastic


class Elastic(Feature):
    """Steps are made again after the loss of a rank.

    Attributes:
        repairs: whether they are; None before that was asked first.
    """

    made_with_reducer = ("repairs",)
    repairs: bool | None = None

    def in_use(self, ddp: FeaturedDDP) -> dict[str, str]:
        """Raises:
        InvalidArgumentError: the job is elastic, and the wrapper's group does not go on without lost ranks.
        """
        if self.repairs is None:
            group = ddp.process_group
            self.repairs = backend_of(group, ddp.device_type) == BACKEND and is_elastic(group)
            if not self.repairs and config.elastic() and dist.get_world_size() > 1:
                refusals.refuse("elastic", "group")
        return {"elastic": ""} if self.repairs else {}

    def settings(self) -> dict[str, str]:
        return {"elastic": "True (RINGDP_ELASTIC)"} if config.elastic() else {}
