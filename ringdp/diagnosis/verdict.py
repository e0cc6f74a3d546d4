"""Which rank, link or setting the steps of a window lost time to, and what to do about it. Pure: no clock, no file."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ringdp.ddp.words import format_size, format_time
from ringdp.diagnosis.remedies import Sent, remedy_for_communication
from ringdp.diagnosis.split import Split
from ringdp.diagnosis.window import OWN, Window

COSTLY = 0.2  # of a step: from here on communication is worth a line
_LEAST_LOSS = 0.1  # of the steps that a rank must cost to be named
_ERRORS = 4.0  # standard errors of the mean by which a slow rank differs from chance
_ALMOST_ALL = 0.95  # of the loss that a rank causes which is slow now and then
_KEPT_OFF = 0.1  # of the time that the kernel kept a rank from computing, to be called the cause
_MOST = 0.5  # of what a rank takes longer, that its cause explains
_PAGE_WAITS = 1.0  # per step
_IDLE = 0.7  # of a core, below which a rank does not compute all the time that it takes
_SLOWS_ALL = ("quota", "memory", "core")  # causes outside the program: all phases are slower
_SLOW_LINK = 0.5  # of the other links' rate
_LEAST_BUSY = 0.3  # of the communication's time that the slow link was busy
_LEAST_LINK_BYTES = 100_000

PHASES = dict(zip(OWN, ("the time between steps", "its forward", "its backward", "its optimizer"), strict=True))
"""The phases of a step in words."""


@dataclass(frozen=True)
class Verdict:
    """What costs most.

    Attributes:
        kind: "none", "rank" (it is slower than the others), "link", "communication" (no rank or link stands out), or
            "uneven" (ranks take turns in being slow).
        cost: the share of the steps that is lost to it.
        text: what it is, in words.
        remedy: what helps; empty for "none".
        rank: the slow one, or the sender of the slow link; None where none is named.
        peer: the receiver of the slow link.
        phase: one of `OWN`, of a slow rank.
        cause: what keeps a slow rank: "quota", "memory", "core", "data", "sleep" or "work".
    """

    kind: str
    cost: float
    text: str
    remedy: str = ""
    rank: int | None = None
    peer: int | None = None
    phase: str | None = None
    cause: str | None = None

    def same_as(self, other: Verdict | None) -> bool:
        """Whether both name the same, with other numbers maybe."""
        names = ("kind", "rank", "peer", "phase", "cause")
        return other is not None and all(getattr(self, name) == getattr(other, name) for name in names)

    def __str__(self) -> str:
        return self.text + (f" Remedy: {self.remedy}." if self.remedy else "")


def judge(window: Window, parts: Split, sent: Sent) -> Verdict:
    """What cost most in the window. `sent`: of a step of one rank."""
    if window.ranks == 1 or window.rows.shape[1] < 3:
        return Verdict("none", 0.0, "There is nothing to compare.")
    found = _slow_rank(window, parts)
    if found is not None:
        return found
    step = float(parts.step.mean())
    share = float(parts.communication.median()) / step if step > 0 else 0.0
    if share >= COSTLY:
        return _slow_link(window, parts, share) or remedy_verdict(parts, sent, share)
    if parts.cost >= COSTLY:
        return Verdict(
            "uneven",
            parts.cost,
            f"Ranks take turns in being the slowest, and the others wait {format_time(parts.cost * step)} a step.",
            "look for what stops ranks now and then: batches of very different length, other programs, a busy disk",
        )
    return Verdict("none", parts.cost, "Communication costs little.")


def remedy_verdict(parts: Split, sent: Sent, share: float) -> Verdict:
    seconds = share * float(parts.step.mean())
    text = (
        f"Communication of {format_size(sent.bytes)} of gradients is exposed for {format_time(seconds)} a step:"
        " no rank and no link is slower than the others."
    )
    return Verdict("communication", share, text, remedy_for_communication(parts, sent))


# A slow rank.


def _slow_rank(window: Window, parts: Split) -> Verdict | None:
    own = torch.stack([window.field(name) for name in OWN]).sum(0)
    step = float(parts.step.mean())
    excess = own - _others(own)
    lost = own.amax(0) - own.median(0).values
    kept = lost != lost.max() if lost.numel() > 3 else torch.ones_like(lost, dtype=torch.bool)
    excess, slowest, lost = excess[:, kept], own.argmax(0)[kept], lost[kept]  # one step alone says nothing
    if excess.shape[1] < 2 or step <= 0:
        return None
    mean = excess.mean(1)
    error = excess.std(1) / excess.shape[1] ** 0.5
    rank = int(mean.argmax())
    loss = float(lost.mean()) / step
    own_loss = float(lost[slowest == rank].sum()) / max(float(lost.sum()), 1e-12)
    always = float(mean[rank]) >= 0.5 * float(lost.mean()) and float(mean[rank]) >= _ERRORS * float(error[rank])
    often = own_loss >= _ALMOST_ALL and loss >= 2 * _LEAST_LOSS and int((lost > 0.5 * step * loss).sum()) > 1
    if loss < _LEAST_LOSS or not (always or often):
        return None
    return _describe_slow_rank(window, parts, rank, loss)


def _others(values: Tensor) -> Tensor:
    """``[ranks, steps]``: the median over all other ranks."""
    ranks = values.shape[0]
    rest = [[other for other in range(ranks) if other != rank] for rank in range(ranks)]
    return torch.stack([values[others].median(0).values for others in rest])


def _describe_slow_rank(window: Window, parts: Split, rank: int, loss: float) -> Verdict:
    excess = (parts.own - _others(parts.own))[rank]
    phase = OWN[int(excess.argmax())]
    cause, why, remedy = _cause(window, parts, rank, phase)
    if cause in _SLOWS_ALL:
        its, others, what = (
            parts.own[rank].sum(),
            _others(parts.own.sum(1, keepdim=True))[rank, 0],
            "a step of its own work",
        )
    else:
        column = OWN.index(phase)
        its, others, what = parts.own[rank, column], _others(parts.own)[rank, column], PHASES[phase]
    text = (
        f"{_name(window, rank)} is slow: {what} takes {format_time(float(its))},"
        f" the others' {format_time(float(others))}; {why}. The others wait for it for {loss:.0%} of the step."
    )
    return Verdict("rank", loss, text, remedy, rank=rank, phase=phase, cause=cause)


def _cause(window: Window, parts: Split, rank: int, phase: str) -> tuple[str, str, str]:
    """What keeps a slow rank, why that is said, and the remedy."""
    facts = window.facts[rank]
    rest = [one for other, one in enumerate(window.facts) if other != rank and one.period_s > 0]
    period, host = facts.period_s, facts.host or "its host"
    if period <= 0 or not rest:
        return "work", "what keeps it is not known", _less_work(host)

    def share(name: str) -> tuple[float, float]:
        """Of the time, of this rank and of the median of the others."""
        values = sorted(getattr(one, name) / one.period_s for one in rest)
        return getattr(facts, name) / period, values[len(values) // 2]

    step = float(parts.step[rank])
    excess = float(parts.own[rank].sum() - _others(parts.own.sum(1, keepdim=True))[rank, 0]) / step

    def explains(name: str) -> bool:
        """Most of what the rank takes longer."""
        its, others = share(name)
        return its - others >= max(_KEPT_OFF, _MOST * excess)

    steps = max(period / step, 1.0)
    (throttled, _), (ready, _), (cpu, others_cpu) = share("throttled_s"), share("ready_s"), share("cpu_s")
    waits, others_waits = share("page_waits")
    if explains("throttled_s"):
        return (
            "quota",
            f"the CPU quota of its cgroup stopped its threads for {throttled:.2g} s of each second",
            f"give it the same CPU quota as the others (cpu.max, or limits.cpu of its pod), or {_less_work(host)}",
        )
    if facts.page_waits / steps >= _PAGE_WAITS and waits > 5 * others_waits:
        return (
            "memory",
            f"it waited for a disk {facts.page_waits / steps:.0f} times a step, for pages: its memory is too small",
            f"give it more memory on {host} (memory.max, or limits.memory of its pod), or let it have smaller batches",
        )
    if explains("ready_s"):
        return (
            "core",
            f"for {ready:.0%} of the time other threads had the core that it wanted",
            f"end what else computes on {host} (top shows it), or lower OMP_NUM_THREADS where ranks share cores",
        )
    if phase == "between":
        return (
            "data",
            "that is data loading, evaluation or logging",
            f"give its DataLoader more workers, or put the data on a faster disk of {host}",
        )
    own = float(parts.own[rank].sum()) / step
    if cpu < _IDLE * own and cpu <= 1.5 * others_cpu:
        return (
            "sleep",
            f"it used a core for {cpu:.0%} of the time, so it waits or sleeps for the rest",
            f"look for what it waits for there: a lock, a file, a request (py-spy dump --pid on {host} shows it)",
        )
    return "work", "it computes all that time", _less_work(host)


def _less_work(host: str) -> str:
    return f"give it less work, by ringdp.data.BalancedSampler, or run it elsewhere than on {host}"


def _name(window: Window, rank: int) -> str:
    host = window.facts[rank].host
    return f"Rank {rank} (host {host})" if host else f"Rank {rank}"


# A slow link.


def _slow_link(window: Window, parts: Split, share: float) -> Verdict | None:
    """The slowest of the ranks' busiest links, if the others' carry at least twice as much a second."""
    rates = {
        rank: facts.rate
        for rank, facts in enumerate(window.facts)
        if facts.link_to >= 0 and facts.link_bytes >= _LEAST_LINK_BYTES and facts.rate > 0
    }
    if len(rates) < 2:
        return None
    usual = sorted(rates.values())[-(len(rates) // 2 or 1)]
    slow = [rank for rank, rate in rates.items() if rate <= _SLOW_LINK * usual and _busy(window, parts, rank)]
    if not slow:
        return None
    rank = min(slow, key=lambda one: rates[one])
    peer = window.facts[rank].link_to
    seconds = share * float(parts.step.mean())
    speed = f"{rates[rank] / 1e6:.3g} MB/s, the others' {usual / 1e6:.3g} MB/s"
    # A host whose card or cable is slow has two slow links, in and out.
    ends = {rank, peer}
    shared = [
        one for one in ends if any(one in (other, window.facts[other].link_to) for other in slow if other != rank)
    ]
    where = (
        f" All slow links end at rank {shared[0]} (host {window.facts[shared[0]].host})." if len(shared) == 1 else ""
    )
    named = window.facts[shared[0] if len(shared) == 1 else rank].host
    text = (
        f"The link from rank {rank} (host {window.facts[rank].host}) to rank {peer} (host {window.facts[peer].host})"
        f" is slow: {speed}.{where} The step waits {format_time(seconds)} for communication."
    )
    remedy = (
        f"look at the network of host {named} (ethtool shows the speed of its card; RINGDP_IFACE chooses another), or"
        " send less over it: compression='int8'"
    )
    return Verdict("link", share, text, remedy, rank=rank, peer=peer)


def _busy(window: Window, parts: Split, rank: int) -> bool:
    facts = window.facts[rank]
    waited = float(parts.communication[rank] / parts.step[rank])
    return facts.link_busy_s >= _LEAST_BUSY * waited * facts.period_s
