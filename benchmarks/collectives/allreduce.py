#!/usr/bin/env python3
"""All-reduce of float32 sums: the backend `ring` against gloo and Open MPI, in the same processes and the same run.

    python benchmarks/allreduce.py --ranks 2 --sizes 4k,64k,1m,25m,100m --peers gloo,mpi,ceiling --json out.json
    python benchmarks/allreduce.py --ranks 2 --sizes 4k --peers none --core --percentiles 50,99,99.9 --busy 1
    sudo python benchmarks/allreduce.py --hosts 4 --rate 1gbit --sizes 25m
    sudo python benchmarks/allreduce.py --hosts 4 --rate 1gbit --sizes 102400000 --peers gloo --compressed int8,int4
    sudo python benchmarks/allreduce.py --hosts 4 --rate 1gbit --model mlp --peers none --compressed powersgd

The ranks are started once. For each size every backend must first give the exact sum; then blocks of calls alternate
between the backends, so that whatever the machine does hits them alike, and the end of every block is checked again.
A time is that of the slowest rank. algbw = size / time; busbw = algbw * 2(n-1)/n, what each rank must send
(https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md). GB are 10^9 bytes, KiB and MiB powers of 1024.
Between hosts it also prints the bytes that left each interface against 2(h-1)/h of the size, the least that h hosts can
send, and the share of iperf3's goodput that was reached. `--compressed` adds the mean through compressors by their
names: for codecs that the core has, the length of the code then takes the place of the size; for others it is RingDP's
exchange of buckets up to 25 MiB, on matrices of 2048 x 2048 elements or on the parameters of `--model`, and its bytes
depend on the elements.

`ceiling` is a loop through shared memory written for nothing but speed (ceiling.cpp), compiled on the spot: what the
machine can do. `core` is the C++ call alone, timed in C++, without torch around it.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.collectives import ceiling
from benchmarks.lib import goodput
from benchmarks.lib import models
from benchmarks.lib import mpi
from benchmarks.lib import session
from benchmarks.lib.hosts import INTERFACE
from benchmarks.lib.measure import Summary, busy_processes, format_size, format_time, machine, parse_size, table

PEERS = ("gloo", "mpi", "ceiling")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="4k,64k,1m,25m,100m", help="bytes to reduce, comma-separated")
    parser.add_argument("--peers", default="gloo,mpi", help="to compare with: of gloo, mpi, ceiling; or none")
    parser.add_argument("--compressed", metavar="NAME,NAME", default="", help="also through these: int8, topk, …")
    parser.add_argument("--model", choices=models.NAMES, help="instead of --sizes: as many elements as that has")
    parser.add_argument("--without-ring", action="store_true", help="measure the peers alone")
    parser.add_argument("--core", action="store_true", help="measure the C++ call without torch, too")
    parser.add_argument("--percentiles", metavar="P,P", default="", help="more of them beside the median: 90,99.9")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="N processes compute beside the ranks")
    parser.add_argument("--busy-cores", default="", metavar="C,C", help="pin them to these cores, in turn")
    parser.add_argument("--huge-pages", action="store_true", help="ask for huge pages under the tensors, for all alike")
    parser.add_argument("--asynchronous", action="store_true", help="call with async_op=True, then wait()")
    parser.add_argument("--mpi-tcp", action="store_true", help="let Open MPI use TCP on loopback too, no shared memory")
    parser.add_argument("--rounds", type=int, default=7, help="blocks of calls for each backend and size (default 7)")
    parser.add_argument("--block-seconds", type=float, default=0.25, help="about how long a block lasts")
    parser.add_argument("--iperf-seconds", type=float, default=3.0, help="how long iperf3 measures; 0 leaves it out")
    parser.add_argument("--json", metavar="FILE", help="write everything measured there, too")
    session.add_place_options(parser)
    args = parser.parse_args(argv)
    try:
        args.size_bytes = [parse_size(word) for word in args.sizes.split(",")]
        args.place = session.place_of(parser, args)
        args.shares = {word: float(word) / 100 for word in args.percentiles.split(",") if word}
        args.core_numbers = [int(word) for word in args.busy_cores.split(",") if word]
    except ValueError as error:
        parser.error(str(error))
    args.peer_names = [] if args.peers == "none" else args.peers.split(",")
    args.codec_names = [name for name in args.compressed.split(",") if name]
    unknown = (set(args.peer_names) - set(PEERS)) | _unknown_compressors(args.codec_names)
    if args.model:
        args.size_bytes = [4 * models.make(args.model, rank=0).numel]
    if unknown or any(size < 4 or size % 4 for size in args.size_bytes):
        parser.error(
            f"unknown peers or codecs: {unknown}" if unknown else "a size must be a positive multiple of 4 bytes"
        )
    if args.rounds < 1 or args.busy < 0:
        parser.error("at least one round is needed, and not fewer than 0 busy processes")
    if any(not 0 <= share <= 1 for share in args.shares.values()):
        parser.error("a percentile lies between 0 and 100")
    return args


def _unknown_compressors(names: Sequence[str]) -> set[str]:
    if not names or session.why_no_ringdp():  # which `measure` will say
        return set()
    from ringdp import compression

    return set(names) - set(compression.names())


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run everything and return what `--json` writes. Raises Unavailable, HostsError, NoGoodput, RanksFailed."""
    missing: dict[str, str] = {}
    if "mpi" in args.peer_names and (reason := mpi.why_not()):
        missing["mpi"] = reason
    if not args.without_ring and (reason := session.why_no_ringdp()):
        raise session.Unavailable(f"{reason}; --without-ring measures the peers alone")
    place = args.place
    if "ceiling" in args.peer_names and (reason := ceiling.why_not(ranks=place.ranks, hosts=place.hosts)):
        missing["ceiling"] = reason
    ours = [] if args.without_ring else ["ring", "core"] if args.core else ["ring"]
    ours += [f"ring-{name}" for name in args.codec_names]
    backends = ours + [name for name in args.peer_names if name not in missing]
    if not backends:
        raise session.Unavailable("nothing is left to measure: " + "; ".join(missing.values()))
    settings = {
        "backends": backends,
        "size_bytes": args.size_bytes,
        "rounds": args.rounds,
        "block_s": args.block_seconds,
        "asynchronous": args.asynchronous,
        "interface": INTERFACE if args.place.hosts else None,
        "model": args.model,
        "shares": args.shares,
        "huge_pages": args.huge_pages,
    }
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(session.make_hosts(args.place))
        if "ceiling" in backends or args.huge_pages:
            settings["ceiling"] = stack.enter_context(ceiling.prepared())
        line = goodput.measure(hosts, seconds=args.iperf_seconds) if hosts and args.iperf_seconds else None
        stack.enter_context(busy_processes(args.busy, cores=args.core_numbers))
        rows, quiet = session.run(
            __file__,
            settings,
            args.place,
            hosts=hosts,
            under_mpi="mpi" in backends,
            mpi_only_tcp=args.mpi_tcp,
            timeout_s=args.timeout,
        )
    return {
        "benchmark": "allreduce",
        "machine": machine(),
        "place": asdict(args.place) | {"words": str(args.place)},
        "busy": args.busy,
        "busy_cores": args.core_numbers,
        "huge_pages": args.huge_pages,
        "calls": "asynchronous" if args.asynchronous else "synchronous",
        "mpi_transport": "tcp" if args.mpi_tcp or args.place.hosts else "its own choice (shared memory on one host)",
        "quiet": quiet.as_dict() | {"words": str(quiet)},
        "goodput_bytes_per_s": asdict(line) if line else None,
        "missing": missing,
        "rows": [add_derived(row, args.place, line) for row in rows],
    }


