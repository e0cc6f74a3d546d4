"""What compressors and error feedback remember from step to step: by parameter, and only of steps that count.

What a step leaves is pending until `commit`: an overflow anywhere takes all of it back. Tensors of error feedback are
kept without the loss scale; a power of two, it comes and goes without changing a bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class Key:
    """Whose dict it is.

    Attributes:
        name: the parameter's.
        kind: ``feedback`` or ``compressor``.
        phase: ``rank``, ``owner``, or ``result`` for what is the same on all ranks; ``whole`` where the core keeps both
            phases' in one tensor for all parts.
        part: of the parameter.
    """

    name: str
    kind: str
    phase: str
    part: int


class States:
    """The dicts of one rank; used by whichever thread encodes, one at a time for a parameter."""

    def __init__(self) -> None:
        self._committed: dict[Key, dict[str, Any]] = {}
        self._pending: dict[Key, dict[str, Any]] = {}

    def copy(self, key: Key, factor: float = 1.0) -> dict[str, Any]:
        """A shallow copy, with floating-point tensors times `factor`."""
        return scaled(self._committed.get(key, {}), factor)

    def keep(self, key: Key, state: dict[str, Any], factor: float = 1.0) -> None:
        """What the dict will be once this step counts; divides by `factor` again."""
        if state or key in self._committed:
            self._pending[key] = scaled(state, 1.0 / factor)

    def pending(self, key: Key) -> dict[str, Any]:
        """What this step has left so far, to be corrected before it counts."""
        return self._pending.get(key, {})

    def commit(self, finite: bool, *, unused: Iterable[str] = ()) -> None:
        """The step counts, but for parameters that nobody used, or leaves no trace."""
        if finite:
            without = set(unused)
            self._committed.update({key: it for key, it in self._pending.items() if key.name not in without})
        self._pending = {}

    def items(self) -> Mapping[Key, dict[str, Any]]:
        return self._committed

    def forget(self, name: str) -> None:
        """What is remembered of one parameter."""
        for dicts in (self._committed, self._pending):
            for key in [key for key in dicts if key.name == name]:
                del dicts[key]

    def take(self, states: Mapping[Key, dict[str, Any]]) -> None:
        """Put in what a checkpoint held."""
        self._committed.update(states)

    def replace(self, states: dict[Key, dict[str, Any]]) -> None:
        self._committed, self._pending = states, {}


def scaled(state: dict[str, Any], factor: float) -> dict[str, Any]:
    if factor == 1.0:
        return dict(state)
    return {name: it * factor if _is_floating(it) else it for name, it in state.items()}


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
