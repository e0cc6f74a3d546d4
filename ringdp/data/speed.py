"""The pace of this rank, from the times of its steps, and when other paces are worth another split.

Times have outliers and noise, so a pace is a median with its uncertainty, and a split changes only where the gain is
larger than 1.5 % and what noise could pretend. A rank may also be slow by pauses: a cgroup's quota lets it run at
full speed and then stops it for the rest of a period. Then it is the median over stretches of time. Pure: no clock is
read here.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ringdp.data.split import Pace
from ringdp.errors import InvalidArgumentError

_REMEMBERED = 1000  # steps
_WINDOW = 200  # of them that count where the times are even
_UNEVEN = 0.1  # by which the mean differs from the median where a rank is slow by pauses
_STRETCH_S = 0.1  # then this much time counts as one; the usual period of a quota
_RECENT = 8  # steps by which a jump is distinguished from noise
_LEAST_JUMP = 0.1
_ERRORS = 4.0  # standard errors by which a jump differs from noise
_LEAST_GAIN = 0.015
_GAIN_ERRORS = 5.0
_LEAST_CHANGE = 0.1  # of the work: two splits that differ by this much separate overhead from work
_MOST_OVERHEAD = 4.0  # batches
STEPS_BETWEEN_CHANGES = 50


@dataclass(frozen=True)
class Measured:
    """A rank's estimate of its pace.

    Attributes:
        pace: its pace; seconds are 0 where it has not measured enough.
        error: the standard error of the seconds, relative to them.
    """

    pace: Pace
    error: float = 0.0

    @property
    def known(self) -> bool:
        return 0 < self.pace.seconds < float("inf") and 0 <= self.error < float("inf") and self.pace.overhead >= 0


UNKNOWN = Measured(Pace(0.0))


class SpeedModel:
    """The pace of one rank. Used by the thread that trains."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, float]] = deque(maxlen=_REMEMBERED)  # work and seconds
        self._overhead = 0.0
        self._before: tuple[float, float] | None = None  # work and seconds under the split before

    def add(self, work: float, seconds: float) -> None:
        """Add the time of a step. A step without work is left out.

        Raises:
            InvalidArgumentError: a time or work that is negative, infinite or NaN.
        """
        if not (0 <= seconds < float("inf") and 0 <= work < float("inf")):
            raise InvalidArgumentError(f"a step of {work} samples cannot take {seconds} seconds")
        if work > 0 and seconds > 0:
            self._steps.append((work, seconds))

    def split_changed(self) -> None:
        """Called when steps have other work from now on: the known times separate overhead from work, and are
        dropped."""
        if len(self._steps) >= _RECENT:
            self._before = self._typical()
        self._steps.clear()

    def measured(self) -> Measured:
        """The pace now; unknown before there are enough steps."""
        self._forget_before_jump()
        if len(self._steps) < _RECENT:
            return UNKNOWN
        self._learn_overhead()
        steps = [(self._overhead + work, seconds) for work, seconds in self._steps]
        rates = [seconds / work for work, seconds in steps[-_WINDOW:]]
        middle = statistics.median(rates)
        if abs(statistics.fmean(rates) / middle - 1) > _UNEVEN:
            stretches = _rates_of_stretches(steps)
            if len(stretches) >= _RECENT:
                rates, middle = stretches, statistics.median(stretches)
        return Measured(Pace(middle, self._overhead), _standard_error(rates) / middle)

    def _typical(self) -> tuple[float, float]:
        works, seconds = zip(*self._steps, strict=True)
        return statistics.median(works), statistics.median(seconds)

    def _forget_before_jump(self) -> None:
        rates = [seconds / (self._overhead + work) for work, seconds in self._steps]
        recent, older = rates[-_RECENT:], rates[:-_RECENT]
        if len(older) < _RECENT // 2:
            return
        now, then = statistics.median(recent), statistics.median(older)
        noise = (_standard_error(recent) ** 2 + _standard_error(older) ** 2) ** 0.5
        if abs(now - then) > max(_LEAST_JUMP * then, _ERRORS * noise):
            kept = list(self._steps)[-_RECENT:]
            self._steps.clear()
            self._steps.extend(kept)
            self._before = None  # two speeds do not separate overhead from work

    def _learn_overhead(self) -> None:
        if self._before is None:
            return
        (work1, seconds1), (work2, seconds2) = self._before, self._typical()
        if abs(work2 - work1) < _LEAST_CHANGE * work1:
            return
        per_work = (seconds2 - seconds1) / (work2 - work1)
        self._before = None
        if per_work > 0:
            self._overhead = min(max(seconds2 / per_work - work2, 0.0), _MOST_OVERHEAD * work2)


def worth_it(
    measured: Sequence[Measured], current: Sequence[Pace], parts: Callable[[Sequence[Pace]], Sequence[float]]
) -> bool:
    """Whether the measured paces give a split that is enough faster than the one by the `current` paces.

    Args:
        measured: by rank.
        current: by rank, those that the batches are split by.
        parts: the work of each rank in a usual batch, split by these paces.
    """
    if not all(one.known for one in measured):
        return False
    paces = [one.pace for one in measured]
    now, then = (max(pace.time(part) for pace, part in zip(paces, parts(by), strict=True)) for by in (current, paces))
    noise = max(one.error for one in measured)
    return now > then * (1 + _LEAST_GAIN + _GAIN_ERRORS * noise)


def _rates_of_stretches(steps: Sequence[tuple[float, float]]) -> list[float]:
    """Seconds for each work, over neighbouring steps that took `_STRETCH_S` or more together."""
    rates = []
    work = seconds = 0.0
    for step_work, step_seconds in steps:
        work += step_work
        seconds += step_seconds
        if seconds >= _STRETCH_S:
            rates.append(seconds / work)
            work = seconds = 0.0
    return rates


def _standard_error(values: Sequence[float]) -> float:
    """Of the median, from the quartiles: few outliers do not matter."""
    if len(values) < 2:
        return float("inf")
    quartiles = statistics.quantiles(values, n=4, method="inclusive")
    return 1.25 * (quartiles[2] - quartiles[0]) / 1.35 / len(values) ** 0.5
