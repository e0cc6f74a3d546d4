"""The code of each bucket, chosen from measurements: pure functions, with the same result on all ranks.

Time is modelled bucket by bucket: a bucket leaves when it is full and the one before has arrived, and takes the time of
its code for its number of elements. The step waits for buckets that arrive after the last gradient was computed. The
model proposes a choice; the steps with it are then measured, and a choice that is not as much faster as promised is
taken back (`Tuner`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

EXACT = "exact"

HIDDEN = 0.03  # of a step: less waiting than that is not worth a lossy code
GAIN = 0.05  # what a lossier choice must promise
KEPT = 0.5  # of the promise that must be kept, where that is less than GAIN; and at least
LEAST_GAIN = 0.02
MILDER = 0.01  # what a milder choice may cost, by the model
SLOWER = 0.03  # and as measured
SAME = 1.25  # links within that factor have not changed
DRIFT = 1.25  # steps within that factor are as they were
PROBE_SHARE = 0.005  # of the run that measuring links may take
FIRST_BLOCK = 100  # steps that a code is not tried again after it broke its promise; doubles each time


@dataclasses.dataclass(frozen=True)
class Line:
    """Seconds of an all-reduce: ``fixed_s + numel * element_s``."""

    fixed_s: float
    element_s: float

    @classmethod
    def through(cls, small: tuple[int, float], large: tuple[int, float]) -> Line:
        """Two measurements of (elements, seconds)."""
        slope = max((large[1] - small[1]) / (large[0] - small[0]), 0.0)
        return cls(max(small[1] - slope * small[0], 0.0), slope)

    def seconds(self, numel: int) -> float:
        return self.fixed_s + numel * self.element_s


@dataclasses.dataclass(frozen=True)
class LinkCosts:
    """The present costs of codes.

    Attributes:
        lines: of an all-reduce, by level, `EXACT` among them.
        coding: seconds per element that encoding and decoding take from the gradients' computation, where all cores are
            busy; 0 where there are cores to spare.
    """

    lines: Mapping[str, Line]
    coding: Mapping[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Bucket:
    """Attributes:
    numel: elements.
    launched_s: when it leaves, from the first bucket's launch on.
    free: whether its code may be chosen.
    """

    numel: int
    launched_s: float
    free: bool = True


@dataclasses.dataclass(frozen=True)
class Step:
    """Medians over the last few steps.

    Attributes:
        seconds: from one forward to the next.
        exposed_s: how long the end of backward waited for communication.
        computed_s: the last gradient, from the first bucket's launch on.
        buckets: in the order they leave.
    """

    seconds: float
    exposed_s: float
    computed_s: float
    buckets: tuple[Bucket, ...]


Choice = tuple[str, ...]
"""A level for each bucket."""


def exposed(step: Step, costs: LinkCosts, choice: Choice) -> float:
    """Seconds that the end of backward would wait."""
    now = 0.0
    for bucket, level in zip(step.buckets, choice, strict=True):
        now = max(now, bucket.launched_s) + costs.lines[level].seconds(bucket.numel)
    return max(now - step.computed_s, 0.0)


def predicted(step: Step, costs: LinkCosts, choice: Choice, current: Choice) -> float:
    """Seconds of a step with `choice`, given what one with `current` was measured to take."""
    modelled, would = exposed(step, costs, current), exposed(step, costs, choice)
    if modelled > 0:
        would *= min(max(step.exposed_s / modelled, 0.5), 2.0)  # the model's error, as far as it is known
    coding = sum(
        bucket.numel * (costs.coding.get(level, 0.0) - costs.coding.get(before, 0.0))
        for bucket, level, before in zip(step.buckets, choice, current, strict=True)
    )
    return step.seconds - step.exposed_s + would + coding


def proposal(
    step: Step, costs: LinkCosts, levels: Sequence[str], current: Choice, blocked: frozenset[str] = frozenset()
) -> tuple[Choice, float]:
    """The next choice, and the seconds a step it promises to save; `current` where no change is worth it.

    The mildest code for all buckets that comes close to the fastest; then, from the first bucket on, still milder ones
    where that costs nothing.

    Args:
        levels: what is allowed beside `EXACT`, from mild to lossy.
        blocked: levels that are not to be tried now.
    """
    order = [EXACT, *(level for level in levels if level not in blocked or level in current)]
    rank = {level: i for i, level in enumerate([EXACT, *levels])}

    def uniform(level: str) -> Choice:
        return tuple(level if bucket.free else EXACT for bucket in step.buckets)

    now = predicted(step, costs, current, current)
    times = {level: predicted(step, costs, uniform(level), current) for level in order}
    target = min(times.values()) * (1 + MILDER)
    level = next(level for level in order if times[level] <= target)
    choice = list(uniform(level))
    for i, bucket in enumerate(step.buckets):
        for milder in order[: order.index(level)] if bucket.free else []:
            before, choice[i] = choice[i], milder
            if predicted(step, costs, tuple(choice), current) <= target:
                break
            choice[i] = before
    found = tuple(choice)
    promise = predicted(step, costs, found, current)
    milder_everywhere = all(rank[new] <= rank[old] for new, old in zip(found, current, strict=True))
    if found != current and (promise <= now * (1 - GAIN) or (milder_everywhere and promise <= now * (1 + MILDER))):
        return found, promise
    return current, now


@dataclasses.dataclass
class Trial:
    before: Choice
    seconds: float  # of a step before
    promise: float
    lossier: bool


class Tuner:
    """The decision after each window of steps. It has no clock and no network: its caller measures, with the same
    numbers on all ranks.

    Attributes:
        choice: of each bucket; what the next steps are to use.
        wants_probe: the links are to be measured, and `measured` called.
        reason: the reason of the last change of `choice`; empty where there was none.
    """

    def __init__(self, levels: Sequence[str], buckets: int) -> None:
        self.levels: tuple[str, ...] = tuple(levels)
        self.choice: Choice = (EXACT,) * buckets
        self.wants_probe: bool = False
        self.reason: str = ""
        self._decided: LinkCosts | None = None  # what the last decision rested on
        self._step: Step | None = None
        self._usual: float | None = None  # seconds of a step with this choice
        self._drifting = False
        self._trial: Trial | None = None
        self._blocked: dict[str, int] = {}  # steps to go
        self._strikes: dict[str, int] = {}
        self._since_probe_s = math.inf
        self._probe_s = 0.0

    def window(self, step: Step, steps: int) -> None:
        """Take the medians of the steps since the last call, and how many these were."""
        self.reason = ""
        self.wants_probe = False
        self._step = step
        self._since_probe_s += step.seconds * steps
        if any(left <= steps for left in self._blocked.values()):
            self._decided = None  # it may be tried again
        self._blocked = {level: left - steps for level, left in self._blocked.items() if left > steps}
        if self._trial is not None:
            self._judge(self._trial, step)
            return
        if not self.levels or not any(bucket.free for bucket in step.buckets):
            return
        drifted = self._usual is not None and not 1 / DRIFT <= step.seconds / self._usual <= DRIFT
        if drifted and not self._drifting:
            self._drifting = True  # this window may have been half before and half after what happened: look again
            return
        self._drifting = False
        if self._usual is None or drifted:
            self._usual = step.seconds
            self._decided = None
        if set(self.choice) == {EXACT} and step.exposed_s < HIDDEN * step.seconds:
            return
        due = self._probe_s / PROBE_SHARE
        self.wants_probe = self._since_probe_s >= (due / 10 if drifted else due)

    def measured(self, costs: LinkCosts, probe_s: float) -> None:
        """The links were measured, which took so long."""
        assert self._step is not None
        self._probe_s, self._since_probe_s = probe_s, 0.0
        self.wants_probe = False
        if self._decided is not None and not self._blocked and not changed(self._decided, costs):
            return
        if self._decided is not None and changed(self._decided, costs):
            self._blocked.clear()
            self._strikes.clear()
        self._decided = costs
        found, promise = proposal(self._step, costs, self.levels, self.choice, frozenset(self._blocked))
        if found == self.choice:
            return
        order = [EXACT, *self.levels]
        lossier = any(order.index(new) > order.index(old) for new, old in zip(found, self.choice, strict=True))
        self.reason = (
            f"{format_choice(found)} instead of {format_choice(self.choice)}: {format_speed(costs)},"
            f" {self._step.exposed_s * 1e3:.0f} of {self._step.seconds * 1e3:.0f} ms a step waited for the network,"
            f" {promise * 1e3:.0f} ms are expected"
        )
        self._trial = Trial(self.choice, self._step.seconds, promise, lossier)
        self.choice = found

    def _judge(self, trial: Trial, step: Step) -> None:
        self._trial = None
        if trial.lossier:
            half = KEPT * (trial.seconds - trial.promise)
            wanted = trial.seconds - max(min(half, GAIN * trial.seconds), LEAST_GAIN * trial.seconds)
        else:
            wanted = trial.seconds * (1 + SLOWER)
        if step.seconds <= wanted:
            self._usual = step.seconds
            return
        self.reason = (
            f"back to {format_choice(trial.before)}: with {format_choice(self.choice)} a step took"
            f" {step.seconds * 1e3:.0f} ms, before {trial.seconds * 1e3:.0f}"
        )
        if trial.lossier:
            for level in set(self.choice) - set(trial.before):
                self._strikes[level] = self._strikes.get(level, 0) + 1
                self._blocked[level] = FIRST_BLOCK * 2 ** (self._strikes[level] - 1)
        self.choice = trial.before
        self._usual = trial.seconds


def changed(before: LinkCosts, now: LinkCosts) -> bool:
    """Whether a link became faster or slower by more than a factor of `SAME`."""
    a, b = before.lines[EXACT].element_s, now.lines[EXACT].element_s
    return max(a, b) > SAME * max(min(a, b), 1e-15)


def format_choice(choice: Choice) -> str:
    """ "all 5 buckets exact", "3 buckets int8, 2 exact"."""
    counts: dict[str, int] = {}
    for level in choice:
        counts[level] = counts.get(level, 0) + 1
    if len(counts) == 1:
        return f"{next(iter(counts))} for all buckets"
    return ", ".join(f"{level} for {count}" for level, count in sorted(counts.items(), key=lambda it: -it[1]))


def format_speed(costs: LinkCosts) -> str:
    """The rate at which exact gradients are averaged, as text."""
    per_element = costs.lines[EXACT].element_s
    return f"float32 is averaged at {32e-9 / per_element:.2f} Gbit/s" if per_element > 0 else "the network is fast"
