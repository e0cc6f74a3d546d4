"""Which bucket sizes are tried with ``bucket_cap_mb="auto"``, when, and which are kept: decisions only.

No clock, no network: all ranks ask the same with the same numbers, so they get the same answers. First all layouts have
short blocks of steps in turns; then the best of them has longer ones in turns with the default, which stays unless the
other one is faster both times.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from ringdp.text import format_size, format_time

CLEAR = 0.03  # of a step: what another layout than the default must save, both times
BLOCK_STEPS = 4
_SKIPPED = 1  # of them: memory is allocated
_ROUNDS = 3  # of the first turns
_PAIRS = 6  # of blocks, of the second ones; and
_PAIRS_WON = 5  # in so many the other layout must be faster
_ERRORS = 2.0  # and by so many standard errors of the difference of the two medians

_FACTORS = (("the default size", 1.0), ("a quarter of the default size", 0.25), ("four times the default size", 4.0))


@dataclasses.dataclass(frozen=True)
class Layout:
    """Attributes:
    name: in words.
    caps_bytes: of the first, second, … bucket, the last one for all others; empty: one bucket.
    """

    name: str
    caps_bytes: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(map(format_size, self.caps_bytes))})" if self.caps_bytes else self.name


def layouts(default_caps_bytes: Sequence[int]) -> tuple[Layout, ...]:
    """What is tried, the default first."""
    scaled = (Layout(name, tuple(max(1, int(cap * factor)) for cap in default_caps_bytes)) for name, factor in _FACTORS)
    return (*scaled, Layout("one bucket", ()))


@dataclasses.dataclass(frozen=True)
class _Block:
    layout: int
    steps: tuple[int, ...]  # that count


class Trial:
    """Of some layouts, the default being the first. Steps are numbered as the reducer counts them.

    Args:
        tried: the layouts.
        steps: that are over.

    Attributes:
        chosen: the layout to stay with; None: not known yet.
        reason: why, in words.
    """

    def __init__(self, tried: Sequence[Layout], steps: int) -> None:
        self.chosen: int | None = None
        self.reason: str = ""
        self._layouts = tuple(tried)
        self._best = 0
        self._costs: dict[int, float] = {}
        if len(self._layouts) == 1:
            self._keep(0, "all sizes give the same buckets")
            return
        order = range(len(self._layouts))
        self._lay_out(
            [layout for turn in range(_ROUNDS) for layout in (order if turn % 2 == 0 else order[::-1])], steps
        )

    def layout_after(self, steps: int) -> int:
        """What the step that follows so many has."""
        if self.chosen is not None:
            return self.chosen
        block = (steps - self._first) // BLOCK_STEPS
        return self._blocks[block].layout if 0 <= block < len(self._blocks) else 0

    def heard(self, costs: Mapping[int, float], steps: int) -> None:
        """What some steps took, in seconds, by their numbers; so many are over."""
        if self.chosen is not None:
            return
        self._costs.update(costs)
        if max(self._costs, default=0) < self._first + len(self._blocks) * BLOCK_STEPS:
            return
        if any(not self._counted(block) for block in self._blocks):
            self._keep(0, "not all layouts were measured")
        elif self._best == 0:
            self._look_for_best(steps)
        else:
            self._judge_best()

    def give_up(self, reason: str) -> None:
        """Stay with the default."""
        self._keep(0, reason)

    def _lay_out(self, order: Sequence[int], steps: int) -> None:
        self._first, self._blocks = steps, []
        for turn, layout in enumerate(order):
            first = steps + 1 + turn * BLOCK_STEPS
            self._blocks.append(_Block(layout, tuple(range(first + _SKIPPED, first + BLOCK_STEPS))))

    def _counted(self, block: _Block) -> list[float]:
        return [self._costs[step] for step in block.steps if step in self._costs]

    def _costs_of(self, layout: int) -> list[float]:
        return [cost for block in self._blocks if block.layout == layout for cost in self._counted(block)]

    def _look_for_best(self, steps: int) -> None:
        medians = [statistics.median(self._costs_of(layout)) for layout in range(len(self._layouts))]
        best = min(range(1, len(medians)), key=medians.__getitem__)
        if medians[best] > (1 - CLEAR) * medians[0]:
            self._keep_default(best, medians[0], medians[best])
            return
        self._best = best
        self._lay_out([layout for pair in range(_PAIRS) for layout in ((0, best) if pair % 2 else (best, 0))], steps)

    def _judge_best(self) -> None:
        default, other = (statistics.median(self._costs_of(layout)) for layout in (0, self._best))
        error = math.hypot(*(_error_of_median(self._costs_of(layout)) for layout in (0, self._best)))
        won = 0
        for pair in range(_PAIRS):
            first, second = (self._blocks[2 * pair + i] for i in (0, 1))
            ours, usual = (first, second) if first.layout == self._best else (second, first)
            won += statistics.median(self._counted(ours)) < statistics.median(self._counted(usual))
        if default - other < max(CLEAR * default, _ERRORS * error) or won < _PAIRS_WON:
            self._keep_default(self._best, default, other)
            return
        self._keep(self._best, f"a step takes {format_time(other)}, {format_time(default)} with the default size")

    def _keep_default(self, best: int, default_s: float, best_s: float) -> None:
        self._keep(
            0,
            f"no other is clearly faster: a step takes {format_time(default_s)},"
            f" {format_time(best_s)} with {self._layouts[best].name}",
        )

    def _keep(self, layout: int, reason: str) -> None:
        self.chosen, self.reason = layout, reason


def _error_of_median(values: Sequence[float]) -> float:
    """Its standard error, as that of a normal distribution with these quartiles."""
    quartiles = statistics.quantiles(values, n=4)
    return 1.253 * (quartiles[2] - quartiles[0]) / 1.349 / math.sqrt(len(values))
