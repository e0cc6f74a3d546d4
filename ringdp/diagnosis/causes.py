"""The cause for which a rank was slower than the others in a window. Pure: no clock, no file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ringdp.diagnosis.rank_facts import Facts
from ringdp.diagnosis.split import Split
from ringdp.diagnosis.window import Window

KEPT_OFF = 0.1  # of the time that the kernel kept a rank from computing, to be called the cause
MOST = 0.5  # of what a rank takes longer, that its cause explains
_PAGE_WAITS = 1.0  # per step
_BURSTS = 0.8  # of what a rank takes longer that a few steps have
_FEW = 1 / 3  # of the steps
_PARTLY = 0.25  # of what a rank takes longer, that missing cores explain
_IDLE = 0.7  # of a core, below which a rank does not compute all the time that it takes

SLOWS_ALL = ("quota", "memory", "core", "speed")
"""Causes outside the program: all phases are slower."""


@dataclass(frozen=True)
class Cause:
    """The cause of a slow rank: a name of `Verdict.cause`, the reason, and the remedy."""

    name: str
    why: str
    remedy: str


@dataclass(frozen=True)
class Bursts:
    """A few steps have nearly all the time by which a rank takes longer.

    Attributes:
        count: of them.
        steps: that were looked at.
        every: the steps from one to the next; 0: they do not come at regular intervals.
        longer_s: the time by which it takes longer in one of them; the mean.
    """

    count: int
    steps: int
    every: int
    longer_s: float

    def __str__(self) -> str:
        if self.every:
            return f"in every {self.every}{_ORDINALS.get(self.every, 'th')} step"
        return f"in {self.count} of {self.steps} steps"


_ORDINALS = {2: "nd", 3: "rd"}


def bursts_of(excess: Tensor) -> Bursts | None:
    """The bursts of a rank that takes longer than the others by ``[steps]`` seconds; None where it has none."""
    longer = excess.clamp(min=0)
    at = (longer > 0.25 * longer.max()).nonzero().flatten()
    if not 2 <= len(at) <= max(2, _FEW * len(excess)) or float(longer[at].sum()) < _BURSTS * float(longer.sum()):
        return None
    gaps = {int(gap) for gap in at.diff()}
    every = min(gaps) if len(at) > 2 and max(gaps) - min(gaps) == 0 else 0
    return Bursts(len(at), len(excess), every, float(longer[at].mean()))


def causes_of(window: Window, parts: Split, rank: int, phase: str, bursts: Bursts | None = None) -> Iterator[Cause]:
    """The causes for a rank that is slower than the others, most of all in that phase, the likeliest first; at least
    one. The last one stands for what is not known."""
    facts = window.facts[rank]
    rest = [one for other, one in enumerate(window.facts) if other != rank and one.period_s > 0]
    period, host = facts.period_s, facts.host or "its host"
    if period <= 0 or not rest:
        yield Cause("work", "the cause is not known", _less_work(host))
        return

    def share(name: str) -> tuple[float, float]:
        """Of the time, of this rank and of the median of the others."""
        values = sorted(getattr(one, name) / one.period_s for one in rest)
        return getattr(facts, name) / period, values[len(values) // 2]

    step = float(parts.step[rank])
    excess = float(parts.own[rank].sum() - others_of(parts.own.sum(1, keepdim=True))[rank, 0]) / step

    def explains(name: str) -> bool:
        """Most of the time by which the rank is slower."""
        its, others = share(name)
        return its - others >= max(KEPT_OFF, MOST * excess)

    steps = max(period / step, 1.0)
    (throttled, _), (ready, _), (cpu, others_cpu) = share("throttled_s"), share("ready_s"), share("cpu_s")
    waits, others_waits = share("page_waits")
    if explains("throttled_s"):
        yield Cause(
            "quota",
            f"its cgroup was throttled {throttled:.0%} of the time: {describe_quota(facts)}",
            f"raise that quota (cpu.max, or limits.cpu of its pod), or {_less_work(host)}",
        )
    if facts.page_waits / steps >= _PAGE_WAITS and waits > 5 * others_waits:
        yield Cause(
            "memory",
            f"it waited for a disk {facts.page_waits / steps:.0f} times a step, for pages: its memory is too small",
            f"give it more memory on {host} (memory.max, or limits.memory of its pod), or let it have smaller batches",
        )
    if explains("ready_s"):
        yield Cause(
            "core",
            f"for {ready:.0%} of the time other threads had the core that it wanted",
            f"end other programs on {host} (top shows them), or lower OMP_NUM_THREADS where ranks share cores",
        )
    speed = _core_speed(window, rank)
    computed = min(float(parts.own[rank].sum()) / step, cpu)
    if computed * (1 - speed) >= max(KEPT_OFF / 2, MOST * excess):
        yield Cause(
            "speed",
            f"its core computes at {speed:.0%} of the others' speed now, by a loop that all ranks run",
            f"look for what slows that core of {host} (another virtual machine on it, heat, a slower processor), or"
            f" {_less_work(host)}",
        )
    if bursts is not None:
        yield _cause_of_bursts(phase, host)
    if phase == "between":
        yield Cause(
            "data",
            "that is data loading, evaluation or logging",
            f"give its DataLoader more workers, or put the data on a faster disk of {host}",
        )
    own = float(parts.own[rank].sum()) / step
    waited = max(ready, share("threads_ready_s")[0])
    idle = cpu < _IDLE * own and cpu <= 1.5 * others_cpu
    if idle and waited >= max(KEPT_OFF, _PARTLY * excess):
        yield Cause(
            "core",
            f"it used a core for {cpu:.0%} of the time, and other threads had it for {waited:.0%}",
            f"end other programs on {host} (top shows them), or lower OMP_NUM_THREADS where ranks share cores",
        )
    if idle:
        yield Cause(
            "sleep",
            f"it used a core for {cpu:.0%} of the time, so it waits or sleeps for the rest",
            f"look for what it waits for there: a lock, a file, a request (py-spy dump --pid on {host} shows it)",
        )
    yield Cause("work", "it computes all that time", _less_work(host))


def _cause_of_bursts(phase: str, host: str) -> Cause:
    if phase in ("between", "after"):
        return Cause(
            "bursts",
            "it writes a checkpoint, evaluates, logs or loads data",
            f"write checkpoints in a thread or less often, share the work among the ranks, or put the files on a faster"
            f" disk of {host}",
        )
    return Cause(
        "bursts",
        "the other steps take as long as the others'",
        "look for what some of its steps have more: longer batches, garbage collection, new shapes",
    )


def _core_speed(window: Window, rank: int) -> float:
    """Of this rank's core, as a share of the median of the others'; 1 where it is not known."""
    took = window.field("probe").mean(1)
    others = others_of(took[:, None])[rank, 0]
    return float(others / took[rank]) if float(took[rank]) > 0 and float(others) > 0 else 1.0


def _less_work(host: str) -> str:
    return f"give it less work, by ringdp.data.BalancedSampler, or run it elsewhere than on {host}"


def others_of(values: Tensor) -> Tensor:
    """``[ranks, steps]``: the median over all other ranks."""
    ranks = values.shape[0]
    rest = [[other for other in range(ranks) if other != rank] for rank in range(ranks)]
    return torch.stack([values[others].median(0).values for others in rest])


def describe_quota(facts: Facts) -> str:
    return f"its quota is {facts.quota_cores:.3g} CPUs" if facts.quota_cores > 0 else "its CPU quota is too small"
