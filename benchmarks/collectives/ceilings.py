"""How far ringdp is from what this machine can do: one table, from everything else's figures.

    python -m benchmarks ceilings
    sudo python -m benchmarks ceilings --parts tcp,compressed --rate 1gbit
    python -m benchmarks ceilings --parts allreduce --ranks 2 --sizes 4k --rounds 15 --json out.json

Parts, each of which runs another benchmark, with ringdp and its ceiling in the same processes and in turns:

    allreduce   `allreduce`: through torch and the core's own call, beside a loop through shared memory (ceiling.cpp)
    step        `step`: what RingDP adds to a bare step, beside that loop over the buckets of the same bytes
    tcp         `allreduce` over TCP on loopback, beside a ring over plain sockets (socket_ring.cpp), and beside what
                iperf3 carries both ways at once
    compressed  `allreduce --compressed` between two hosts (root), beside encoding, the line by iperf3, and decoding,
                one after the other: below 1 where they overlap

Medians. A ceiling has no errors, no progress beside it, and ranks that hang when one dies: nobody ships it. Where other
programs use the cores it says little: it waits by spinning and yielding, and what yields waits longest.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from benchmarks.collectives import allreduce, ceiling
from benchmarks.compression import kernels
from benchmarks.lib import goodput, session
from benchmarks.lib.hosts import HostsError
from benchmarks.lib.measure import Quiet, format_size, format_time, parse_size, table
from benchmarks.lib.ranks import Unavailable
from benchmarks.training import step

LOOP, SOCKETS = "hand-written loop", "hand-written ring over sockets"
COMPRESSED_BYTES = 25 << 20


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--ranks", default="2,4,8", help="of one host, for allreduce (default 2,4,8)")
    parser.add_argument("--sizes", default="4k,1m,25m,100m", help="bytes to reduce (default 4k,1m,25m,100m)")
    parser.add_argument("--models", default="mlp,gpt,small", help="for step (default mlp,gpt,small)")
    parser.add_argument("--codecs", default="int8,int4", help="for compressed (default int8,int4)")
    parser.add_argument("--rate", default="1gbit", help="of each host's link, for compressed (default 1gbit)")
    parser.add_argument("--rounds", type=int, default=5, help="blocks of each contender (default 5)")


def check(args: argparse.Namespace) -> None:
    args.part_names = session.chosen(args.parts, tuple(PARTS))
    args.rank_counts = [int(word) for word in args.ranks.split(",")]
    args.size_bytes = [parse_size(word) for word in args.sizes.split(",")]
    args.codec_names = session.chosen(args.codecs, kernels.CODECS)
    session.at_least(1, rounds=args.rounds)
    session.at_least(2, ranks=min(args.rank_counts))


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The table so far, each time there is more."""
    session.need_ringdp()
    rows: list[dict[str, Any]] = []
    quiet = Quiet.start()
    for part in args.part_names:
        try:
            for found in PARTS[part](args):
                rows += found
                quiet.stop(ranks_s=0.0)
                yield session.result_of("ceilings", quiet, rows=rows)
        except (Unavailable, HostsError) as reason:
            rows.append({"part": part, "what": f"cannot be measured here: {reason}"})
            yield session.result_of("ceilings", quiet, rows=rows)


def row(part: str, what: str, ours_s: float, ceiling_s: float, ceiling_is: str) -> dict[str, Any]:
    ratio = ours_s / ceiling_s
    return {"part": part, "what": what, "ours_s": ours_s, "ceiling_s": ceiling_s, "is": ceiling_is, "ratio": ratio}


# The parts.


def _all_reduces(*options: str) -> dict[tuple[int, str], float]:
    """Median seconds by size and contender."""
    found = allreduce.measure(session.parse(allreduce, options, "allreduce"))
    return {(it["size_bytes"], it["backend"]): it["time"]["median_s"] for it in found["rows"]}


