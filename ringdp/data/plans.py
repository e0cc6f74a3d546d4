"""The splits, each with its first batch, and the batches drawn by them. Pure."""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ringdp.data.split import Pace, RankLimits

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Drawn:
    """A batch that was drawn.

    Attributes:
        work: of this rank's part.
        samples: of this rank's part.
        plan: the number of the plan by which it was split.
        checksum: of the splits of all batches up to it.
    """

    work: float
    samples: int
    plan: int
    checksum: int

    @classmethod
    def after(cls, checksum: int, index: int, counts: Sequence[int], *, work: float, samples: int, plan: int) -> Drawn:
        """`checksum`: of the batches before it."""
        return cls(work, samples, plan, zlib.crc32(struct.pack(f"<q{len(counts)}q", index, *counts), checksum))


@dataclass(frozen=True)
class Plan:
    """How batches are split.

    Attributes:
        paces: by rank.
        limits: of a full batch.
        places: by rank, which it was when the sampler was made.
    """

    paces: tuple[Pace, ...]
    limits: RankLimits
    places: tuple[int, ...]

    def without(self, gone: Collection[int]) -> Plan:
        """For the others, when these places are lost."""
        stay = [rank for rank, place in enumerate(self.places) if place not in gone]

        def of_those(values: Sequence[Kind]) -> tuple[Kind, ...]:
            return tuple(values[rank] for rank in stay)

        limits = RankLimits(of_those(self.limits.least), of_those(self.limits.most), self.limits.multiple)
        return Plan(of_those(self.paces), limits, of_those(self.places))


class Plans:
    """Plans, each from a batch on. The batches before keep their split."""

    def __init__(self, first: Plan) -> None:
        self._starts = [0]
        self._plans = [first]

    def add(self, start: int, plan: Plan) -> int:
        """From batch `start` on, or from the last plan's first batch, if that is later. Returns that batch."""
        self._starts.append(max(start, self._starts[-1]))
        self._plans.append(plan)
        return self._starts[-1]

    def at(self, index: int) -> tuple[int, Plan]:
        """The number of the plan of this batch, and that plan."""
        number = bisect_right(self._starts, index) - 1
        return number, self._plans[max(number, 0)]

    def forget(self) -> None:
        """The newest one is that of all batches from now on."""
        self._starts, self._plans = [0], [self._plans[-1]]

    @property
    def newest(self) -> Plan:
        return self._plans[-1]
