"""The rank, link or setting that cost the steps of a window most, and a remedy. Pure: no clock, no file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ringdp.diagnosis.causes import (
    KEPT_OFF,
    MOST,
    SLOWS_ALL,
    Bursts,
    Cause,
    bursts_of,
    causes_of,
    describe_quota,
    others_of,
)
from ringdp.diagnosis.rank_facts import Facts
from ringdp.diagnosis.remedies import Sent, remedy_for_communication
from ringdp.diagnosis.split import Split
from ringdp.diagnosis.window import OWN, Window
from ringdp.text import format_size, format_time

COSTLY = 0.2  # of a step: from here on communication is worth a line
_LEAST_LOSS = 0.1  # of the steps that a rank must cost to be named
_ERRORS = 4.0  # standard errors of the mean by which a slow rank differs from chance
_ALMOST_ALL = 0.95  # of the loss that a rank causes which is slow now and then
_MOSTLY_BETWEEN = 0.5  # of a step, from which the time between steps is worth a line
_NEARLY_ALL = 0.8  # of a rank's own time
_MOST_OF_BURSTS = 0.75  # of the loss, that a rank causes which is slow at regular intervals
_SHARES_CORE = 0.25  # of its steps that a rank was without a core, from which its host is named
_MOST_NAMED = 4  # ranks
_SLOW_LINK = 0.5  # of the other links' rate
_LEAST_BUSY = 0.3  # of the communication's time that the slow link was busy
_LEAST_LINK_BYTES = 100_000

PHASES = dict(zip(OWN, ("the time between steps", "its forward", "its backward", "its optimizer"), strict=True))
"""The names of a step's phases in sentences."""


@dataclass(frozen=True)
class Verdict:
    """The largest cost of the steps of a window.

    Attributes:
        kind: "none", "rank" (it is slower than the others), "link", "host" (ranks do not get the cores that they want),
            "communication" (no rank or link stands out), "between" (all ranks spend their time between steps), or
            "uneven" (ranks take turns in being slow).
        cost: the share of the steps that is lost to it.
        text: its description.
        remedy: the remedy; empty for "none".
        rank: the slow one, or the sender of the slow link; None where none is named.
        peer: the receiver of the slow link.
        phase: one of `OWN`, of a slow rank.
        cause: the cause for which a rank is slow: "quota", "memory", "core", "speed", "bursts", "data", "sleep" or
            "work"; of "host" "quota" or "core".
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
    """The largest cost in the window. `sent`: gives the traffic of one rank's step; called only where it is needed."""
    if window.ranks == 1 or window.rows.shape[1] < 3:
        return Verdict("none", 0.0, "There is nothing to compare.")
    found = _slow_rank(window, parts)
    if found is not None:
        return found
    step = float(parts.step.mean())
    share = float(parts.communication.median()) / step if step > 0 else 0.0
    if share >= COSTLY and (link := _slow_link(window, parts, share)) is not None:
        return link
    kept = _kept_ranks(window, parts)
    without_core = float(_off_core_in_communication(window, parts).median())
    if kept is not None and kept.cost >= share - without_core:
        return kept
    if share >= COSTLY:
        limited = any(_busy(window, parts, rank) for rank in range(window.ranks))
        return remedy_verdict(parts, sent(), share, by_network=limited)
    passes = parts.own[:, OWN.index("between")]
    between = float((passes / parts.step).median())
    of_own = float((passes / parts.own.sum(1)).median())
    if between >= _MOSTLY_BETWEEN or (
        between >= COSTLY and of_own >= _NEARLY_ALL
    ):  # the rest: waiting for late loaders
        return Verdict(
            "between",
            between,
            f"{between:.0%} of a step passes between steps on all ranks: data loading, evaluation or logging.",
            "give the DataLoaders more workers (num_workers), or put the data on a faster disk; evaluate and log less"
            " often",
        )
    if parts.cost >= COSTLY:
        return Verdict(
            "uneven",
            parts.cost,
            f"Ranks take turns in being the slowest, and the others wait {format_time(parts.cost * step)} a step.",
            "look for a cause that stops ranks now and then: batches of very different length, other programs, a busy"
            " disk",
        )
    return Verdict("none", parts.cost, "Communication costs little.")


