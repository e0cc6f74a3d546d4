"""Which split counts from which batch on, and what was drawn by it. Pure."""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from ringdp.data.split import Pace


@dataclass(frozen=True)
class Drawn:
    """A batch that was drawn.

    Attributes:
        work: of this rank's part.
        plan: the number of the plan by which it was split.
        checksum: of the splits of all batches up to it.
    """

    work: float
    plan: int
    checksum: int

    @classmethod
    def after(cls, checksum: int, index: int, counts: Sequence[int], *, work: float, plan: int) -> Drawn:
        """`checksum`: of the batches before it."""
        return cls(work, plan, zlib.crc32(struct.pack(f"<q{len(counts)}q", index, *counts), checksum))


class Plans:
    """The ranks' paces by which batches are split, each from a batch on. The batches before keep their split."""

    def __init__(self, paces: Sequence[Pace]) -> None:
        self._starts = [0]
        self._paces = [tuple(paces)]

    def add(self, start: int, paces: Sequence[Pace]) -> None:
        """From batch `start` on, which is not before the last plan's."""
        self._starts.append(max(start, self._starts[-1]))
        self._paces.append(tuple(paces))

    def at(self, index: int) -> tuple[int, tuple[Pace, ...]]:
        """The number of the plan of this batch, and its paces by rank."""
        number = bisect_right(self._starts, index) - 1
        return number, self._paces[max(number, 0)]

    @property
    def newest(self) -> tuple[int, tuple[Pace, ...]]:
        """The batch from which it counts, and its paces."""
        return self._starts[-1], self._paces[-1]
