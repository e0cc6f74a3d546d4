"""RingDP's arguments of the guard."""

from __future__ import annotations

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
class GuardOptions:
    """RingDP's arguments of the guard.

    Attributes:
        every: steps within which a difference is found; 0: there is no guard; None: the default guard, where it costs
            next to nothing and the ranks' parameters must be equal.
        action: the action after a difference.
        ignore: patterns of names to leave out.
    """

    every: int | None = None
    action: str = "warn"
    ignore: tuple[str, ...] = ()

    @classmethod
    def checked(cls, every: Any, action: Any, ignore: Any, module: torch.nn.Module) -> GuardOptions:
        """Raises InvalidArgumentError."""
        if every is not None:
            values.whole("RingDP", "guard_every", every, 0)
        if action is None:
            action = "warn" if every is None else "raise"
        values.choice("RingDP", "on_divergence", action, ACTIONS)
        return cls(every, action, check_patterns(module, tuple(ignore) if not isinstance(ignore, str) else ignore))

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
                f"guard_every={self.every}: the guard hashes tensors on the CPU, and this module is on"
                f" {wrapper.device_type}: leave guard_every out, and compare checkpoints"
            )
        return DivergenceGuard(wrapper, self.every, self.comparison())

    def comparison(self) -> Comparison:
        return Comparison(self.action, self.ignore, with_buffers=self.every is not None)

    def __str__(self) -> str:
        return f"guard_every={self.every}, on_divergence={self.action!r}, guard_ignore={list(self.ignore)}"
