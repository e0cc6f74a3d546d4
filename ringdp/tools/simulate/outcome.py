"""Runs simulations, and says what they found: in words and tables for people, as JSON for programs."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from ringdp import _C
from ringdp.config.tuning import UPLINK, Tuning
from ringdp.costs import HALF_TYPES
from ringdp.errors import InvalidArgumentError
from ringdp.text import format_size, format_time, table
from ringdp.tools import algorithm_table
from ringdp.tools.doctor.ranks.edges import format_rate
from ringdp.tools.simulate.place import Place

COMPRESSED = "compressed"
ALGORITHMS = tuple(row["name"] for row in _C.algorithms() if row["all_reduce"])

FORMAT = 1
"""Of the JSON: another number where a field changes its meaning or goes."""

SLACK = 1.15  # a choice that takes more of the best one's time is pointed out
BUSY = 0.6  # a line that is busy for this share of the time limits
_ANY_SIZE = 1 << 62

PARTS: Mapping[str, str] = {
    "uplinks": "sending over the hosts' links",
    "downlinks": "waiting for links into hosts that several send to",
    "site_lines": "the sites' lines",
    "latency": "latency",
    "messages": "the cost of messages at their ends",
    "copies": "copies of payload, to the kernel, from it, and into shared memory",
    "memory": "waiting for a host's memory",
    "sums": "sums",
    "codes": "encoding and decoding",
}
"""The parts of a critical path (csrc/simulation/network.h) in words."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Of one algorithm.

    Attributes:
        algorithm: its name, or ``compressed`` and the codec's.
        seconds: until the last rank has its result; None: it was not simulated.
        why_not: the reason.
        path: of the critical path, seconds by part; they add up to `seconds`.
        hops: messages on that path, one after another.
        link_bytes: bytes that left the host that sent most.
        messages: sent by the rank that sent most.
        bytes: of the buffer that was simulated.
        alike_hosts: how many hosts each simulated one stood for.
        busy: of each host's link out, the share of the time that it was busy.
    """

    algorithm: str
    seconds: float | None
    why_not: str = ""
    path: Mapping[str, float] = dataclasses.field(default_factory=dict)
    hops: int = 0
    link_bytes: int = 0
    messages: int = 0
    bytes: int = 0
    alike_hosts: int = 1
    busy: Sequence[float] = ()


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Of all algorithms for one size.

    Attributes:
        size_bytes: of the buffer, as it was asked for.
        chosen: the algorithm of the table, or of the caller.
        outcomes: fastest first; those that were not simulated last.
    """

    size_bytes: int
    chosen: str
    outcomes: tuple[Outcome, ...]

    def of(self, algorithm: str) -> Outcome:
        return next(it for it in self.outcomes if it.algorithm == algorithm)

    @property
    def best(self) -> Outcome:
        return self.outcomes[0]


def is_far(place: Place, tuning: Tuning) -> bool:
    """Whether the core takes the hosts for far apart (``tables_for`` in csrc/collective/algorithm_table.h)."""
    limit = tuning.limits.get(f"{place.layout}.far_round_trip_us", 5000)
    return len(place.hosts) > 1 and place.longest_round_trip_s * 1e6 >= limit


def weights(place: Place, tuning: Tuning) -> list[int]:
    """What the hosts own by the table's map of uplinks (csrc/collective/owner_weights.h); empty: all alike."""
    uplinks = {name: rate for name, rate in tuning.limits.items() if name.startswith(UPLINK)}
    if not uplinks:
        return []
    return _C.owner_weights([uplinks.get(UPLINK + host.name, max(uplinks.values())) for host in place.hosts])


def choice(place: Place, size_bytes: int, dtype: str, tuning: Tuning) -> str:
    """What the core's table chooses there."""
    if is_far(place, tuning) or weights(place, tuning):
        in_pairs = {f"{place.layout}.pairwise_bytes": _ANY_SIZE}
        if place.layout == "several_ranks_per_host":
            in_pairs[f"{place.layout}.halving_rank_bytes"] = 0
        tuning = dataclasses.replace(tuning, limits={**tuning.limits, **in_pairs})
    return algorithm_table.algorithm(place.ranks_of_hosts, dtype, size_bytes, tuning)


def candidates(place: Place, dtype: str) -> list[str]:
    """The all-reduces that can reduce this type there."""
    found = ["tree", "fold", "pairwise"]
    if len({host.ranks for host in place.hosts}) == 1:
        found.append("halving")
    if dtype not in HALF_TYPES:
        found.append("ring")
    if place.layout == "several_ranks_per_host":
        found.append("two_level")
    return found


def simulate(
    place: Place,
    size_bytes: int,
    algorithm: str,
    *,
    dtype: str = "float32",
    codec: str = "",
    far: bool = False,
    owned: Sequence[int] = (),
    most_messages: float = 1e7,
) -> Outcome:
    """One all-reduce; one that would take too many messages is not simulated. `owned`: as `weights` gives it."""
    name = f"{COMPRESSED} {codec}" if codec else algorithm
    try:
        found = _C.simulate(
            place.rows(),
            place.settings(),
            size_bytes,
            dtype=dtype,
            algorithm=COMPRESSED if codec else algorithm,
            codec=codec,
            far=far,
            weights=list(owned),
            most_messages=most_messages,
        )
    except InvalidArgumentError as error:
        return Outcome(name, None, str(error).removeprefix("simulation: "))
    seconds = found["seconds"]
    return Outcome(
        name,
        seconds,
        path=found["path"],
        hops=found["hops"],
        link_bytes=max(sent for sent, _ in found["up"]) if found["up"] else 0,
        messages=max(found["messages"], default=0),
        bytes=found["bytes"],
        alike_hosts=found["folded_hosts"],
        busy=[busy / seconds for _, busy in found["up"]] if seconds else [],
    )


