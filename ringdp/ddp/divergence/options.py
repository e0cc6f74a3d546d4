"""RingDP's argument ``guard``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ringdp import values
from ringdp.config import report_every
from ringdp.ddp.divergence.attached import AttachedGuard
from ringdp.ddp.divergence.comparison import ACTIONS, Comparison
from ringdp.ddp.divergence.guard import DivergenceGuard
from ringdp.ddp.divergence.replica import check_patterns
from ringdp.errors import InvalidArgumentError
from ringdp.job.backend import BACKEND, backend_of


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
