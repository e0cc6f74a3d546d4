"""RingDP's methods against replicas that differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook, _JoinConfig

from ringdp import refusals
from ringdp.ddp.divergence.attached import AttachedGuard
from ringdp.ddp.divergence.guard import DivergenceGuard, check_now
from ringdp.ddp.divergence.options import Guard
from ringdp.ddp.in_use import averages_elements
from ringdp.diagnosis.monitor import StepMonitor
from ringdp.errors import InvalidArgumentError
from ringdp.job.elastic import as_unit


class GuardedModule:
    """A part of RingDP, which makes the guard with its reducer.

    Attributes:
        _guard_options: the arguments.
        _guard: None where there is none.
        _has_joined: a `Join` is over, in which ranks have run different numbers of steps.
    """

    process_group: dist.ProcessGroup
    _guard_options: Guard
    _guard: DivergenceGuard | AttachedGuard | None
    _monitor: StepMonitor
    _has_joined: bool = False

    def guard_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Let the guard look at this optimizer's state, too. All ranks call it; not for one that shards its state.

        Raises:
            InvalidArgumentError: not an optimizer.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InvalidArgumentError(
                f"guard_optimizer needs a torch.optim.Optimizer, not a {type(optimizer).__name__}"
            )
        if self._guard is not None:
            self._guard.comparison.add_optimizer(optimizer)

    def check_replicas(self) -> None:
        """Compare all parameters and buffers between the ranks now, to the bit. All ranks call it, between two steps.

        As the guard it leaves out the tensors of its ``ignore``, and buffers that each forward broadcasts.

        Raises:
            MismatchError: they differ; names the first tensor and the ranks.
        """
        comparison = self._guard_options.comparison() if self._guard is None else self._guard.comparison
        as_unit(self.process_group, "check_replicas()", lambda: check_now(self, comparison))

    def _guard_beside(self, hook: Callable[..., Any]) -> None:
        """The default guard rests beside a hook that may let replicas drift apart on purpose."""
        if self._guard_options.every is None and not averages_elements(hook):
            self._guard = self._monitor.attached = None

    @property
    def _guard_counts_local_steps(self) -> bool:
        return isinstance(self._guard, DivergenceGuard)

    def _stepped_alone(self) -> None:
        """Called when an optimizer has applied gradients that were not averaged: the guard looks here, since a forward
        may not follow. The default guard looks only with a backward that averages.
        """
        wrapper: Any = self
        if isinstance(self._guard, DivergenceGuard) and not wrapper._join_config.enable:
            self._guard.count_local_step()
            self._guard.look()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """As DistributedDataParallel's; torch leaves the wrapper as if the join went on when it is over."""
        if self.__dict__.get("_repaired"):
            refusals.refuse("elastic", "join")
        hook: JoinHook = super().join_hook(**kwargs)  # type: ignore[misc]
        make_models_equal = hook.post_hook

        def post_hook(is_last_joiner: bool) -> None:
            make_models_equal(is_last_joiner)
            wrapper: Any = self
            wrapper._join_config = _JoinConfig.construct_disabled_join_config()
            self._has_joined = True
            if self._guard is not None:
                self._guard.start_again()

        hook.post_hook = post_hook  # type: ignore[method-assign]
        return hook

    @property
    def _sends_buffers(self) -> bool:
        """Whether each forward overwrites the buffers with rank 0's, or with the result of a hook."""
        wrapper: Any = self
        return bool(getattr(wrapper, "forward_sync_buffers", wrapper.broadcast_buffers))
