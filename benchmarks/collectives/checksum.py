#!/usr/bin/env python3
"""What RINGDP_CHECKSUM or RINGDP_HEAL costs: the same all-reduces over TCP with it and without, in pairs, in one run.

    python benchmarks/checksum.py                                    loopback, where the cores are the limit
    python benchmarks/checksum.py --ranks 4 --sizes 25m --meetings 10
    sudo python benchmarks/checksum.py --hosts 2 --rate 10gbit       a shaped link, as between two hosts
    python benchmarks/checksum.py --of healing                       connections that heal, or do not

The ranks meet anew several times, each time twice: with it and without, since one TCP connection is not as fast
as the next. A round is a block of calls over each of the two, which comes first alternates. A cost is the mean over the
meetings of the median over its rounds of one block's figure over the other's, less 1, with its 95 % interval: of the
time of a call (the slowest rank's median in the block), and of the CPU time, user and system, that all ranks together
take for one. The latter says more on a machine that has other work, and less where ranks poll. Before anything is timed
both must give the exact sum.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.lib import session
from benchmarks.lib.measure import format_size, format_time, interval, machine, parse_size, table

KINDS = ("without", "with")
FIGURES = ("seconds", "cpu_seconds")
LIMIT = 0.01  # above which it is not on by default
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "checksums": {"without": {"checksums": False}, "with": {"checksums": True}},
    "healing": {"without": {"heal_ms": 0}, "with": {"heal_ms": 4000}},
}

Rounds = list[dict[str, list[float]]]  # figures of each round: without, with


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", choices=list(OPTIONS), default="checksums", help="what is compared (default checksums)")
    parser.add_argument("--sizes", default="4k,1m,25m,100m", help="bytes to reduce, comma-separated")
    parser.add_argument("--meetings", type=int, default=6, help="how often the ranks connect anew (default 6)")
    parser.add_argument("--rounds", type=int, default=8, help="pairs of blocks for each size and meeting (default 8)")
    parser.add_argument("--block-seconds", type=float, default=0.2, help="about how long a block lasts")
    parser.add_argument("--json", metavar="FILE", help="write everything measured there, too")
    session.add_place_options(parser)
    args = parser.parse_args(argv)
    try:
        args.size_bytes = [parse_size(word) for word in args.sizes.split(",")]
        args.place = session.place_of(parser, args)
    except ValueError as error:
        parser.error(str(error))
    if any(size < 4 or size % 4 for size in args.size_bytes):
        parser.error("a size must be a positive multiple of 4 bytes")
    if args.meetings < 2 or args.rounds < 1:
        parser.error("at least two meetings and a round are needed: the spread is part of the result")
    if args.place.ranks < 2:
        parser.error("one rank sends nothing; at least two are needed")
    return args


def run_rank(path: str) -> None:
    import torch
    import torch.distributed as dist
    from benchmarks.collectives.allreduce_rank import agree_on_calls, check, make_core_runtime, values

    joined = session.join(path)
    settings = joined.settings
    options = OPTIONS[settings["of"]]
    measured: list[list[Rounds]] = [[] for _ in settings["size_bytes"]]  # by size, then by meeting
    for meeting in range(settings["meetings"]):
        runtimes, groups = [], []
        for kind in KINDS:
            runtime, core = make_core_runtime(joined, f"{kind}-{meeting}", transport="tcp", **options[kind])
            runtimes.append(runtime)
            groups.append(core.Group(runtime, kind, list(range(joined.world_size))))
        for found, size_bytes in zip(measured, settings["size_bytes"], strict=True):
            source = values(joined.rank, size_bytes // 4)
            total = torch.stack([values(rank, size_bytes // 4) for rank in range(joined.world_size)]).sum(0)
            for kind, group in zip(KINDS, groups, strict=True):
                x = source.clone()
                group.time_all_reduce(x.numpy(), "float32", 1)
                check(kind, x, total, rank=joined.rank, exact=True)
            x = torch.zeros_like(source)  # whose sum never grows; a checksum takes as long for any bytes
            count = agree_on_calls(min(groups[0].time_all_reduce(x.numpy(), "float32", 3)), settings["block_s"])
            rounds: Rounds = []
            for turn in range(settings["rounds"]):
                one = {figure: [0.0, 0.0] for figure in FIGURES}
                for i in (0, 1) if turn % 2 == 0 else (1, 0):
                    dist.barrier()
                    before = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
                    seconds = groups[i].time_all_reduce(x.numpy(), "float32", count)
                    dist.barrier()
                    one["cpu_seconds"][i] = (sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) - before) / count
                    one["seconds"][i] = statistics.median(seconds)
                rounds.append(one)
            everyone: list[Any] = [None] * joined.world_size
            dist.all_gather_object(everyone, rounds)
            found.append(over_ranks(everyone))
        dist.barrier()
        for runtime in runtimes:
            runtime.shut_down()
    rows = zip(settings["size_bytes"], measured, strict=True)
    joined.deliver([{"size_bytes": size_bytes, "meetings": found} for size_bytes, found in rows])


def over_ranks(everyone: Sequence[Rounds]) -> Rounds:
    """Per round: of times the slowest rank's, of CPU times the sum."""
    return [
        {
            "seconds": [max(one["seconds"][i] for one in ranks) for i in (0, 1)],
            "cpu_seconds": [sum(one["cpu_seconds"][i] for one in ranks) for i in (0, 1)],
        }
        for ranks in zip(*everyone, strict=True)
    ]


