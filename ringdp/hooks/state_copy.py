"""A copy of what a communication hook keeps between calls, to put it back where a step is made again."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

_UNKNOWN = object()


class StateCopy:
    """The tensors, numbers, texts and generators in the attributes of one object, in its dicts, lists and tuples too.
    Whatever else it refers to (modules, process groups, functions) is kept as it is.

    Args:
        state: the first argument of the hook; a dict, or any object. None and a process group hold nothing.
    """

    def __init__(self, state: object) -> None:
        self._state = None if isinstance(state, dist.ProcessGroup) else state
        self._kept: dict[Any, Any] = {}

    @property
    def empty(self) -> bool:
        return self._state is None

    def take(self) -> None:
        self._kept = {name: copied(value) for name, value in self._items()}

    def put_back(self) -> None:
        """The state is that of the last `take`, which stays."""
        if isinstance(self._state, dict):
            self._state.clear()
            self._state.update({name: copied(value) for name, value in self._kept.items()})
            return
        for name, _ in [*self._items()]:
            if name not in self._kept:
                delattr(self._state, name)
        for name, value in self._kept.items():
            setattr(self._state, name, copied(value))

    def _items(self) -> Iterator[tuple[Any, Any]]:
        if isinstance(self._state, dict):
            yield from self._state.items()
            return
        yield from getattr(self._state, "__dict__", {}).items()
        for kind in type(self._state).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                value = getattr(self._state, name, _UNKNOWN)
                if value is not _UNKNOWN and name not in ("__dict__", "__weakref__"):
                    yield name, value


def copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        kept = copy.copy(value)  # of the same class, in the same order
        kept.update({name: copied(one) for name, one in value.items()})
        return kept
    if type(value) in (list, tuple, set):
        return type(value)(copied(one) for one in value)
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if isinstance(value, random.Random) or type(value).__module__.startswith("numpy.random"):
        return copy.deepcopy(value)
    return value
