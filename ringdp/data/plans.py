"""The splits, each with its first batch, and the batches drawn by them. Pure."""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from ringdp.data.split import Pace, RankLimits


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
    """

    paces: tuple[Pace, ...]
    limits: RankLimits


class Plans:
    """Plans, each from a batch on. The batches before keep their split."""

    def __init__(self, first: Plan) -> None:
        self._starts = [0]
        self._plans = [first]

    def add(self, start: int, plan: Plan) -> None:
        """From batch `start` on, which is not before the last plan's."""
        self._starts.append(max(start, self._starts[-1]))
        self._plans.append(plan)

    def at(self, index: int) -> tuple[int, Plan]:
        """The number of the plan of this batch, and that plan."""
        number = bisect_right(self._starts, index) - 1
        return number, self._plans[max(number, 0)]

    @property
    def newest(self) -> Plan:
        return self._plans[-1]