def of_all_reduce(args: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    for ranks in args.rank_counts:
        if reason := ceiling.why_not(ranks=ranks, hosts=0):
            raise Unavailable(reason)
        found = _all_reduces(
            "--ranks", str(ranks), "--sizes", args.sizes, "--peers", "core,ceiling", "--rounds", str(args.rounds)
        )  # fmt: skip
        words = {"ring": "through torch", "core": "the core's call"}
        yield [
            row("allreduce", f"{ranks} ranks, {format_size(size)}, {word}",
                found[size, name], found[size, "ceiling"], LOOP)
            for size in args.size_bytes
            for name, word in words.items()
        ]  # fmt: skip


def of_steps(args: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    given = ["--modes", "bare,ringdp", "--models", args.models, "--rounds", str(args.rounds)]
    found = step.measure(session.parse(step, given, "step"))
    yield [
        row("step", f"{it['model']}: step beyond the bare one", it["exposed_s"], it["loop"]["median_s"], LOOP)
        for it in found["rows"]
        if it["mode"] == "ringdp" and it["loop"]
    ]


def of_tcp(args: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    with mock.patch.dict(os.environ, RINGDP_TRANSPORT="tcp"):
        found = _all_reduces("--sizes", args.sizes, "--peers", "sockets", "--rounds", str(args.rounds))
    line = goodput.measure(None, seconds=3.0)
    rows = []
    for size in args.size_bytes:
        ours_s, what = found[size, "ring"], f"2 ranks, {format_size(size)}"
        rows.append(row("tcp", what, ours_s, found[size, "sockets"], SOCKETS))
        if line is not None and size >= 1 << 20:
            rows.append(row("tcp", what, ours_s, size / line.both_ways, "bytes by iperf3, both ways at once"))
    yield rows


def of_compressed(args: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    rates = _codec_rates(args.codec_names)
    given = ["--hosts", "2", "--rate", args.rate, "--sizes", str(COMPRESSED_BYTES), "--peers", "none"]
    given += ["--compressed", ",".join(args.codec_names), "--rounds", str(args.rounds)]
    found = allreduce.measure(session.parse(allreduce, given, "allreduce"))
    line = found["goodput_bytes_per_s"]
    if line is None:
        raise Unavailable("iperf3 is not installed")
    rows = []
    for it in found["rows"]:
        name = it["backend"].removeprefix("ring+")
        if name in rates:
            # Each rank encodes the other's half, adds the other's code to its own, encodes the sum and decodes a half.
            passes = rates[name]
            half = COMPRESSED_BYTES / 2
            work_s = sum(half / passes[word] for word in ("compress+feedback", "decode+add", "compress", "decode"))
            line_s = min(it["sent_bytes_per_call"]) / line["both_ways"]
            what = f"{name}, 2 hosts, {args.rate}, {format_size(COMPRESSED_BYTES)}"
            rows.append(row("compressed", what, it["time"]["median_s"], work_s + line_s, "encode + line + decode"))
    yield rows


def _codec_rates(names: list[str]) -> dict[str, dict[str, float]]:
    """Bytes of float32 a second, by codec and pass."""
    given = ["--codecs", ",".join(names), "--size", str(COMPRESSED_BYTES), "--rounds", "5"]
    found = kernels.measure(session.parse(kernels, given, "kernels"))
    rates: dict[str, dict[str, float]] = {name: {} for name in names}
    for it in found["rows"]:
        if it["codec"] in rates:
            rates[it["codec"]][it["pass"]] = it["bytes_per_s"]
    return rates


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[list[dict[str, Any]]]]] = {
    "allreduce": of_all_reduce, "step": of_steps, "tcp": of_tcp, "compressed": of_compressed
}  # fmt: skip


def report(result: dict[str, Any]) -> str:
    lines = [
        [
            it["part"],
            it["what"],
            format_time(it["ours_s"]),
            format_time(it["ceiling_s"]),
            f"{it['ratio']:.2f}",
            it["is"],
        ]
        if "ratio" in it
        else [it["part"], it["what"], "", "", "", ""]
        for it in result["rows"]
    ]
    columns = ["benchmark", "what", "ringdp", "ceiling", "×", "the ceiling is"]
    return session.text(result, "ringdp beside what this machine can do", table(columns, lines))
