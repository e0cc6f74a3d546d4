"""RingDP in an elastic job (``ringrun --elastic``): operations that it repeats without a lost rank."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from ringdp import config, refusals
from ringdp.ddp.features import Feature, FeaturedDDP
from ringdp.errors import PeerLostError
from ringdp.hooks.futures import failed
from ringdp.job.backend import BACKEND, backend_of
from ringdp.job.elastic import as_unit, is_elastic, refuse_outside

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


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

    def before_forward(self, ddp: FeaturedDDP) -> None:
        refuse_outside("RingDP")

    def reducer_made(self, ddp: FeaturedDDP) -> None:
        if self.repairs and ddp._delay_all_reduce_params:
            ddp.reducer.when_counted(_delayed_all_reduce(ddp))

    def settings(self) -> dict[str, str]:
        return {"elastic": "True (RINGDP_ELASTIC)"} if config.elastic() else {}


def _delayed_all_reduce(ddp: FeaturedDDP) -> Callable[[], None]:
    """For the end of a backward whose step counts: the gradients of delay_all_reduce_named_params, as a unit."""
    alive = weakref.ref(ddp)

    def reduce() -> None:
        if (wrapper := alive()) is None:
            return
        group, buffer = wrapper.process_group, wrapper._delay_grad_buffer
        assert buffer is not None
        mine = buffer.clone()

        def average() -> None:
            torch.div(mine, group.size(), out=buffer)
            dist.all_reduce(buffer, group=group)

        as_unit(group, "the delayed all-reduce", average)

    return reduce


def with_losses_in_future(hook: Hook) -> Hook:
    """A communication hook that waits for its operations raises their errors, which torch passes on as text: so a loss
    fails the future, and the step is made again."""

    @functools.wraps(hook)
    def call(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        try:
            return hook(state, bucket)
        except PeerLostError as error:
            return failed(error, bucket.buffer().device)

    return call