def remedy_verdict(parts: Split, sent: Sent, share: float, *, by_network: bool) -> Verdict:
    """`by_network`: a link to another rank was the limit."""
    seconds = share * float(parts.step.mean())
    text = (
        f"Communication of {format_size(sent.bytes)} of gradients is exposed for {format_time(seconds)} a step:"
        " no rank and no link is slower than the others."
    )
    return Verdict("communication", share, text, remedy_for_communication(parts, sent, by_network=by_network))


# A slow rank.


@dataclass(frozen=True)
class _Slow:
    """A rank that computes longer than the others, in a way that is not chance."""

    rank: int
    loss: float  # the share of a step that the others wait for it
    bursts: Bursts | None  # None: it is not slow in a few steps alone


def _slow_rank(window: Window, parts: Split) -> Verdict | None:
    own = torch.stack([window.field(name) for name in OWN]).sum(0)
    step = float(parts.step.mean())
    slow = _slowest(own, step)
    if slow is None:
        return None
    phase = OWN[int((parts.own - others_of(parts.own))[slow.rank].argmax())]
    causes = causes_of(window, parts, slow.rank, phase, slow.bursts)
    cause = next(causes)
    if cause.name in SLOWS_ALL and not _others_have_it(window, slow.rank, cause.name):
        return _describe_slow_rank(window, parts, slow, phase, cause)
    if cause.name in SLOWS_ALL:  # which all ranks have: is there something of this one's own?
        cause = next(other for other in causes if other.name != cause.name)
        if cause.name != "sleep":
            return None
    # Where it is slower only by missing cores, the phase is one of chance.
    by_itself = _slowest(own - window.field("off_core"), step)
    if by_itself is not None and by_itself.rank == slow.rank:
        return _describe_slow_rank(window, parts, slow, phase, cause)
    return None


