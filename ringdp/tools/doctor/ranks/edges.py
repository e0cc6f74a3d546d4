"""The edges between ranks: the order of measurement, the matrix of results, and the findings."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ringdp.text import format_time, table
from ringdp.tools.doctor.checks import wide_area
from ringdp.tools.doctor.finding import Finding, note, ok, problem
from ringdp.tools.doctor.host import Thresholds

SLOW = 0.5
"""An edge with less than this share of the median's rate is called slow; so is one with as many times its latency."""

FAR_S = 0.01
"""Round trips from here on are those of a wide-area link, whose rate depends on TCP's buffers."""

LITTLE_S = 200e-6
"""Differences of latency below this are not reported."""

CLOCKS_APART_S = 0.1
"""Offset of two hosts' clocks from which on their logs are hard to compare."""

MOST_RANKS_SHOWN = 16


@dataclasses.dataclass(frozen=True)
class Edge:
    """From one rank to another; None where it could not be measured.

    Attributes:
        source, target: ranks.
        reached: `target` answered `source`.
        tried: addresses of `target` that did not work, with the reason.
        bytes_per_s: the rate from `source` to `target` over one connection.
        latency_s: the median round trip, as `source` saw it.
        clock_offset_s, clock_error_s: the clock of `target` minus that of `source`, and the largest error of that.
    """

    source: int
    target: int
    reached: bool
    tried: tuple[str, ...] = ()
    bytes_per_s: float | None = None
    latency_s: float | None = None
    clock_offset_s: float | None = None
    clock_error_s: float | None = None


@dataclasses.dataclass(frozen=True)
class Matrix:
    """All edges of a job.

    Attributes:
        host_of: the number of each rank's host, ``[ranks]``.
        names: the name of each rank's host, ``[ranks]``.
        edges: by (source, target).
    """

    host_of: tuple[int, ...]
    names: tuple[str, ...]
    edges: Mapping[tuple[int, int], Edge]

    def label(self, rank: int) -> str:
        """``rank 3 (node1)``."""
        return f"rank {rank} ({self.names[rank]})"

    def between_hosts(self) -> list[Edge]:
        """The edges that leave a host."""
        return [edge for edge in self.edges.values() if self.host_of[edge.source] != self.host_of[edge.target]]

    def within_hosts(self) -> list[Edge]:
        """The edges that do not, over loopback or the host's own addresses."""
        return [edge for edge in self.edges.values() if self.host_of[edge.source] == self.host_of[edge.target]]

    def uplinks(self) -> dict[str, float]:
        """The link of each host to the others, in bytes a second by name: the slower direction's fastest edge.

        Without those that have no measured edge both ways; pairs were measured one after another.
        """
        fastest: dict[tuple[str, str], float] = {}
        for edge in self.between_hosts():
            for end in (("out", self.names[edge.source]), ("in", self.names[edge.target])):
                fastest[end] = max(fastest.get(end, 0.0), edge.bytes_per_s or 0.0)
        slower = {name: min(fastest.get(("out", name), 0.0), fastest.get(("in", name), 0.0)) for name in self.names}
        return {name: rate for name, rate in slower.items() if rate > 0}

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "hosts": list(self.names),
            "host_of": list(self.host_of),
            "edges": [dataclasses.asdict(edge) for edge in self.edges.values()],
        }


def rounds(host_of: Sequence[int]) -> list[list[tuple[int, int]]]:
    """All pairs of ranks, lower one first, in rounds in which no host appears twice: pairs do not share a link.

    The same on every rank. A pair on one host keeps that host busy, too.
    """
    left = list(itertools.combinations(range(len(host_of)), 2))
    # The circle method's order, so that in a job of one rank on each host all of them measure in each round.
    left.sort(key=lambda pair: (sum(pair) % len(host_of), pair))
    found = []
    while left:
        busy: set[int] = set()
        now, later = [], []
        for pair in left:
            hosts = {host_of[pair[0]], host_of[pair[1]]}
            if hosts & busy:
                later.append(pair)
            else:
                now.append(pair)
                busy |= hosts
        found.append(now)
        left = later
    return found


def findings(matrix: Matrix, thresholds: Thresholds, *, door: bool = False) -> Iterator[Finding]:
    """The ranks that do not reach each other, the slowest edge, and the comparison with the user's thresholds. `door`:
    the job has one, which relays for them."""
    if len(matrix.host_of) < 2:
        return
    unreached = [edge for edge in matrix.edges.values() if not edge.reached]
    yield from _relayed(matrix, unreached) if door else _unreached(matrix, unreached)
    if not unreached:
        yield ok(f"all {len(matrix.edges)} directed pairs of {len(matrix.host_of)} ranks reach each other")
    for edges, where in ((matrix.between_hosts(), "between hosts"), (matrix.within_hosts(), "within a host")):
        yield from _rates(matrix, edges, where, thresholds)
        yield from _latencies(matrix, edges, where, thresholds)
    yield from _windows(matrix)
    yield from _clocks(matrix, thresholds.max_clock_offset_s)


