"""Compare the simulator with this machine: all-reduces over network namespaces, beside python -m ringdp simulate.

    sudo python -m benchmarks simulated --hosts 4 --rate 100mbit              one rank on each host
    sudo python -m benchmarks simulated --hosts 4 --ranks 8 --rate 1gbit      two on each

For each size: every algorithm that the ranks can be given, and int8 codes, the median of all calls; what the simulation
says of the same place, whose hosts share this machine's cores; and the simulation over the measurement. Algorithms take
turns. Links whose bandwidth limits say most: where processors do, other programs and the kernel's work for the hosts'
packets, which no rank's thread does, count.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy

from benchmarks.collectives.core import make_runtime
from benchmarks.lib import session
from benchmarks.lib.hosts import BURST
from benchmarks.lib.measure import format_size, format_time, parse_size, table

NAME = "simulated"
SIZES = "4k,64k,1m,8m"
ALWAYS, NEVER = 2**40, 0
_NO_FOLD = {"fold_two_ranks_bytes": NEVER, "fold_sent_bytes": NEVER}
TABLES: Mapping[str, Mapping[str, int]] = {
    "tree": {"direct_ranks": 2, "fold_sent_bytes": ALWAYS, "halving_rank_bytes": NEVER},
    "fold": {"fold_two_ranks_bytes": ALWAYS, "fold_sent_bytes": ALWAYS, "direct_ranks": 1 << 20},
    "pairwise": {**_NO_FOLD, "pairwise_bytes": ALWAYS},
    "halving": {**_NO_FOLD, "pairwise_bytes": NEVER, "halving_rank_bytes": ALWAYS},
    "ring": {**_NO_FOLD, "pairwise_bytes": NEVER, "halving_rank_bytes": NEVER},
    "two_level": {**_NO_FOLD, "halving_rank_bytes": NEVER},
}
"""The table that makes an all-reduce take the algorithm; between hosts with several ranks some are not reached."""
ROUND_TRIP_US = 30.0
WIRE_BYTES_PER_BYTE = 1514 / 1448  # of packets with 1448 bytes of payload, as tc counts them


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", default=SIZES, help=f"bytes of a buffer ({SIZES})")
    parser.add_argument("--calls", type=int, default=5, help="of each algorithm in a block (5)")
    parser.add_argument("--rounds", type=int, default=3, help="blocks of each, in turns (3)")
    parser.add_argument("--round-trip-us", type=float, default=ROUND_TRIP_US, help=f"to simulate ({ROUND_TRIP_US:g})")


def check(args: argparse.Namespace) -> None:
    args.size_bytes = [parse_size(word) for word in args.sizes.split(",")]
    args.place = session.Place(args.ranks or args.hosts or 2, args.hosts, args.rate)
    session.at_least(1, rounds=args.rounds, calls=args.calls)
    session.at_least(2, ranks=args.place.ranks)
    if args.hosts and args.rate == "none":
        raise ValueError("links of a rate are simulated: --rate 100mbit")


def settings(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "size_bytes": args.size_bytes,
        "calls": args.calls,
        "rounds": args.rounds,
        "round_trip_us": args.round_trip_us,
    }


def simulated_seconds(place: session.Place, size_bytes: int, algorithm: str, round_trip_us: float) -> float | None:
    """Of the same all-reduce on hosts that share this machine's cores."""
    from ringdp.config.parse import parse_rate
    from ringdp.tools.simulate import outcome
    from ringdp.tools.simulate.place import Place, alike

    rate = parse_rate(place.rate) if place.hosts else 1e9
    where = Place(
        hosts=tuple(alike(place.hosts or 1, place.per_host, rate)),
        round_trip_s=round_trip_us * 1e-6,
        cores=os.cpu_count() or 1,
        one_machine=True,
        wire_bytes_per_byte=WIRE_BYTES_PER_BYTE,
        burst_bytes=parse_size(BURST),
    )
    codec = "int8" if algorithm == "int8" else ""
    return outcome.simulate(where, size_bytes, algorithm, codec=codec).seconds


def add_derived(rows: list[dict[str, Any]], place: session.Place) -> list[dict[str, Any]]:
    for row in rows:
        row["simulated_s"] = simulated_seconds(place, row["bytes"], row["algorithm"], row["round_trip_us"])
    return rows


def report(result: dict[str, Any]) -> str:
    rows = [
        [
            format_size(row["bytes"]),
            row["algorithm"],
            format_time(row["measured_s"]),
            format_time(row["simulated_s"]),
            f"{row['simulated_s'] / row['measured_s']:.2f}",
        ]
        for row in result["rows"]
    ]
    columns = ["size", "algorithm", "measured", "simulated", "simulated / measured"]
    within = [0.9 <= row["simulated_s"] / row["measured_s"] <= 1.1 for row in result["rows"]]
    words = f"within 10 %: {sum(within)} of {len(within)}"
    return session.text(result, "Simulated and measured", table(columns, rows), words)


def main(argv: Sequence[str]) -> int:
    return session.main(sys.modules[__name__], NAME, argv)


# What each rank does.


def run_rank(joined: session.Joined) -> None:
    """Deliver a row for each size and algorithm: its bytes and the seconds of a call."""
    runtime, core = make_runtime(joined.rank, joined.world_size, NAME)
    members = list(range(joined.world_size))
    groups = {name: core.Group(runtime, name, members, table=limits) for name, limits in TABLES.items()}
    codes = core.Group(runtime, "codes", members)

    def taken(name: str, size: int) -> str:
        return str(
            core.all_reduce_algorithm(
                joined.world_size, "float32", size, table=dict(TABLES[name]), hosts=list(codes.hosts)
            )
        )

    def calls_of(size: int) -> dict[str, Callable[[int], list[float]]]:
        """For each algorithm: so many calls, and their seconds."""
        x = numpy.zeros(size // 4, numpy.float32)

        def exact(group: Any) -> Callable[[int], list[float]]:
            return lambda count: list(group.time_all_reduce(x, "float32", count))

        found = {name: exact(group) for name, group in groups.items() if taken(name, size) == name}
        coded = functools.partial(codes.all_reduce_compressed, [x], [0], "int8")
        return {**found, "int8": lambda count: _timed(lambda: coded()[0].wait(), count)}

    rows = []
    for size in joined.settings["size_bytes"]:
        calls = calls_of(size)
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        joined.say(f"{format_size(size)}: {', '.join(calls)}")
        for call in calls.values():
            call(2)
        for _ in range(joined.settings["rounds"]):
            for name, call in calls.items():
                seconds[name] += call(joined.settings["calls"])
        for name, them in seconds.items():
            measured = session.slowest(statistics.median(them))
            rows.append({"bytes": size, "algorithm": name, "measured_s": measured})
    for row in rows:
        row["round_trip_us"] = joined.settings["round_trip_us"]
    for group in (*groups.values(), codes):
        group.close()
    joined.deliver(rows)
    runtime.shut_down()


def _timed(call: Callable[[], object], count: int) -> list[float]:
    seconds = []
    for _ in range(count):
        start = perf_counter()
        call()
        seconds.append(perf_counter() - start)
    return seconds