def cost(meetings: Sequence[Rounds], figure: str) -> tuple[float, float]:
    """What the second of each pair is above the first, as a share, and half the width of its 95 % interval."""
    return interval([statistics.median(one[figure][1] / one[figure][0] for one in rounds) - 1 for rounds in meetings])


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run everything and return what `--json` writes. Raises Unavailable, HostsError, RanksFailed."""
    if reason := session.why_no_ringdp():
        raise session.Unavailable(reason)
    settings = {"size_bytes": args.size_bytes, "meetings": args.meetings, "rounds": args.rounds, "of": args.of}
    settings["block_s"] = args.block_seconds
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(session.make_hosts(args.place))
        rows, quiet = session.run(__file__, settings, args.place, hosts=hosts, timeout_s=args.timeout)
    return {
        "benchmark": "checksum",
        "of": args.of,
        "machine": machine(),
        "place": asdict(args.place) | {"words": str(args.place)},
        "quiet": quiet.as_dict() | {"words": str(quiet)},
        "rows": [row | {f"{figure}_cost": cost(row["meetings"], figure) for figure in FIGURES} for row in rows],
    }


def report(result: dict[str, Any]) -> str:
    columns = ["size", "without", "with", "cost", "CPU without", "CPU with", "cost", f"below {LIMIT:.0%}?"]
    rows = []
    for row in result["rows"]:
        cells = [format_size(row["size_bytes"])]
        for figure in FIGURES:
            found = [one[figure] for rounds in row["meetings"] for one in rounds]
            cells += [format_time(statistics.median(pair[i] for pair in found)) for i in (0, 1)]
            mean, half = row[f"{figure}_cost"]
            cells.append(f"{mean:+.1%} ± {half:.1%}")
        mean, half = row["seconds_cost"]
        rows.append([*cells, "yes" if mean + half < LIMIT else "no" if mean - half > LIMIT else "not certain"])
    about = result["machine"]
    lines = [
        f"all-reduce over TCP, float32, SUM, {result['place']['words']}, with {result['of']} and without",
        f"{about['processor']}, {about['cores']} cores, Linux {about['kernel']}",
        "",
        table(columns, rows),
        "",
        result["quiet"]["words"],
    ]
    return "\n".join([*lines, *(f"WARNING: {warning}" for warning in result["quiet"]["warnings"])])


def main(argv: Sequence[str] | None = None) -> int:
    return session.main(parse(argv), run_rank, measure, report)


if __name__ == "__main__":
    sys.exit(main())