def _others_have_it(window: Window, rank: int, cause: str) -> bool:
    """Whether half of the other ranks are kept from computing nearly as much: then `_kept_ranks` names all."""
    fields = {"quota": ("throttled_s",), "core": ("ready_s", "threads_ready_s")}.get(cause)
    if fields is None:
        return False
    shares = [
        max(getattr(one, field) for field in fields) / one.period_s if one.period_s > 0 else 0.0 for one in window.facts
    ]
    others = sorted(shares[:rank] + shares[rank + 1 :])
    return others[len(others) // 2] >= MOST * shares[rank]


def _slowest(own: Tensor, step: float) -> _Slow | None:
    """Of the ranks' work in each step ``[ranks, steps]``, and a step's time."""
    excess = own - others_of(own)
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
    bursts = bursts_of((own - others_of(own))[rank])
    in_bursts = bursts is not None and own_loss >= (_MOST_OF_BURSTS if bursts.every else _ALMOST_ALL)
    often = own_loss >= _ALMOST_ALL and loss >= 2 * _LEAST_LOSS and int((lost > 0.5 * step * loss).sum()) > 1
    if loss < _LEAST_LOSS or not (always or often or in_bursts):
        return None
    return _Slow(rank, loss, bursts)


def _describe_slow_rank(window: Window, parts: Split, slow: _Slow, phase: str, cause: Cause) -> Verdict:
    rank = slow.rank
    if cause.name in SLOWS_ALL:
        its, others, what = (
            parts.own[rank].sum(),
            others_of(parts.own.sum(1, keepdim=True))[rank, 0],
            "its own work",
        )
    else:
        column = OWN.index(phase)
        its, others, what = parts.own[rank, column], others_of(parts.own)[rank, column], PHASES[phase]
    if cause.name == "bursts" and slow.bursts is not None:
        text = (
            f"{_name(window, rank)} is slow in bursts: {slow.bursts} {PHASES[phase]} takes"
            f" {format_time(slow.bursts.longer_s)} longer; {cause.why}."
        )
    else:
        text = (
            f"{_name(window, rank)} is slow: {what} takes {format_time(float(its))},"
            f" the others' {format_time(float(others))}; {cause.why}."
        )
    text += f" The others wait for {slow.loss:.0%} of a step."
    return Verdict("rank", slow.loss, text, cause.remedy, rank=rank, phase=phase, cause=cause.name)


def _name(window: Window, rank: int) -> str:
    host = window.facts[rank].host
    return f"Rank {rank} (host {host})" if host else f"Rank {rank}"


# Ranks that do not get their cores, though none is slower than the others.


def _kept_ranks(window: Window, parts: Split) -> Verdict | None:
    known = {rank: facts for rank, facts in enumerate(window.facts) if facts.period_s > 0}
    throttled = {rank: facts.throttled_s / facts.period_s for rank, facts in known.items()}
    throttled = {rank: share for rank, share in throttled.items() if share >= KEPT_OFF}
    if throttled:
        most = max(throttled, key=lambda rank: throttled[rank])
        text = (
            f"Ranks are throttled by the CPU quota of their cgroup: {_describe_shares(throttled)} of the time"
            f" ({_name(window, most)}: {describe_quota(window.facts[most])}). No rank is slower than the others."
        )
        remedy = "raise the quota (cpu.max, or limits.cpu of the pods), or start fewer ranks in it"
        return Verdict("host", throttled[most], text, remedy, cause="quota")
    waiting = _off_core_in_communication(window, parts).tolist()
    off_core = {rank: share + waiting[rank] for rank, share in _off_core(window).items()}
    off_core = {rank: share for rank, share in off_core.items() if share >= _SHARES_CORE}
    if not off_core:
        return None
    most = max(off_core, key=lambda rank: off_core[rank])
    text = (
        f"Ranks wait for a core that other threads have: {_describe_shares(off_core)} of the time."
        " No rank is slower than the others."
    )
    hosts = ", ".join(dict.fromkeys(window.facts[rank].host or "its host" for rank in off_core))
    remedy = f"end other programs on {hosts} (top shows them), start fewer ranks there, or lower OMP_NUM_THREADS"
    return Verdict("host", off_core[most], text, remedy, cause="core")


def _off_core(window: Window) -> dict[int, float]:
    """By rank, the share of its steps in which it was runnable and had no core."""
    whole = window.rows[:, :, :6].sum((1, 2))
    off_core = window.field("off_core").sum(1)
    return {rank: float(off_core[rank] / whole[rank]) for rank in range(window.ranks) if whole[rank] > 0}


def _off_core_in_communication(window: Window, parts: Split) -> Tensor:
    """By rank, the share of its steps in which it waited for communication while one of its own threads had no core."""
    computing = _off_core(window)
    shares = []
    for rank, facts in enumerate(window.facts):
        ready = (facts.ready_s + facts.threads_ready_s) / facts.period_s if facts.period_s > 0 else 0.0
        communication = float(parts.communication[rank] / parts.step[rank]) if float(parts.step[rank]) > 0 else 0.0
        shares.append(min(max(ready - computing.get(rank, 0.0), 0.0), communication))
    return torch.tensor(shares, dtype=torch.float64, device="cpu")


def _describe_shares(shares: dict[int, float]) -> str:
    worst = sorted(shares, key=lambda rank: -shares[rank])
    named = ", ".join(f"rank {rank} for {shares[rank]:.0%}" for rank in worst[:_MOST_NAMED])
    return named + (f" and {len(worst) - _MOST_NAMED} more ranks" if len(worst) > _MOST_NAMED else "")


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
