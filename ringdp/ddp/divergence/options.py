"""RingDP's argument ``guard``, and its methods against replicas that differ."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ringdp import values
from ringdp.config import report_every
from ringdp.ddp.divergence.guard import ACTIONS, AttachedGuard, Comparison, DivergenceGuard, SameData, check_now
from ringdp.ddp.divergence.replica import check_patterns
from ringdp.ddp.features import Feature, FeaturedDDP
from ringdp.ddp.in_use import averages_elements
from ringdp.ddp.step_report import StepReport
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

    def guard(self, wrapper: FeaturedDDP, *, starts_alike: bool) -> DivergenceGuard | AttachedGuard | None:
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


class ReplicaGuard(Feature):
    """Compares the replicas of a RingDP while they train.

    Args:
        options: RingDP's argument ``guard``.
        starts_alike: all ranks get rank 0's parameters.

    Attributes:
        guard: None where there is none.
    """

    made_with_reducer = ("guard",)
    guard: DivergenceGuard | AttachedGuard | None = None

    def __init__(self, options: Guard, *, starts_alike: bool) -> None:
        self._options, self._starts_alike = options, starts_alike

    @property
    def is_off(self) -> bool:
        """Whether the user asked for no comparison at all."""
        return self._options.every == 0

    def settings(self) -> dict[str, str]:
        return {} if self._options == Guard() else {"guard": str(self._options)}

    def reducer_made(self, ddp: FeaturedDDP) -> None:
        self.guard = self._options.guard(ddp, starts_alike=self._starts_alike)
        monitor = ddp.ringdp_features[StepReport].monitor
        monitor.attached = self.guard if isinstance(self.guard, AttachedGuard) else None
        monitor.gradients = None if self.is_off else SameData()

    def rest_beside(self, ddp: FeaturedDDP, hook: Callable[..., Any]) -> None:
        """The default guard rests beside a hook that may let replicas drift apart on purpose."""
        if self._options.every is None and not averages_elements(hook):
            self.guard = ddp.ringdp_features[StepReport].monitor.attached = None

    def between_steps(self, ddp: FeaturedDDP) -> None:
        if self.guard is not None:
            self.guard.look()

    def group_replaced(self, ddp: FeaturedDDP, group: dist.ProcessGroup) -> None:
        self.join_is_over()  # as then, the ranks have run other numbers of steps

    def module_changed(self, ddp: FeaturedDDP) -> None:
        if self.guard is not None:
            self.guard.comparison.module_changed()

    def join_is_over(self) -> None:
        if self.guard is not None:
            self.guard.start_again()

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """See `RingDP.guard_optimizer`."""
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InvalidArgumentError(
                f"guard_optimizer needs a torch.optim.Optimizer, not a {type(optimizer).__name__}"
            )
        if self.guard is not None:
            self.guard.comparison.add_optimizer(optimizer)

    def check(self, ddp: FeaturedDDP) -> None:
        """See `RingDP.check_replicas`."""
        comparison = self._options.comparison() if self.guard is None else self.guard.comparison
        as_unit(ddp.process_group, "check_replicas()", lambda: check_now(ddp, comparison))

    @property
    def counts_local_steps(self) -> bool:
        return isinstance(self.guard, DivergenceGuard)

    def stepped_alone(self, ddp: FeaturedDDP) -> None:
        """Called when an optimizer has applied gradients that were not averaged: the guard looks here, since a forward
        may not follow. The default guard looks only with a backward that averages.
        """
        if isinstance(self.guard, DivergenceGuard) and not ddp._join_config.enable:
            self.guard.count_local_step()
            self.guard.look()
