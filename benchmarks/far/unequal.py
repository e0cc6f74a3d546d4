"""What a map of unequal links brings: all-reduces of hosts of which one has a slower link, without the map and with it.

    sudo python -m benchmarks unequal                                   3 hosts at 1 Gbit, one at 100 Mbit
    sudo python -m benchmarks unequal --hosts 6 --slow 250mbit --sizes 4m
    sudo python -m benchmarks unequal --ranks-per-host 2

Hosts are network namespaces. The mean of each size goes as float32 and as int8 codes, without a map and with one
(RINGDP_TUNING's uplinks), in turns; means are checked before anything is timed. The bound is the linear program's of
docs/reference/algorithms.md, with the headers of packets: nothing that sends each part to one owner is faster.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy
import torch
import torch.distributed as dist

from benchmarks.collectives.core import make_runtime
from benchmarks.collectives.simulated import WIRE_BYTES_PER_BYTE
from benchmarks.lib import session
from benchmarks.lib.measure import format_size, format_time, parse_size, table

NAME = "unequal"
HOSTS, SLOW, SIZES = 4, "100mbit", "1m,4m"


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--slow", default=SLOW, help=f"rate of the last host's link ({SLOW})")
    parser.add_argument("--sizes", default=SIZES, help=f"bytes of a buffer of float32 ({SIZES})")
    parser.add_argument("--calls", type=int, default=3, help="of each kind in a block (3)")
    parser.add_argument("--rounds", type=int, default=3, help="blocks of each, in turns (3)")


def check(args: argparse.Namespace) -> None:
    from ringdp.config.parse import parse_rate

    args.size_bytes = [parse_size(word) for word in args.sizes.split(",")]
    per_host = args.ranks_per_host or 1
    hosts = args.hosts or HOSTS
    args.place = session.Place(args.ranks or hosts * per_host, hosts, args.rate)
    session.at_least(1, rounds=args.rounds, calls=args.calls)
    session.at_least(3, hosts=hosts)
    args.uplinks = [round(parse_rate(args.rate))] * (hosts - 1) + [round(parse_rate(args.slow))]


def settings(args: argparse.Namespace) -> dict[str, Any]:
    return {"size_bytes": args.size_bytes, "calls": args.calls, "rounds": args.rounds, "uplinks": args.uplinks}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    session.need_ringdp()
    with session.make_hosts(args.place) as hosts:
        assert hosts is not None
        hosts.set_rate(args.slow, only=args.place.hosts - 1)
        rows, quiet = session.run(NAME, settings(args), args.place, hosts=hosts, timeout_s=args.timeout)
    return session.result_of(NAME, quiet, args.place, slow=args.slow, rows=rows)


def bound_s(wire_bytes: float, uplinks: Sequence[int], weights: Sequence[int]) -> float:
    """Of the linear program, whose solution `weights` is; empty: equal shares are as good."""
    shares = [weight / sum(weights) for weight in weights] or [1 / len(uplinks)] * len(uplinks)
    each = [(1 + (len(uplinks) - 2) * share) / rate for share, rate in zip(shares, uplinks, strict=True)]
    return wire_bytes * max(each)


def report(result: dict[str, Any]) -> str:
    rows = [
        [
            format_size(row["bytes"]),
            row["kind"],
            format_time(row["alike_s"]),
            format_time(row["map_s"]),
            format_time(row["bound_s"]),
            f"{row['alike_s'] / row['bound_s']:.2f}",
            f"{row['map_s'] / row['bound_s']:.2f}",
        ]
        for row in result["rows"]
    ]
    columns = ["size", "sent as", "without a map", "with it", "bound", "without / bound", "with / bound"]
    title = f"Unequal links, the last one of {result['slow']}"
    return session.text(result, title, table(columns, rows))


def main(argv: Sequence[str]) -> int:
    return session.main(sys.modules[__name__], NAME, argv)


# What each rank does.


def run_rank(joined: session.Joined) -> None:
    """Deliver a row for each size and kind: the seconds of a call without a map and with it, and the bound."""
    uplinks: list[int] = joined.settings["uplinks"]
    limits = {f"uplink.h{host}": rate for host, rate in enumerate(uplinks)}
    host_name = f"h{joined.rank * len(uplinks) // joined.world_size}"
    members = list(range(joined.world_size))
    groups, runtimes = {}, []
    for name, map_of in (("alike", {}), ("map", limits)):
        runtime, core = make_runtime(joined.rank, joined.world_size, name, table=map_of, host_name=host_name)
        runtimes.append(runtime)
        groups[name] = core.Group(runtime, name, members)
    weights = core.owner_weights(uplinks)

    def rows_of(size: int) -> list[dict[str, Any]]:
        kinds: dict[str, Callable[[Any, Any], Any]] = {
            "float32": lambda group, x: group.all_reduce(x, "float32", "AVG"),
            "int8": lambda group, x: group.all_reduce_compressed([x], [0], "int8")[0],
        }
        found = []
        for kind, call in kinds.items():
            _compare(call, groups, size)
            seconds: dict[str, list[float]] = {name: [] for name in groups}
            x = numpy.zeros(size // 4, numpy.float32)
            for _ in range(joined.settings["rounds"]):
                for name, group in groups.items():
                    dist.barrier()
                    for _ in range(joined.settings["calls"]):
                        start = perf_counter()
                        call(group, x).wait()
                        seconds[name].append(perf_counter() - start)
            row: dict[str, Any] = {"bytes": size, "kind": kind}
            for name, them in seconds.items():
                row[f"{name}_s"] = session.slowest(statistics.median(them))
            sent = size if kind == "float32" else core.codec_bytes("int8", size // 4)
            found.append(row | {"bound_s": bound_s(sent * WIRE_BYTES_PER_BYTE, uplinks, weights)})
        return found

    rows = []
    for size in joined.settings["size_bytes"]:
        joined.say(format_size(size))
        rows += rows_of(size)
    for group in groups.values():
        group.close()
    joined.deliver(rows)
    for runtime in runtimes:
        runtime.shut_down()


def _compare(call: Callable[[Any, Any], Any], groups: dict[str, Any], size: int) -> None:
    """Both ways give nearly the exact mean, and all ranks the same bits; else nothing is timed."""
    for group in groups.values():
        x = numpy.random.default_rng(dist.get_rank()).standard_normal(size // 4).astype(numpy.float32)
        exact = torch.from_numpy(x.copy())
        dist.all_reduce(exact)
        exact /= dist.get_world_size()
        call(group, x).wait()
        got = torch.from_numpy(x)
        error = ((got - exact).abs().max() / exact.abs().max()).item()
        first = got.clone()
        dist.broadcast(first, 0)
        if error > 0.05 or not torch.equal(first, got):
            raise RuntimeError(f"the mean is wrong: off by {error:.3f} of the largest one")
