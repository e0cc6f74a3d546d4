"""What compressors and error feedback remember from step to step: by parameter, and only of steps that count.

What a step leaves is pending until `commit`: an overflow anywhere takes all of it back. Tensors of error feedback are
kept without the loss scale; a power of two, it comes and goes without changing a bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
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
        self._spare: dict[Key, Tensor] = {}  # of residuals that are written anew in each step: two of each take turns
        self._alternate: set[Key] = set()

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

    def room(self, key: Key, like: Tensor) -> Tensor:
        """Memory for the next ``residual`` of `key`, with whatever is in it; see `_spare`.

        Fresh memory costs more than filling it: of large tensors the system brings each page when it is first touched.
        """
        self._alternate.add(key)
        spare = self._spare.pop(key, None)
        return spare if spare is not None and spare.shape == like.shape else torch.empty_like(like)

    def commit(self, finite: bool, *, unused: Iterable[str] = ()) -> None:
        """The step counts, except for parameters that no rank used; or (not `finite`) its states are dropped."""
        without = set(unused)
        counts = {key: it for key, it in self._pending.items() if finite and key.name not in without}
        for key in self._alternate & self._pending.keys():
            done_with = (self._committed if key in counts else self._pending).get(key, {}).get("residual")
            if done_with is not None:
                self._spare[key] = done_with
        self._committed.update(counts)
        self._pending, self._alternate = {}, set()

    def items(self) -> Mapping[Key, dict[str, Any]]:
        return self._committed

    def of(self, name: str) -> dict[Key, dict[str, Any]]:
        """What is remembered of one parameter."""
        return {key: it for key, it in self._committed.items() if key.name == name}

    def forget(self, name: str) -> None:
        """All that is remembered of one parameter."""
        for dicts in (self._committed, self._pending, self._spare):
            for key in [key for key in dicts if key.name == name]:
                del dicts[key]

    def take(self, states: Mapping[Key, dict[str, Any]]) -> None:
        """Put in what a checkpoint held."""
        self._committed.update(states)

    def replace(self, states: dict[Key, dict[str, Any]]) -> None:
        self._committed, self._pending, self._spare = states, {}, {}


def scaled(state: dict[str, Any], factor: float) -> dict[str, Any]:
    if factor == 1.0:
        return dict(state)
    return {name: it * factor if _is_floating(it) else it for name, it in state.items()}


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
