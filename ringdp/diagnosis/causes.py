"""The cause for which a rank was slower than the others in a window. Pure: no clock, no file."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ringdp.diagnosis.rank_facts import Facts
from ringdp.diagnosis.split import Split
from ringdp.diagnosis.window import Window

KEPT_OFF = 0.1  # of the time that the kernel kept a rank from computing, to be called the cause
MOST = 0.5  # of what a rank takes longer, that its cause explains
_PAGE_WAITS = 1.0  # per step
_IDLE = 0.7  # of a core, below which a rank does not compute all the time that it takes

SLOWS_ALL = ("quota", "memory", "core", "speed")
"""Causes outside the program: all phases are slower."""


@dataclass(frozen=True)
class Cause:
    """The cause of a slow rank: a name of `Verdict.cause`, the reason, and the remedy."""

    name: str
    why: str
    remedy: str


def cause_of(window: Window, parts: Split, rank: int, phase: str) -> Cause:
    """The cause for a rank that is slower than the others, most of all in that phase."""
    facts = window.facts[rank]
    rest = [one for other, one in enumerate(window.facts) if other != rank and one.period_s > 0]
    period, host = facts.period_s, facts.host or "its host"
    if period <= 0 or not rest:
        return Cause("work", "the cause is not known", _less_work(host))

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
        return Cause(
            "quota",
            f"its cgroup was throttled {throttled:.0%} of the time: {describe_quota(facts)}",
            f"raise that quota (cpu.max, or limits.cpu of its pod), or {_less_work(host)}",
        )
    if facts.page_waits / steps >= _PAGE_WAITS and waits > 5 * others_waits:
        return Cause(
            "memory",
            f"it waited for a disk {facts.page_waits / steps:.0f} times a step, for pages: its memory is too small",
            f"give it more memory on {host} (memory.max, or limits.memory of its pod), or let it have smaller batches",
        )
    if explains("ready_s"):
        return Cause(
            "core",
            f"for {ready:.0%} of the time other threads had the core that it wanted",
            f"end other programs on {host} (top shows them), or lower OMP_NUM_THREADS where ranks share cores",
        )
    speed = _core_speed(window, rank)
    computed = min(float(parts.own[rank].sum()) / step, cpu)
    if computed * (1 - speed) >= max(KEPT_OFF / 2, MOST * excess):
        return Cause(
            "speed",
            f"its core computes at {speed:.0%} of the others' speed now, by a loop that all ranks run",
            f"look for what slows that core of {host} (another virtual machine on it, heat, a slower processor), or"
            f" {_less_work(host)}",
        )
    if phase == "between":
        return Cause(
            "data",
            "that is data loading, evaluation or logging",
            f"give its DataLoader more workers, or put the data on a faster disk of {host}",
        )
    own = float(parts.own[rank].sum()) / step
    if cpu < _IDLE * own and cpu <= 1.5 * others_cpu:
        return Cause(
            "sleep",
            f"it used a core for {cpu:.0%} of the time, so it waits or sleeps for the rest",
            f"look for what it waits for there: a lock, a file, a request (py-spy dump --pid on {host} shows it)",
        )
    return Cause("work", "it computes all that time", _less_work(host))


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