def add_derived(row: dict[str, Any], place: session.Place, line: goodput.Goodput | None) -> dict[str, Any]:
    """The row with bandwidths in bytes/s, bytes sent against theory, and the shares of the line's goodput reached."""
    ranks, median_s = place.ranks, row["time"]["median_s"]
    algbw = row["size_bytes"] / median_s
    busbw = algbw * 2 * (ranks - 1) / ranks
    extra: dict[str, Any] = {"algbw": algbw, "busbw": busbw}
    if place.hosts > 1 and "wire_bytes" in row:
        least = 2 * (place.hosts - 1) / place.hosts * row["wire_bytes"]
        extra["sent_over_theory"] = max(row["sent_bytes_per_call"]) / least
        if line is not None:
            extra["share_one_way"] = least / median_s / line.one_way
            extra["share_both_ways"] = least / median_s / line.both_ways
    return row | extra


def report(result: dict[str, Any]) -> str:
    """The result as text."""
    between_hosts = any(row["sent_bytes_per_call"] for row in result["rows"])
    line = result["goodput_bytes_per_s"]
    columns = ["size", "backend", "median", "p99", "min", "algbw GB/s", "busbw GB/s", "time / ring", "calls"]
    words = list(result["rows"][0]["percentiles_s"]) if result["rows"] else []
    columns += [f"p{word}" for word in words]
    columns += ["sent, MB", "sent / theory"] if between_hosts else []
    columns += ["of iperf3", "of iperf3 both ways"] if line else []
    ours = {row["size_bytes"]: row["time"]["median_s"] for row in result["rows"] if row["backend"] == "ring"}
    rows = []
    for row in result["rows"]:
        time, ring_s = Summary(**row["time"]), ours.get(row["size_bytes"])
        cells = [format_size(row["size_bytes"]), row["backend"]]
        cells += [format_time(value) for value in (time.median_s, time.p99_s, time.min_s)]
        cells += [f"{row['algbw'] / 1e9:.3g}", f"{row['busbw'] / 1e9:.3g}"]
        cells += [f"{time.median_s / ring_s:.2f}" if ring_s else "", str(time.count)]
        cells += [format_time(row["percentiles_s"][word]) for word in words]
        cells += [f"{max(row['sent_bytes_per_call']) / 1e6:.4g}"] if between_hosts else []
        cells += [f"{row['sent_over_theory']:.3f}" if "sent_over_theory" in row else ""] if between_hosts else []
        cells += (
            [f"{row[key]:.1%}" if key in row else "" for key in ("share_one_way", "share_both_ways")] if line else []
        )
        rows.append(cells)
    for name, reason in result["missing"].items():
        rows.append(["", name, reason, *[""] * (len(columns) - 3)])
    about = result["machine"]
    lines = [
        f"all-reduce, float32, SUM, {result['place']['words']}, {result['calls']} calls",
        f"{about['processor']}, {about['cores']} cores, Linux {about['kernel']}, torch {about['torch']}",
    ]
    if result["busy"]:
        pinned = f", pinned to cores {result['busy_cores']}" if result["busy_cores"] else ""
        lines.append(f"beside {result['busy']} busy processes{pinned}")
    if line:
        both = line["both_ways"] * 8 / 1e6
        lines.append(f"iperf3: {line['one_way'] * 8 / 1e6:.0f} Mbit/s one way, {both:.0f} Mbit/s each way both at once")
    elif between_hosts:
        lines.append("no goodput to compare with: iperf3 is not installed, or was left out")
    lines += ["", table(columns, rows), "", result["quiet"]["words"]]
    lines += [f"WARNING: {warning}" for warning in result["quiet"]["warnings"]]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.as_rank:
        from benchmarks.collectives.allreduce_rank import run_rank

        run_rank(args.as_rank)
        return 0
    return session.command_line(args, measure, report, cannot=(goodput.NoGoodput, ceiling.CeilingUnavailable))


if __name__ == "__main__":
    sys.exit(main())
