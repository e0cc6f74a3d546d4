"""The table of algorithms by size, and their times by the cost model, as text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from ringdp import _C
from ringdp import costs as cost_model
from ringdp.config.tuning import LAYOUTS, Tuning
from ringdp.costs import AlgorithmCosts, HostLayout
from ringdp.text import format_size, format_time, table

SLACK = 1.25  # a choice that the model finds this much slower than its best one is pointed out
_TOP = 1 << 50


@dataclasses.dataclass(frozen=True)
class Range:
    """Sizes in bytes, both ends included, for which the same algorithm runs; ``last`` is None for "and above"."""

    first: int
    last: int | None
    algorithm: str


def algorithm(place: HostLayout, dtype: str, size_bytes: int, tuning: Tuning) -> str:
    """The algorithm of an all-reduce of that size there. Raises InvalidArgumentError for a type that does not exist."""
    return str(_C.all_reduce_algorithm(place.ranks, dtype, size_bytes, table=dict(tuning.limits), hosts=place.hosts))


def layout(place: HostLayout) -> str:
    """The layout whose limits hold there, one of `ringdp.config.tuning.LAYOUTS`."""
    if len(place.per_host) == 1:
        return "one_host"
    return "one_rank_per_host" if max(place.per_host) == 1 else "several_ranks_per_host"


def best_limit(times: Mapping[int, Sequence[float]]) -> int:
    """Up to which size, in bytes, the first of both times is to be taken; 0 for never.

    The one that costs least: with t the time taken and b the better of both, the sum of log(t / b) over all sizes.
    """

    def regret(limit: int) -> float:
        return sum(math.log(pair[0 if size <= limit else 1] / min(pair)) for size, pair in times.items())

    return min([0, *sorted(times)], key=regret)


def fold_limit(size_bytes: int, ranks: int, *, direct: bool) -> int:
    """``fold_sent_bytes`` where small all-reduces end at that size: a fold sends (n-1) times as much; in place of it,
    where `direct` is False, a tree is taken up to n/64 of the limit."""
    return size_bytes * (ranks - 1) if direct else -(-size_bytes // ranks) * 64


def ranges(place: HostLayout, dtype: str, tuning: Tuning) -> list[Range]:
    """The table for that place and type, from the core itself: sizes at which its choice changes, by bisection."""

    def chosen(size_bytes: int) -> str:
        return algorithm(place, dtype, size_bytes, tuning)

    found, first = [], 0
    while chosen(first) != chosen(_TOP):
        low, high = first, _TOP
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if chosen(middle) == chosen(first) else (low, middle)
        found.append(Range(first, low, chosen(first)))
        first = high
    return [*found, Range(first, None, chosen(_TOP))]


def explain(place: HostLayout, dtype: str, sizes: Sequence[int], tuning: Tuning) -> str:
    """The whole explanation as text, for an all-reduce; sizes in bytes."""
    costs = AlgorithmCosts(**tuning.costs)
    several = len(place.per_host) > 1
    lines = [
        f"all-reduce of {dtype}, {_format_hosts(place)}",
        f"layout {layout(place)}: {LAYOUTS[layout(place)]}; table: {tuning.source}",
        "",
    ]
    lines += [f"  {_format_range(one)}: {one.algorithm}" for one in ranges(place, dtype, tuning)]
    columns = ["size", "algorithm", "predicted", "sent by a rank", "over a host's link", "the model's best"]
    rows = []
    for size in sizes:
        taken = algorithm(place, dtype, size, tuning)
        work = cost_model.work(taken, place, size, dtype=dtype)
        seconds = {
            name: cost_model.work(name, place, size, dtype=dtype).seconds(costs, place)
            for name in {*cost_model.candidates(place, dtype), taken}
        }
        best = min(seconds, key=lambda name: seconds[name])
        better = f"{best}, {format_time(seconds[best])}" if seconds[taken] > SLACK * seconds[best] else ""
        link = format_size(work.link_bytes) if several else "–"
        cells = [format_size(size), taken, format_time(seconds[taken]), format_size(work.rank_bytes), link, better]
        rows.append(cells)
    columns, rows = _without_empty(columns, rows)
    lines += ["", table(columns, rows), "", _format_costs(costs, several=several, measured=bool(tuning.costs))]
    return "\n".join(lines)


def _format_hosts(place: HostLayout) -> str:
    ranks = f"{place.ranks} rank{'s' if place.ranks > 1 else ''}"
    cores = f"{place.cores} core{'s' if place.cores > 1 else ''}"
    if len(place.per_host) == 1:
        return f"{ranks} on one host with {cores}"
    spread = sorted({str(count) for count in place.per_host}, reverse=True)
    return f"{ranks} on {len(place.per_host)} hosts ({' or '.join(spread)} on each) with {cores}"


def _format_range(one: Range) -> str:
    if one.last is None:
        return "every size" if one.first == 0 else "above"
    return f"up to {format_size(one.last)}"


def _without_empty(columns: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    kept = [i for i in range(len(columns)) if any(row[i] not in ("", "–") for row in rows)]
    return [columns[i] for i in kept], [[row[i] for i in kept] for row in rows]


def _format_costs(costs: AlgorithmCosts, *, several: bool, measured: bool) -> str:
    words = f"a message {costs.alpha_local_us:g} µs within a host"
    words += f" and {costs.alpha_remote_us:g} µs between hosts" if several else ""
    words += f", a byte {costs.beta_local_ns_per_byte:g} ns"
    words += f" and {costs.beta_remote_ns_per_byte:g} ns" if several else ""
    words += f", adding a byte {costs.gamma_ns_per_byte:g} ns"
    origin = "from the file" if measured else "built in, of two cores; python -m benchmarks tune measures yours"
    return f"The model's constants ({origin}):\n{words}."
