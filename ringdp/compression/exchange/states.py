"""The states of compressors and error feedback between steps: by parameter, and only of steps that count.

The states of a step are pending until `commit`: after an overflow on any rank they are dropped. The residuals of plain
error feedback are in C++ (csrc/torch/reducer/gradient_compression.h), one tensor for each parameter, whose parts and
phases do not overlap; all else is in dicts. Tensors of error feedback are kept without the loss scale; a power of two,
it comes and goes without changing a bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Key:
    """The place of a state dict.

    Attributes:
        name: the parameter's.
        kind: ``feedback`` or ``compressor``.
        phase: ``rank``, ``owner``, or ``result`` for a state that is the same on all ranks.
        part: of the parameter.
    """

    name: str
    kind: str
    phase: str
    part: int


@dataclasses.dataclass(frozen=True)
class Remembered:
    """Of one parameter.

    Attributes:
        residual: of plain error feedback, float32 ``[count]``, in all parts and phases; None where there is none.
        dicts: all other states.
    """

    residual: Tensor | None
    dicts: Mapping[Key, dict[str, Any]]


class States:
    """The states of one rank; used by the thread that encodes, one at a time for a parameter."""

    def __init__(self) -> None:
        from ringdp import _C

        self._committed: dict[Key, dict[str, Any]] = {}
        self._pending: dict[Key, dict[str, Any]] = {}
        self._residuals = _C.Residuals()

    def copy(self, key: Key, factor: float = 1.0) -> dict[str, Any]:
        """A shallow copy, with floating-point tensors times `factor`."""
        return scaled(self._committed.get(key, {}), factor)

    def keep(self, key: Key, state: dict[str, Any], factor: float = 1.0) -> None:
        """Set the dict that counts after this step; divides by `factor` again."""
        if state or key in self._committed:
            self._pending[key] = scaled(state, 1.0 / factor)

    def pending(self, key: Key) -> dict[str, Any]:
        """The pending state of this step, to be corrected before it counts."""
        return self._pending.get(key, {})

    def residual(self, name: str) -> Tensor | None:
        """The one that counts, of the whole parameter; None where no step has left one."""
        return self._residuals.current(name)

    def write_residual(self, name: str, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The one that counts, zeros at first, and memory for the next one, which this step fills."""
        return self._residuals.write(name, count, device)

    def commit(self, finite: bool, *, unused: Iterable[str] = ()) -> None:
        """The step counts, except for parameters that no rank used; or (not `finite`) its states are dropped."""
        without = set(unused)
        self._residuals.commit(finite, list(without))
        self._committed |= {key: it for key, it in self._pending.items() if finite and key.name not in without}
        self._pending = {}

    def of(self, name: str) -> Remembered:
        return Remembered(
            self.residual(name), {key: it for key, it in self._committed.items() if key.name == name and it}
        )

    def put(self, name: str, remembered: Remembered) -> None:
        """Replace all states of one parameter."""
        self.forget(name)
        self._committed |= remembered.dicts
        if remembered.residual is not None:
            self._residuals.set(name, remembered.residual)

    def forget(self, name: str) -> None:
        """All states of one parameter."""
        self._residuals.drop(name)
        for dicts in (self._committed, self._pending):
            for key in [key for key in dicts if key.name == name]:
                del dicts[key]

    def clear(self) -> None:
        self._committed, self._pending = {}, {}
        self._residuals.clear()


def scaled(state: dict[str, Any], factor: float) -> dict[str, Any]:
    if factor == 1.0:
        return dict(state)
    return {name: it * factor if _is_floating(it) else it for name, it in state.items()}


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
