"""Whether the gradients of a RingDP's last backward are finite, and which ranks' overflowed."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ringdp.compression.parameters import ModelParameter
from ringdp.ddp.features import Feature, FeaturedDDP
from ringdp.ddp.parameter_changes import ReducedParameters
from ringdp.job.byte_collectives import all_gather_bytes
from ringdp.job.elastic import as_unit

_INDEX_BYTES = 8


@dataclass(frozen=True)
class Overflow:
    """Gradients that were not finite.

    Attributes:
        parameter: the first one's name.
        ranks: those whose gradient had an infinity or a NaN; none if every rank's own was finite and only the sum is
            not. None: the ranks were not asked.
        world_size: of how many.
        rank: this one.
    """

    parameter: str
    ranks: tuple[int, ...] | None = None
    world_size: int = 1
    rank: int = 0

    def __str__(self) -> str:
        gradient = f"the gradient of '{self.parameter}'"
        if self.ranks is None:
            return f"{gradient} is not finite"
        if not self.ranks:
            return f"{gradient} was finite on each of {self.world_size} ranks, but their sum is not"
        which = "rank" if len(self.ranks) == 1 else "ranks"
        return f"{gradient} was not finite on {which} {', '.join(map(str, self.ranks))} of {self.world_size}"


class ReducedGradients:
    """Of one RingDP, which makes it when its reducer has new parameters, and keeps it. Used by the thread that trains.

    Args:
        wrapper: the RingDP.
        watched: its parameters, as its reducer numbers them.
    """

    def __init__(self, wrapper: Any, watched: Sequence[ModelParameter]) -> None:
        from ringdp import _C

        parameters = [one.parameter for one in watched]
        names = [one.name for one in watched]

        self._wrapper: weakref.ref[Any] = weakref.ref(wrapper)
        self._names = names
        self._ids = [id(parameter) for parameter in parameters]  # the marks keep them alive
        self._known_ids = frozenset(self._ids)
        self._marks = _C.GradientMarks(parameters)
        self._watching = False
        self._steps = wrapper.reducer.report.steps()
        self._overflowed = False
        self._overflow: Overflow | None = None
        _ALIVE.add(self)

    def watch(self) -> None:
        """Called when a backward begins: check the reductions of this one and all later ones."""
        wrapper = self._wrapper()
        if wrapper is not None and not self._watching:
            wrapper.reducer.overflow.watch(True)
            self._watching = True

    def note(self) -> None:
        """Called after a backward: if it reduced gradients, remember which, and whether they are finite."""
        wrapper = self._wrapper()
        if wrapper is None:
            return
        steps = wrapper.reducer.report.steps()
        if steps == self._steps:
            return
        self._steps = steps
        # None: not checked, because nothing was reduced, or a hook reduced it. A check on a device would wait
        # for it: there torch's one kernel looks at the gradients while it unscales them.
        known = wrapper.process_group.size() > 1 and wrapper.device_type == "cpu"
        finite = wrapper.reducer.overflow.finite() if known else None
        self._marks.note(finite is True)
        self._overflowed = finite is False
        self._overflow = None

    def finite(self) -> set[int]:
        """The ids of the parameters whose gradient is as the reducer left it, which saw that it is finite."""
        wrapper = self._wrapper()
        if wrapper is None or wrapper.reducer.report.steps() != self._steps:
            return set()  # a backward without a scaled loss has reduced since
        return {number for number, finite in zip(self._ids, self._marks.finite(), strict=True) if finite}

    def keep(self, parameters: Collection[int]) -> None:
        """Note that the gradients of these ids are unchanged, although memory that they share was written to."""
        self._marks.renew([i for i, number in enumerate(self._ids) if number in parameters])

    def reduces_any(self, parameters: Collection[int]) -> bool:
        """Whether one of these ids is a parameter of the wrapper."""
        return not self._known_ids.isdisjoint(parameters)

    def overflow(self) -> Overflow | None:
        """The overflow of the last backward; None if all gradients were finite, or were not checked.

        The first call after a backward that overflowed is a small collective of the wrapper's ranks: they all know of
        the overflow and come here, unless some have run out of input (`join`).
        """
        wrapper = self._wrapper()
        if self._overflow is None and self._overflowed and wrapper is not None:
            group, reducer = wrapper.process_group, wrapper.reducer
            own = int(reducer.overflow.own_non_finite())
            alone = wrapper._join_config.enable
            brought = [own] if alone else as_unit(group, "who had an overflow", lambda: _gather(own, group))
            ranks = tuple(rank for rank, index in enumerate(brought) if index >= 0)
            in_result = reducer.overflow.non_finite() if not ranks else []
            first = brought[ranks[0]] if ranks else (in_result[0] if in_result else -1)
            name = self._names[first] if first >= 0 else "a parameter"
            self._overflow = Overflow(name, None if alone else ranks, group.size(), group.rank())
        return self._overflow


class Overflows(Feature):
    """Keeps what a GradScaler asks about the gradients of one RingDP."""

    made_with_reducer = ("_gradients",)
    _gradients: ReducedGradients

    def reducer_made(self, ddp: FeaturedDDP) -> None:
        self._gradients = ReducedGradients(ddp, ddp.ringdp_features[ReducedParameters].watched)

    def renumbered(self, ddp: FeaturedDDP, renamed: Mapping[str, str]) -> None:
        self.reducer_made(ddp)


def of_all_wrappers() -> list[ReducedGradients]:
    """Of every RingDP of this process."""
    return list(_ALIVE)


_ALIVE: weakref.WeakSet[ReducedGradients] = weakref.WeakSet()


def _gather(index: int, group: torch.distributed.ProcessGroup) -> list[int]:
    gathered = all_gather_bytes(index.to_bytes(_INDEX_BYTES, "little", signed=True), group, room=_INDEX_BYTES)
    return [int.from_bytes(one, "little", signed=True) for one in gathered]
