"""Which rank, link or setting the steps of a window lost time to, and what to do about it. Pure: no clock, no file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ringdp.ddp.words import format_size, format_time
from ringdp.diagnosis.facts import Facts
from ringdp.diagnosis.remedies import Sent, remedy_for_communication
from ringdp.diagnosis.split import Split
from ringdp.diagnosis.window import OWN, Window

COSTLY = 0.2  # of a step: from here on communication is worth a line
_LEAST_LOSS = 0.1  # of the steps that a rank must cost to be named
_ERRORS = 4.0  # standard errors of the mean by which a slow rank differs from chance
_ALMOST_ALL = 0.95  # of the loss that a rank causes which is slow now and then
_KEPT_OFF = 0.1  # of the time that the kernel kept a rank from computing, to be called the cause
_SHARES_CORE = 0.25  # of its steps that a rank was without a core, from which its host is named
_MOST_TOLD = 4  # ranks
_MOST = 0.5  # of what a rank takes longer, that its cause explains
_PAGE_WAITS = 1.0  # per step
_IDLE = 0.7  # of a core, below which a rank does not compute all the time that it takes
_SLOWS_ALL = ("quota", "memory", "core", "speed")  # causes outside the program: all phases are slower
_SLOW_LINK = 0.5  # of the other links' rate
_LEAST_BUSY = 0.3  # of the communication's time that the slow link was busy
_LEAST_LINK_BYTES = 100_000

PHASES = dict(zip(OWN, ("the time between steps", "its forward", "its backward", "its optimizer"), strict=True))
"""The phases of a step in words."""


@dataclass(frozen=True)
class Verdict:
    """What costs most.

    Attributes:
        kind: "none", "rank" (it is slower than the others), "link", "host" (ranks do not get the cores that they want),
            "communication" (no rank or link stands out), or "uneven" (ranks take turns in being slow).
        cost: the share of the steps that is lost to it.
        text: what it is, in words.
        remedy: what helps; empty for "none".
        rank: the slow one, or the sender of the slow link; None where none is named.
        peer: the receiver of the slow link.
        phase: one of `OWN`, of a slow rank.
        cause: what keeps a slow rank: "quota", "memory", "core", "speed", "data", "sleep" or "work"; of "host"
            "quota" or "core".
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


def judge(window: Window, parts: Split, sent: Callable[[], Sent]) -> Verdict:
    """What cost most in the window. `sent`: of a step of one rank; it is called where it is needed."""
    if window.ranks == 1 or window.rows.shape[1] < 3:
        return Verdict("none", 0.0, "There is nothing to compare.")
    found = _slow_rank(window, parts)
    if found is not None:
        return found
    step = float(parts.step.mean())
    share = float(parts.communication.median()) / step if step > 0 else 0.0
    if share >= COSTLY and (link := _slow_link(window, parts, share)) is not None:
        return link
    kept = _kept_ranks(window)
    if kept is not None and kept.cost >= share:
        return kept
    if share >= COSTLY:
        return remedy_verdict(parts, sent(), share)
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


@dataclass(frozen=True)
class _Slow:
    """A rank that computes longer than the others, in a way that is not chance."""

    rank: int
    loss: float  # the share of a step that the others wait for it


def _slow_rank(window: Window, parts: Split) -> Verdict | None:
    own = torch.stack([window.field(name) for name in OWN]).sum(0)
    step = float(parts.step.mean())
    slow = _slowest(own, step)
    if slow is None:
        return None
    phase = OWN[int((parts.own - _others(parts.own))[slow.rank].argmax())]
    cause = _cause(window, parts, slow.rank, phase)
    if cause.name in _SLOWS_ALL:
        return (
            None
            if _others_have_it(window, slow.rank, cause.name)
            else _describe_slow_rank(window, parts, slow, phase, cause)
        )
    # Is it slower by what it does, too, or only by the cores that it did not get? Then a phase is hit by chance.
    by_itself = _slowest(own - window.field("off_core"), step)
    if by_itself is not None and by_itself.rank == slow.rank:
        return _describe_slow_rank(window, parts, slow, phase, cause)
    return None


