"""All-reduce of GPU tensors through pinned memory and the ring, against what bounds it, measured in the same run.

    python -m benchmarks staging --ranks 2 --sizes 1m,25m,100m --json out.json

All ranks share the machine's GPUs, by their local rank. For each size: a copy to pinned memory and one back, all ranks
at once; the all-reduce of a CPU tensor over `ring`; and that of a GPU tensor, which copies, exchanges and adds piece by
piece. These overlap, so the slowest of the first three bounds the fourth: the share reached of it is printed. The sums
are checked before anything is timed. A time is that of the slowest rank, the median of its calls.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.lib import session
from benchmarks.lib.measure import Summary, format_size, format_time, parse_size
from benchmarks.lib.ranks import Failed, Unavailable

BOUNDS = ("to the host", "to the GPU", "CPU ring")
STAGED = "GPU through ring"


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", default="1m,25m,100m", help="bytes to reduce, comma-separated")
    parser.add_argument("--calls", type=int, default=30, help="timed calls of each kind and size (default 30)")


def check(args: argparse.Namespace) -> None:
    args.size_bytes = [parse_size(word) for word in args.sizes.split(",")]
    session.at_least(1, calls=args.calls)
    if any(size < 4 or size % 4 for size in args.size_bytes):
        raise ValueError("sizes must be positive multiples of 4 bytes")
    if args.place.hosts:
        raise ValueError("the ranks are on one host here: leave --hosts out")


def settings(args: argparse.Namespace) -> dict[str, Any]:
    if not torch.cuda.is_available():
        raise Unavailable("there is no GPU here that torch can use: nothing is staged")
    return {"size_bytes": args.size_bytes, "calls": args.calls}


def report(result: dict[str, Any]) -> str:
    rows = []
    for row in result["rows"]:
        cells = [format_size(row["size_bytes"])] + [format_time(row["median_s"][name]) for name in (*BOUNDS, STAGED)]
        rows.append([*cells, f"{row['share']:.0%}"])
    title = f"all-reduce of GPU tensors, float32, SUM, {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return session.report_table(result, title, ["size", *BOUNDS, STAGED, "of the slowest bound"], rows)


def run_rank(joined: session.Joined) -> None:
    device = torch.device("cuda", joined.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    group = session.ring_group()

    def slowest(call: Callable[[], None]) -> float:
        """The median of so many calls on the slowest rank, all ranks starting together each time."""
        seconds = []
        for _ in range(joined.settings["calls"] + 2):
            torch.cuda.synchronize(device)
            dist.barrier()
            start = perf_counter()
            call()
            torch.cuda.synchronize(device)
            seconds.append(perf_counter() - start)
        return session.slowest(Summary.of(seconds[2:]).median_s)

    rows = []
    for size_bytes in joined.settings["size_bytes"]:
        source = torch.arange(size_bytes // 4, dtype=torch.int32).remainder(97).float() + joined.rank
        on_host, on_gpu, pinned = source.clone(), source.to(device), torch.empty_like(source).pin_memory()
        dist.all_reduce(on_host, group=group)
        dist.all_reduce(on_gpu, group=group)
        total = (source - joined.rank) * joined.world_size + sum(range(joined.world_size))
        if not (torch.equal(on_host, total) and torch.equal(on_gpu.cpu(), total)):
            raise Failed(f"a wrong sum on rank {joined.rank}; nothing is timed")
        on_host.zero_()
        on_gpu.zero_()  # sums of zeros stay what they are, however often they are taken

        def to_host(to: Any = pinned, gpu: Any = on_gpu) -> None:
            to.copy_(gpu, non_blocking=True)

        def to_gpu(gpu: Any = on_gpu, host: Any = pinned) -> None:
            gpu.copy_(host, non_blocking=True)

        def ring(x: Any = on_host) -> None:
            dist.all_reduce(x, group=group)

        def staged(x: Any = on_gpu) -> None:
            dist.all_reduce(x, group=group)

        calls: list[Callable[[], None]] = [to_host, to_gpu, ring, staged]
        median_s = {name: slowest(call) for name, call in zip((*BOUNDS, STAGED), calls, strict=True)}
        share = max(median_s[name] for name in BOUNDS) / median_s[STAGED]
        rows.append({"size_bytes": size_bytes, "median_s": median_s, "share": share})
        figures = ", ".join(f"{name} {format_time(seconds)}" for name, seconds in median_s.items())
        joined.say(f"{format_size(size_bytes)}: {figures}")
    joined.deliver(rows)
