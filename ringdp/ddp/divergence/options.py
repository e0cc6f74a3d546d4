"""RingDP's argument ``guard``, and its methods against replicas that differ."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook, _JoinConfig

from ringdp import values
from ringdp.config import report_every
from ringdp.ddp.divergence.guard import ACTIONS, AttachedGuard, Comparison, DivergenceGuard, check_now
from ringdp.ddp.divergence.replica import check_patterns
from ringdp.ddp.features import Features
from ringdp.ddp.in_use import averages_elements
from ringdp.diagnosis.monitor import StepMonitor
from ringdp.errors import InvalidArgumentError
from ringdp.job.backend import BACKEND, backend_of
from ringdp.job.elastic import as_unit


@dataclass(frozen=True)
class Guard:
    """How replicas are compared while they train: ``RingDP(model, guard=Guard(100, "sync", ["head.*"]))``.

    Args:
        every: steps, such as 100, within which a parameter, or a buffer that is not broadcast, is found that is not
            equal to the bit on all ranks; on the CPU. 0: nothing is compared. None: parameters alone, within 500 steps,
            over ring, unless ``init_sync=False`` or a communication hook lets them differ.
        on: the action after a difference: "raise", the default where `every` is a number; "warn" once for each tensor,
            the default otherwise; or "sync": copy it from the majority of the ranks.
        ignore: names or patterns (``head.*``) of parameters and buffers that are meant to differ.

    Raises:
        InvalidArgumentError: another value.
    """

    every: int | None = None
    on: str | None = None
    ignore: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.every is not None:
            values.whole("Guard", "every", self.every, 0)
        set_field = functools.partial(object.__setattr__, self)
        set_field("on", ("warn" if self.every is None else "raise") if self.on is None else self.on)
        values.choice("Guard", "on", self.on, ACTIONS)
        if isinstance(self.ignore, str) or not all(isinstance(one, str) for one in self.ignore):
            values.refuse("Guard", "ignore", self.ignore, "a list of names or patterns")
        set_field("ignore", tuple(self.ignore))

    @classmethod
    def checked(cls, given: Any, module: torch.nn.Module) -> Guard:
        """Of RingDP's argument ``guard``. Raises InvalidArgumentError."""
        if given is None or (isinstance(given, int) and not isinstance(given, bool)):
            given = cls(given)
        if not isinstance(given, cls):
            values.refuse("RingDP", "guard", given, "a ringdp.Guard, a number of steps, or None")
        check_patterns(module, given.ignore)
        return given

    def guard(self, wrapper: Any, *, starts_alike: bool) -> DivergenceGuard | AttachedGuard | None:
        """The guard of this wrapper, None where there is none.

        Args:
            starts_alike: all ranks got rank 0's parameters.

        Raises:
            InvalidArgumentError: it was asked for, and the module is on a device.
        """
        if self.every is None:
            backend = backend_of(wrapper.process_group, wrapper.device_type)
            possible = wrapper.device_type == "cpu" and backend == BACKEND and report_every() > 0
            return AttachedGuard(wrapper, self.comparison(), report_every()) if possible and starts_alike else None
        if self.every == 0:
            return None
        if wrapper.device_type != "cpu":
            raise InvalidArgumentError(
                f"guard={self.every}: the guard hashes tensors on the CPU, and this module is on"
                f" {wrapper.device_type}: leave guard out, and compare checkpoints"
            )
        return DivergenceGuard(wrapper, self.every, self.comparison())

    def comparison(self) -> Comparison:
        assert self.on is not None  # since __post_init__
        return Comparison(self.on, tuple(self.ignore), with_buffers=self.every is not None)

    def __str__(self) -> str:
        return f"every={self.every}, on={self.on!r}, ignore={list(self.ignore)}"


class GuardedModule:
    """A part of RingDP, which makes the guard with its reducer.

    Attributes:
        _guard_options: the arguments.
        _guard: None where there is none.
        _has_joined: a `Join` is over, in which ranks have run different numbers of steps.
    """

    process_group: dist.ProcessGroup
    features: Features
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
        for feature in self.features:
            feature.before_join()
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