def _unreached(matrix: Matrix, edges: Sequence[Edge]) -> Iterator[Finding]:
    """The higher rank of a pair dials the lower one: only that direction stops ring (docs/reference/wire_format.md)."""
    for edge in edges:
        names = f"{matrix.label(edge.source)} does not reach {matrix.label(edge.target)}"
        tried = _tried(edge)
        facts = dataclasses.asdict(edge)
        if edge.source > edge.target:
            remedy = (
                "let ports through (RINGDP_PORT_RANGE=29600-29699 makes them few), choose another by RINGDP_IFACE, "
                f"or name a reachable address of {matrix.names[edge.target]} with RINGDP_ADVERTISE"
            )
            yield problem(f"{names}: {tried}", remedy, **facts)
        else:
            remedy = (
                "nothing for ring in a job of up to 16 ranks: the higher rank dials; gloo and NCCL need both directions"
            )
            yield note(f"{names}: {tried}", remedy, **facts)


def _relayed(matrix: Matrix, edges: Sequence[Edge]) -> Iterator[Finding]:
    """Either rank of a pair dials, where one reaches the other."""
    cut = {(edge.source, edge.target): edge for edge in edges}
    for (source, target), edge in cut.items():
        if (back := cut.get((target, source))) is None:
            words = f"{matrix.label(source)} does not reach {matrix.label(target)}, which dials it: {_tried(edge)}"
            yield ok(words, **dataclasses.asdict(edge))
        elif source < target:
            ends = f"{matrix.label(source)} and {matrix.label(target)}"
            words = f"{ends} are relayed through the door, since neither reaches the other: there {_tried(edge)}; back"
            remedy = "let the ports of one of them through for a direct connection (RINGDP_PORT_RANGE makes them few)"
            yield note(f"{words} {_tried(back)}", remedy, source=source, target=target)


def _tried(edge: Edge) -> str:
    return "; ".join(edge.tried) or "it published no address that leads to another host"


def _rates(matrix: Matrix, edges: Sequence[Edge], where: str, thresholds: Thresholds) -> Iterator[Finding]:
    measured = [edge for edge in edges if edge.bytes_per_s is not None]
    if not measured:
        return
    rates = {(edge.source, edge.target): edge.bytes_per_s or 0.0 for edge in measured}
    slowest = min(measured, key=lambda edge: rates[edge.source, edge.target])
    rate, median = rates[slowest.source, slowest.target], statistics.median(rates.values())
    names = f"{matrix.label(slowest.source)} to {matrix.label(slowest.target)}"
    words = f"the slowest edge {where} is {names}: {format_rate(rate)}, the median is {format_rate(median)}"
    facts = {"source": slowest.source, "target": slowest.target, "bytes_per_s": rate, "median_bytes_per_s": median}
    # Bandwidth is a matter of the links between hosts; inside one only where there are no others.
    wanted = thresholds.min_bytes_per_s if where == "between hosts" or not matrix.between_hosts() else None
    back = rates.get((slowest.target, slowest.source))
    if wanted is not None and rate < wanted:
        yield problem(
            f"{words}; at least {format_rate(wanted)} were asked for", _link_remedy(matrix, slowest, back), **facts
        )
    elif where == "between hosts" and rate < SLOW * median:
        yield note(words, _link_remedy(matrix, slowest, back), **facts)
    else:
        yield ok(words, **facts)


def _link_remedy(matrix: Matrix, edge: Edge, back: float | None) -> str:
    if matrix.host_of[edge.source] == matrix.host_of[edge.target]:
        return f"end other programs on {matrix.names[edge.source]} (top shows them): this edge is its own memory"
    ends = f"{matrix.names[edge.source]} and {matrix.names[edge.target]}"
    words = f"look at the link of {ends} (cable, switch port, other traffic"
    if back is not None and edge.bytes_per_s and back > 2 * edge.bytes_per_s:
        words += f"; the other direction has {format_rate(back)}"
    return words + "); a ring is as fast as its slowest edge"


def _latencies(matrix: Matrix, edges: Sequence[Edge], where: str, thresholds: Thresholds) -> Iterator[Finding]:
    measured = {(edge.source, edge.target): edge.latency_s for edge in edges if edge.latency_s is not None}
    if not measured:
        return
    source, target = max(measured, key=lambda pair: measured[pair])
    longest, median = measured[source, target], statistics.median(measured.values())
    words = f"the longest round trip {where} is {matrix.label(source)} to {matrix.label(target)}: "
    words += f"{format_time(longest)}, the median is {format_time(median)}"
    facts = {"source": source, "target": target, "latency_s": longest, "median_latency_s": median}
    remedy = (
        "small operations wait for round trips: use larger batches or accumulation, or put the ranks closer together"
    )
    wanted = thresholds.max_latency_s if where == "between hosts" or not matrix.between_hosts() else None
    if wanted is not None and longest > wanted:
        yield problem(f"{words}; at most {format_time(wanted)} was asked for", remedy, **facts)
    elif where == "between hosts" and longest > median / SLOW and longest - median > LITTLE_S:
        yield note(words, remedy, **facts)
    else:
        yield ok(words, **facts)