def _others_have_it(window: Window, rank: int, cause: str) -> bool:
    """Whether half of the other ranks are kept from computing nearly as much: then `_kept_ranks` names all."""
    field = {"quota": "throttled_s", "core": "ready_s"}.get(cause)
    if field is None:
        return False
    shares = [getattr(one, field) / one.period_s if one.period_s > 0 else 0.0 for one in window.facts]
    others = sorted(shares[:rank] + shares[rank + 1 :])
    return others[len(others) // 2] >= _MOST * shares[rank]


def _slowest(own: Tensor, step: float) -> _Slow | None:
    """Of the ranks' work in each step ``[ranks, steps]``, and a step's time."""
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
    return _Slow(rank, loss)


def _others(values: Tensor) -> Tensor:
    """``[ranks, steps]``: the median over all other ranks."""
    ranks = values.shape[0]
    rest = [[other for other in range(ranks) if other != rank] for rank in range(ranks)]
    return torch.stack([values[others].median(0).values for others in rest])


@dataclass(frozen=True)
class _Cause:
    """What keeps a slow rank: a name of `Verdict.cause`, why that is said, and the remedy."""

    name: str
    why: str
    remedy: str


def _describe_slow_rank(window: Window, parts: Split, slow: _Slow, phase: str, cause: _Cause) -> Verdict:
    rank = slow.rank
    if cause.name in _SLOWS_ALL:
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
        f" the others' {format_time(float(others))}; {cause.why}."
        f" The others wait for it for {slow.loss:.0%} of the step."
    )
    return Verdict("rank", slow.loss, text, cause.remedy, rank=rank, phase=phase, cause=cause.name)


def _cause(window: Window, parts: Split, rank: int, phase: str) -> _Cause:
    facts = window.facts[rank]
    rest = [one for other, one in enumerate(window.facts) if other != rank and one.period_s > 0]
    period, host = facts.period_s, facts.host or "its host"
    if period <= 0 or not rest:
        return _Cause("work", "what keeps it is not known", _less_work(host))

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
        return _Cause(
            "quota",
            f"its cgroup was throttled {throttled:.0%} of the time: {_quota_in_words(facts)}",
            f"raise that quota (cpu.max, or limits.cpu of its pod), or {_less_work(host)}",
        )
    if facts.page_waits / steps >= _PAGE_WAITS and waits > 5 * others_waits:
        return _Cause(
            "memory",
            f"it waited for a disk {facts.page_waits / steps:.0f} times a step, for pages: its memory is too small",
            f"give it more memory on {host} (memory.max, or limits.memory of its pod), or let it have smaller batches",
        )
    if explains("ready_s"):
        return _Cause(
            "core",
            f"for {ready:.0%} of the time other threads had the core that it wanted",
            f"end what else computes on {host} (top shows it), or lower OMP_NUM_THREADS where ranks share cores",
        )
    speed = _core_speed(window, rank)
    computed = min(float(parts.own[rank].sum()) / step, cpu)
    if computed * (1 - speed) >= max(_KEPT_OFF / 2, _MOST * excess):
        return _Cause(
            "speed",
            f"its core computes at {speed:.0%} of the others' speed now, by a loop that all ranks run",
            f"look for what slows that core of {host} (another virtual machine on it, heat, a slower processor), or"
            f" {_less_work(host)}",
        )
    if phase == "between":
        return _Cause(
            "data",
            "that is data loading, evaluation or logging",
            f"give its DataLoader more workers, or put the data on a faster disk of {host}",
        )
    own = float(parts.own[rank].sum()) / step
    if cpu < _IDLE * own and cpu <= 1.5 * others_cpu:
        return _Cause(
            "sleep",
            f"it used a core for {cpu:.0%} of the time, so it waits or sleeps for the rest",
            f"look for what it waits for there: a lock, a file, a request (py-spy dump --pid on {host} shows it)",
        )
    return _Cause("work", "it computes all that time", _less_work(host))


def _core_speed(window: Window, rank: int) -> float:
    """Of this rank's core, as a share of the median of the others'; 1 where it is not known."""
    took = window.field("probe").mean(1)
    others = _others(took[:, None])[rank, 0]
    return float(others / took[rank]) if float(took[rank]) > 0 and float(others) > 0 else 1.0


