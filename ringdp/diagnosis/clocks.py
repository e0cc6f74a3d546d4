"""The differences between the clocks of ranks on different hosts, from operations in which all of them took part.

An all-gather ends on a rank only after every rank has issued it. So on the clock of rank j, its end is later than its
issue on the
clock of rank i: both directions of many exchanges bound the difference of the clocks from both sides, as the least
round trip does in NTP (RFC 5905, section 10). A bound grows old, because clocks drift.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ringdp.diagnosis.rank_facts import Facts
from ringdp.diagnosis.window import Stamps

_DRIFT = 100e-6  # of two clocks against each other, at most


@dataclass(frozen=True)
class Offset:
    """A rank's clock minus rank 0's.

    Attributes:
        seconds: the middle of the possible values; None: not known yet.
        error_s: the largest error of `seconds`.
    """

    seconds: float | None
    error_s: float


@dataclass
class _Bound:
    """`at_least` and `at_most` in seconds, each with the time of rank 0's clock when it was found."""

    at_least: tuple[float, float] | None = None
    at_most: tuple[float, float] | None = None

    def narrow(self, at_least: float, at_most: float, now: float) -> None:
        if self.at_least is None or at_least > self.at_least[0] - _DRIFT * (now - self.at_least[1]):
            self.at_least = at_least, now
        if self.at_most is None or at_most < self.at_most[0] + _DRIFT * (now - self.at_most[1]):
            self.at_most = at_most, now

    def offset(self, now: float) -> Offset:
        if self.at_least is None or self.at_most is None:
            return Offset(None, float("inf"))
        low = self.at_least[0] - _DRIFT * (now - self.at_least[1])
        high = self.at_most[0] + _DRIFT * (now - self.at_most[1])
        return Offset((low + high) / 2, max(0.0, (high - low) / 2))


@dataclass
class Clocks:
    """Of all ranks against rank 0's. Not for several threads at once."""

    _bounds: list[_Bound] = field(default_factory=list)
    _now: float = 0.0
    _same: list[bool] = field(default_factory=list)

    def receive(self, stamps: Sequence[Stamps], facts: Sequence[Facts]) -> None:
        """Take all ranks' stamps of the same step, by rank."""
        if len(self._bounds) != len(stamps):
            self._bounds = [_Bound() for _ in stamps]
        self._same = [bool(one.kernel) and one.kernel == facts[0].kernel for one in facts]
        first = stamps[0]
        self._now = first.now_ns * 1e-9
        for bound, other in zip(self._bounds, stamps, strict=True):
            if first.ended_ns and other.ended_ns:
                bound.narrow(
                    (other.issued_ns - first.ended_ns) * 1e-9, (other.ended_ns - first.issued_ns) * 1e-9, self._now
                )

    def offsets(self) -> list[Offset]:
        """By rank, from the last stamps; [] before them. Ranks of one running kernel share a clock."""
        return [
            Offset(0.0, 0.0) if same else bound.offset(self._now)
            for bound, same in zip(self._bounds, self._same, strict=True)
        ]