def _windows(matrix: Matrix) -> Iterator[Finding]:
    """On a long path the rate may be that of TCP's window, and not of the link."""
    far = [edge for edge in matrix.between_hosts() if (edge.latency_s or 0.0) >= FAR_S and edge.bytes_per_s]
    if not far:
        return
    edge = max(far, key=lambda it: it.latency_s or 0.0)
    needed = wide_area.buffer_for(2 * (edge.bytes_per_s or 0.0), edge.latency_s or 0.0)
    sentence = (
        f"{matrix.label(edge.source)} and {matrix.label(edge.target)} are {format_time(edge.latency_s or 0.0)} apart: "
    )
    sentence += f"one connection carried {format_rate(edge.bytes_per_s or 0.0)}"
    remedy = f"if the link has more, {wide_area.set_buffers(max(needed, wide_area.ENOUGH_BYTES))}, and bbr against loss"
    yield note(sentence, remedy, source=edge.source, target=edge.target, latency_s=edge.latency_s)


def _clocks(matrix: Matrix, wanted_s: float | None) -> Iterator[Finding]:
    """The clock of each host against that of rank 0's, by the edge between them that knows it best."""
    best: dict[int, tuple[float, float]] = {}  # of a host: error, offset
    for edge in matrix.between_hosts():
        if edge.clock_offset_s is None or edge.clock_error_s is None:
            continue
        ends = matrix.host_of[edge.source], matrix.host_of[edge.target]
        if matrix.host_of[0] not in ends:
            continue
        sign, other = (1, ends[1]) if ends[0] == matrix.host_of[0] else (-1, ends[0])
        best[other] = min(best.get(other, (math.inf, 0.0)), (edge.clock_error_s, sign * edge.clock_offset_s))
    if not best:
        return
    host, (error_s, offset_s) = max(best.items(), key=lambda item: abs(item[1][1]))
    name = matrix.names[matrix.host_of.index(host)]
    words = f"the clock of {name} is {format_time(abs(offset_s))} {'ahead of' if offset_s > 0 else 'behind'} that of "
    words += f"{matrix.names[0]}, give or take {format_time(error_s)}; no other host's is further away"
    facts = {"host": name, "offset_s": offset_s, "error_s": error_s}
    remedy = "run chrony or systemd-timesyncd on all hosts: logs and timelines of several hosts are merged by time"
    if wanted_s is not None and abs(offset_s) - error_s > wanted_s:
        yield problem(f"{words}; at most {format_time(wanted_s)} was asked for", remedy, **facts)
    elif abs(offset_s) - error_s > CLOCKS_APART_S:
        yield note(words, remedy, **facts)
    else:
        yield ok(words, **facts)


def tables(matrix: Matrix) -> list[str]:
    """The measurements from the rank of the row to that of the column; of the first ranks where there are many."""
    shown = range(min(len(matrix.host_of), MOST_RANKS_SHOWN))
    if len(shown) < 2:
        return []
    more = len(matrix.host_of) - len(shown)
    behind = f" (the first {len(shown)} ranks of {len(matrix.host_of)}; --json has all)" if more else ""

    def cells(title: str, words: Any) -> str:
        rows = [
            [matrix.label(source), *("–" if source == to else words(matrix.edges.get((source, to))) for to in shown)]
            for source in shown
        ]
        return f"{title}{behind}\n\n{table(['from', *(f'to {rank}' for rank in shown)], rows)}"

    def rate(edge: Edge | None) -> str:
        return _or_cut(edge, lambda it: None if it.bytes_per_s is None else format_rate(it.bytes_per_s))

    def latency(edge: Edge | None) -> str:
        return _or_cut(edge, lambda it: None if it.latency_s is None else format_time(it.latency_s))

    return [cells("bandwidth of one TCP connection", rate), cells("round trips", latency)]


def _or_cut(edge: Edge | None, words: Any) -> str:
    if edge is None:
        return "?"
    return (words(edge) or "?") if edge.reached or words(edge) else "cut"


def format_rate(bytes_per_s: float) -> str:
    """As networks are sold: ``940 Mbit/s``, ``24.1 Gbit/s``."""
    bits = bytes_per_s * 8
    for unit, name in ((1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if bits >= unit:
            return f"{bits / unit:.3g} {name}"
    return f"{bits / 1e3:.3g} kbit/s"