def _less_work(host: str) -> str:
    return f"give it less work, by ringdp.data.BalancedSampler, or run it elsewhere than on {host}"


def _name(window: Window, rank: int) -> str:
    host = window.facts[rank].host
    return f"Rank {rank} (host {host})" if host else f"Rank {rank}"


def _quota_in_words(facts: Facts) -> str:
    return f"its quota is {facts.quota_cores:.3g} CPUs" if facts.quota_cores > 0 else "its CPU quota is too small"


# Ranks that do not get the cores that they want, though none is slower than the others.


def _kept_ranks(window: Window) -> Verdict | None:
    known = {rank: facts for rank, facts in enumerate(window.facts) if facts.period_s > 0}
    throttled = {rank: facts.throttled_s / facts.period_s for rank, facts in known.items()}
    throttled = {rank: share for rank, share in throttled.items() if share >= _KEPT_OFF}
    if throttled:
        most = max(throttled, key=lambda rank: throttled[rank])
        text = (
            f"Ranks are throttled by the CPU quota of their cgroup: {_ranks_in_words(throttled)} of the time"
            f" ({_name(window, most)}: {_quota_in_words(window.facts[most])}). No rank is slower than the others."
        )
        remedy = "raise the quota (cpu.max, or limits.cpu of the pods), or start fewer ranks in it"
        return Verdict("host", throttled[most], text, remedy, cause="quota")
    off_core = {rank: share for rank, share in _off_core(window).items() if share >= _SHARES_CORE}
    if not off_core:
        return None
    most = max(off_core, key=lambda rank: off_core[rank])
    text = (
        f"Ranks wait for a core that other threads have: {_ranks_in_words(off_core)} of the time."
        " No rank is slower than the others."
    )
    hosts = ", ".join(dict.fromkeys(window.facts[rank].host or "its host" for rank in off_core))
    remedy = f"end what else computes on {hosts} (top shows it), start fewer ranks there, or lower OMP_NUM_THREADS"
    return Verdict("host", off_core[most], text, remedy, cause="core")


def _off_core(window: Window) -> dict[int, float]:
    """By rank, the share of its steps for which it could have computed, and had no core."""
    whole = window.rows[:, :, :6].sum((1, 2))
    off_core = window.field("off_core").sum(1)
    return {rank: float(off_core[rank] / whole[rank]) for rank in range(window.ranks) if whole[rank] > 0}


def _ranks_in_words(shares: dict[int, float]) -> str:
    worst = sorted(shares, key=lambda rank: -shares[rank])
    told = ", ".join(f"rank {rank} for {shares[rank]:.0%}" for rank in worst[:_MOST_TOLD])
    return told + (f" and {len(worst) - _MOST_TOLD} more ranks" if len(worst) > _MOST_TOLD else "")


# A slow link.


def _slow_link(window: Window, parts: Split, share: float) -> Verdict | None:
    """The slowest of the ranks' busiest links, if the others' carry at least twice as much a second."""
    compared = {
        rank: facts
        for rank, facts in enumerate(window.facts)
        if facts.link_to >= 0 and facts.link_bytes >= _LEAST_LINK_BYTES and facts.rate > 0
    }
    if len(compared) < 2:
        return None
    usual = usual_rate(list(compared.values()))
    slow = [
        rank
        for rank, facts in compared.items()
        if facts.rate_at_most <= _SLOW_LINK * usual and _busy(window, parts, rank)
    ]
    if not slow:
        return None
    rank = min(slow, key=lambda one: compared[one].rate)
    peer = window.facts[rank].link_to
    seconds = share * float(parts.step.mean())
    speed = f"{compared[rank].rate / 1e6:.3g} MB/s, the others' {usual / 1e6:.3g} MB/s"
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


def usual_rate(facts: Sequence[Facts]) -> float:
    """Bytes a second that a link carries at least, which is not the slow one of two or a slow minority."""
    rates = sorted(one.rate for one in facts)
    return rates[-(len(rates) // 2 or 1)]


def _busy(window: Window, parts: Split, rank: int) -> bool:
    facts = window.facts[rank]
    waited = float(parts.communication[rank] / parts.step[rank])
    return facts.link_busy_s >= _LEAST_BUSY * waited * facts.period_s
