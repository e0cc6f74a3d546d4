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
from ringdp.hooks.compressed import CompressedHook
from ringdp.hooks.futures import failed
from ringdp.hooks.state_copy import StateCopy
from ringdp.job.backend import BACKEND, backend_of
from ringdp.job.elastic import as_unit, is_elastic, refuse_outside, view_of

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


class Elastic(Feature):
    """Steps are made again after the loss of a rank.

    Attributes:
        repairs: whether they are; None before that was asked first.
    """

    made_with_reducer = ("repairs", "_counted")
    repairs: bool | None = None
    _counted: tuple[Callable[[], None], ...] = ()

    def in_use(self, ddp: FeaturedDDP) -> dict[str, str]:
        """Raises:
        InvalidArgumentError: the job is elastic, and the wrapper's group does not go on without lost ranks.
        """
        if self.repairs is None:
            group = ddp.process_group
            self.repairs = backend_of(group, ddp.device_type) == BACKEND and is_elastic(group)
            if not self.repairs and config.elastic() and dist.get_world_size() > 1:
                refusals.refuse("elastic", "group", f"backend {backend_of(group, ddp.device_type)}")
        return {"elastic": ""} if self.repairs else {}

    def before_forward(self, ddp: FeaturedDDP) -> None:
        refuse_outside("RingDP")

    def reducer_made(self, ddp: FeaturedDDP) -> None:
        if self.repairs and ddp._delay_all_reduce_params:
            self.when_counted(ddp, _delayed_all_reduce(ddp))

    def when_counted(self, ddp: FeaturedDDP, call: Callable[[], None]) -> None:
        """Let `call` run at the end of each backward whose step counts. It must not keep the wrapper."""
        self._counted = calls = (*self._counted, call)

        def call_all() -> None:
            for one in calls:
                one()

        ddp.reducer.when_counted(call_all)

    def repeatable(self, ddp: FeaturedDDP, state: object, hook: Hook) -> Hook:
        """The hook, which may be called again for a step that is made again: it then finds `state` as it was."""
        if isinstance(state, CompressedHook):
            state.commit_later()
            self.when_counted(ddp, lambda: state.commit(state.finite))
            return _with_losses_in_future(hook)
        return _with_losses_in_future(_with_state_put_back(ddp, state, hook))

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


def _with_state_put_back(ddp: FeaturedDDP, state: object, hook: Hook) -> Hook:
    """The first bucket of a step has the state from before it, also where the members change and the step is made
    again: its buckets come in the order of their numbers, but not those that only the lost rank used.

    Its operations are over when their futures are asked for: what it attaches to these runs within the call, so that
    another operation belongs to the step, and the state is complete when the step is made again.
    """
    from ringdp import _C

    alive, before = weakref.ref(ddp), StateCopy(state)
    if before.empty:
        return hook
    step, view, last = -1, 0, -1

    @functools.wraps(hook)
    def call(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        nonlocal step, view, last
        wrapper = alive()
        assert wrapper is not None, "a wrapper's bucket outlived it"
        now = view_of(wrapper.process_group)
        if step != (step := wrapper.reducer.report.steps()):
            before.take()
        elif view != now or bucket.index() <= last:
            before.put_back()
        view, last = now, bucket.index()
        with _C.CompleteFutures():
            return hook(state, bucket)

    return call


def _with_losses_in_future(hook: Hook) -> Hook:
    """A communication hook that waits for its operations raises their errors, which torch passes on as text: so a loss
    fails the future, and the step is made again."""

    @functools.wraps(hook)
    def call(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        try:
            return hook(state, bucket)
        except PeerLostError as error:
            return failed(error, bucket.buffer().device)

    return call