def compare(
    place: Place,
    size_bytes: int,
    tuning: Tuning,
    *,
    dtype: str = "float32",
    algorithms: Sequence[str] = (),
    codec: str = "",
    most_messages: float = 1e7,
) -> Comparison:
    """Those algorithms, or all that can do it, and the one that the table chooses."""
    chosen = choice(place, size_bytes, dtype, tuning)
    far, owned = is_far(place, tuning), weights(place, tuning)

    def one(name: str, codec: str = "") -> Outcome:
        return simulate(
            place, size_bytes, name, dtype=dtype, codec=codec, far=far, owned=owned, most_messages=most_messages
        )

    names = [*(algorithms or candidates(place, dtype))]
    if chosen not in names and not algorithms:
        names.append(chosen)
    found = [one(it) for it in names]
    if codec:
        found.append(one(COMPRESSED, codec))
    found.sort(key=lambda it: (it.seconds is None, it.seconds or 0.0))
    return Comparison(size_bytes, chosen, tuple(found))


def heading(place: Place, dtype: str) -> str:
    """Where, in one or two lines."""
    ranks = f"{place.ranks:,} rank{'s' if place.ranks > 1 else ''}"
    per_host = sorted({host.ranks for host in place.hosts})
    if len(place.hosts) == 1:
        return f"all-reduce of {dtype}, {ranks} on one host with {place.cores} cores, simulated"
    words = f"all-reduce of {dtype}, {ranks} on {len(place.hosts):,} hosts"
    words += f" ({' or '.join(map(str, per_host))} on each), simulated"
    rates = sorted({host.up_bytes_per_s for host in place.hosts})
    links = format_rate(rates[0]) if len(rates) == 1 else f"{format_rate(rates[0])} to {format_rate(rates[-1])}"
    words += f"\nlinks of {links}, round trips of {format_time(place.round_trip_s)}"
    if place.between:
        sites = len({host.site for host in place.hosts})
        rate, trip = place.between
        words += f"; {sites} sites, each with a line of {format_rate(rate)}, {format_time(trip)} to the others"
    return words


def text(place: Place, comparison: Comparison) -> str:
    """The table of one size, and what limits."""
    rows = []
    for it in comparison.outcomes:
        note = "the table's choice" if it.algorithm == comparison.chosen else ""
        if it.seconds is None:
            rows.append([it.algorithm, "not simulated", "", "", note])
        else:
            rows.append([it.algorithm, format_time(it.seconds), format_size(it.link_bytes), f"{it.messages:,}", note])
    columns = [format_size(comparison.size_bytes), "time", "sent by a host", "messages of a rank", ""]
    lines = [table(columns, rows), ""]
    if len(place.hosts) == 1:
        kept = (0, 1, 3, 4)
        lines = [table([columns[i] for i in kept], [[row[i] for i in kept] for row in rows]), ""]
    lines += [f"{it.algorithm} was not simulated: {it.why_not}." for it in comparison.outcomes if it.seconds is None]
    lines += sentences(place, comparison)
    return "\n".join(lines)


def sentences(place: Place, comparison: Comparison) -> list[str]:
    """What limits the chosen algorithm, or the first of those that were asked for, and whether another is faster."""
    simulated = [it for it in comparison.outcomes if it.seconds is not None]
    if not simulated:
        return []
    best = next((it for it in simulated if not it.algorithm.startswith(COMPRESSED)), simulated[0])  # exact ones compare
    shown = next((it for it in simulated if it.algorithm == comparison.chosen), best)
    found = [f"What limits {shown.algorithm}: {limits(place, shown)}."]
    if best is not shown and best.seconds is not None and shown.seconds is not None:
        times = shown.seconds / best.seconds
        found.append(f"{best.algorithm} is faster: the table's choice takes {times:.2f} times as long.")
    if shown.bytes > 1.01 * comparison.size_bytes:
        found.append(
            f"One host stands for all {shown.alike_hosts:,}, which are alike; that needs equal parts of the buffer, so "
            f"it was simulated with {format_size(shown.bytes)}."
        )
    elif shown.alike_hosts > 1:
        found.append(f"One host stands for all {shown.alike_hosts:,}, which are alike.")
    return found


def limits(place: Place, outcome: Outcome) -> str:
    """Of the chain of work that ended last: where its time went, and the line that was busy most."""
    total = sum(outcome.path.values())
    if not total:
        return "nothing is sent"
    parts = sorted(outcome.path.items(), key=lambda item: -item[1])
    words = [f"{seconds / total:.0%} {PARTS[name]}" for name, seconds in parts if seconds >= 0.03 * total]
    found = f"of {format_time(total)} on the critical path, of {outcome.hops:,} messages, {', '.join(words)}"
    if len(outcome.busy) > 1:
        most = max(range(len(outcome.busy)), key=lambda host: outcome.busy[host])
        median = statistics.median(outcome.busy)
        if outcome.busy[most] >= BUSY and outcome.busy[most] > 1.2 * median:
            found += (
                f"; the link of {place.hosts[most].name} is busy for {outcome.busy[most]:.0%} of the time, "
                f"the median one for {median:.0%}"
            )
    return found


def as_dict(place: Place, comparison: Comparison) -> dict[str, Any]:
    """For JSON: seconds and bytes."""
    outcomes = []
    for it in comparison.outcomes:
        row = dataclasses.asdict(it)
        row["limits"] = limits(place, it) if it.seconds is not None else ""
        outcomes.append(row)
    best = comparison.best
    return {
        "size_bytes": comparison.size_bytes,
        "chosen": comparison.chosen,
        "best": best.algorithm if best.seconds is not None else None,
        "outcomes": outcomes,
    }
