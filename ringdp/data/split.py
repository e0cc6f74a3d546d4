"""The split of a global batch over the ranks: pure functions of the agreed paces and limits.

A rank takes ``seconds * (overhead + work)`` for a batch. `shares` makes the slowest rank as fast as it can be; `counts`
makes whole samples of that, within limits, by the largest remainder. Only +, -, *, / and comparisons, which give the
same bits on every machine: the ranks compute the split each for itself.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import fsum


@dataclass(frozen=True)
class Pace:
    """How fast a rank is.

    Attributes:
        seconds: per unit of work; only the ranks' ratio matters for a split.
        overhead: the cost of a batch beside its work, in units of work.
    """

    seconds: float = 1.0
    overhead: float = 0.0

    def time(self, work: float) -> float:
        """Seconds for a batch."""
        return self.seconds * (self.overhead + work)


@dataclass(frozen=True)
class RankLimits:
    """How many samples each rank may get.

    Attributes:
        least: by rank.
        most: by rank.
        multiple: each rank's number is a multiple of this, but in a last batch that is short.
    """

    least: tuple[int, ...]
    most: tuple[int, ...]
    multiple: int = 1

    @property
    def units(self) -> list[tuple[int, int]]:
        """By rank the least and the most, in multiples."""
        return [
            (-(-low // self.multiple), high // self.multiple) for low, high in zip(self.least, self.most, strict=True)
        ]

    def for_batch(self, total: int, size: int) -> RankLimits:
        """The limits of a batch of `total` samples, where `size` are usual: a short one cannot keep all of them."""
        if total >= size:
            return self
        multiple = self.multiple
        low = sum(it[0] for it in self.units) * multiple
        if total % multiple == 0 and low <= total:
            return self
        if sum(self.least) <= total:
            return RankLimits(self.least, self.most, 1)
        one = 1 if total >= len(self.least) else 0
        return RankLimits(tuple(min(one, low) for low in self.least), self.most, 1)


def shares(paces: Sequence[Pace], total: float, low: Sequence[float], high: Sequence[float]) -> list[float]:
    """Work of each rank, between its limits, such that the slowest rank is as fast as it can be.

    Args:
        paces: by rank.
        total: work to be done; between the sums of `low` and `high`.
        low: the least work of each rank.
        high: the most work of each rank.
    """
    ranks = range(len(paces))
    result = [float(it) for it in low]
    free = list(ranks)
    left = float(total)
    # Every round settles a rank that meets a limit, or all of them.
    while free:
        time = (left + fsum(paces[r].overhead for r in free)) / fsum(1 / paces[r].seconds for r in free)
        wanted = {r: time / paces[r].seconds - paces[r].overhead for r in free}
        below = fsum(low[r] - wanted[r] for r in free if wanted[r] < low[r])
        above = fsum(wanted[r] - high[r] for r in free if wanted[r] > high[r])
        if below == above:
            for r in free:
                result[r] = min(max(wanted[r], low[r]), high[r])
            break
        for r in list(free):
            limit = low[r] if below > above else high[r]
            if (wanted[r] < limit) if below > above else (wanted[r] > limit):
                result[r] = float(limit)
                left -= limit
                free.remove(r)
    return result


def counts(wanted: Sequence[float], total: int, limits: RankLimits) -> list[int]:
    """Whole samples of each rank, nearest to `wanted` within the limits; their sum is `total`.

    Args:
        wanted: by rank; their sum is about `total`.
        total: a multiple of the limits' `multiple`, between the sums of their least and most.
    """
    units, multiple = limits.units, limits.multiple
    exact = [it / multiple for it in wanted]
    given = [min(max(int(it), low), high) for it, (low, high) in zip(exact, units, strict=True)]
    left = total // multiple - sum(given)
    step = 1 if left > 0 else -1
    for _ in range(abs(left)):
        able = [r for r, (low, high) in enumerate(units) if (given[r] < high if step > 0 else given[r] > low)]
        chosen = max(able, key=lambda r: (step * (exact[r] - given[r]), -r))
        given[chosen] += step
    return [it * multiple for it in given]


def split(paces: Sequence[Pace], size: int, limits: RankLimits, costs: Sequence[float] | None, total: int) -> list[int]:
    """How many samples of a batch each rank gets; the first ones are rank 0's, the next ones rank 1's, and so on.

    Args:
        paces: by rank.
        size: samples of a usual batch.
        limits: of a usual batch.
        costs: the work of each sample; None: 1 each.
        total: samples of this batch.
    """
    limits = limits.for_batch(total, size)
    if costs is None or not any(costs):
        return counts(shares(paces, total, limits.least, limits.most), total, limits)
    work = list(accumulate(costs, initial=0.0))
    none, all_of_it = [0.0] * len(paces), [work[-1]] * len(paces)
    ends = [_samples(work, end) for end in accumulate(shares(paces, work[-1], none, all_of_it))]
    ends[-1] = float(total)
    return counts([end - begin for begin, end in pairwise([0.0, *ends])], total, limits)


def _samples(work: Sequence[float], wanted: float) -> float:
    """How many of the first samples have this work together; between two samples a fraction. `work`: running sums."""
    index = min(max(bisect_left(work, wanted), 1), len(work) - 1)
    before, after = work[index - 1], work[index]
    within = (wanted - before) / (after - before) if after > before else 1.0
    return index - 1 + min(max(within, 0.0), 1.0)
