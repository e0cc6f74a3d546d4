#!/usr/bin/env python3
"""All-reduce of GPU tensors through pinned memory and the ring, against what bounds it, measured in the same run.

    python benchmarks/staging.py --ranks 2 --sizes 1m,25m,100m --json out.json

All ranks share the machine's GPUs, by their local rank. For each size: a copy to pinned memory and one back, all ranks
at once; the all-reduce of a CPU tensor over `ring`; and that of a GPU tensor, which copies, exchanges and adds piece by
piece. These overlap, so the slowest of the first three bounds the fourth: the share reached of it is printed. The sums
are checked before anything is timed. A time is that of the slowest rank, the median of its calls.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from time import perf_counter
from typing import Any

from benchmarks.lib import session
from benchmarks.lib.measure import Summary, format_size, format_time, machine, parse_size, table

BOUNDS = ("to the host", "to the GPU", "CPU ring")
STAGED = "GPU through ring"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="1m,25m,100m", help="bytes to reduce, comma-separated")
    parser.add_argument("--calls", type=int, default=30, help="timed calls of each kind and size (default 30)")
    parser.add_argument("--json", metavar="FILE", help="write everything measured there, too")
    session.add_place_options(parser)
    args = parser.parse_args(argv)
    try:
        args.size_bytes = [parse_size(word) for word in args.sizes.split(",")]
        args.place = session.place_of(parser, args)
    except ValueError as error:
        parser.error(str(error))
    if args.calls < 1 or any(size < 4 or size % 4 for size in args.size_bytes):
        parser.error("at least one call is needed, and sizes that are positive multiples of 4 bytes")
    if args.place.hosts:
        parser.error("the ranks are on one host here: leave --hosts out")
    return args


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run everything and return what `--json` writes. Raises Unavailable, RanksFailed."""
    if reason := session.why_no_ringdp():
        raise session.Unavailable(reason)
    import torch

    if not torch.cuda.is_available():
        raise session.Unavailable("there is no GPU here that torch can use: nothing is staged")
    settings = {"size_bytes": args.size_bytes, "calls": args.calls}
    rows, quiet = session.run(__file__, settings, args.place, hosts=None, timeout_s=args.timeout)
    return {
        "benchmark": "staging",
        "machine": machine() | {"gpu": torch.cuda.get_device_name(0), "gpus": torch.cuda.device_count()},
        "place": asdict(args.place) | {"words": str(args.place)},
        "quiet": quiet.as_dict() | {"words": str(quiet)},
        "rows": rows,
    }


def report(result: dict[str, Any]) -> str:
    """The result as text."""
    about = result["machine"]
    rows = []
    for row in result["rows"]:
        cells = [format_size(row["size_bytes"])] + [format_time(row["median_s"][name]) for name in (*BOUNDS, STAGED)]
        rows.append([*cells, f"{row['share']:.0%}"])
    lines = [
        f"all-reduce of GPU tensors, float32, SUM, {result['place']['words']}, {about['gpus']} x {about['gpu']}",
        f"{about['processor']}, {about['cores']} cores, Linux {about['kernel']}, torch {about['torch']}",
        "",
        table(["size", *BOUNDS, STAGED, "of the slowest bound"], rows),
        "",
        result["quiet"]["words"],
    ]
    return "\n".join(lines + [f"WARNING: {warning}" for warning in result["quiet"]["warnings"]])


def run_rank(path: str) -> None:
    joined = session.join(path)
    import torch
    import torch.distributed as dist

    import ringdp  # noqa: F401  # registers the backend

    device = torch.device("cuda", joined.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    group = dist.new_group(backend="ring")

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
        median = torch.tensor([Summary.of(seconds[2:]).median_s], dtype=torch.float64)
        dist.all_reduce(median, op=dist.ReduceOp.MAX)
        return float(median)

    rows = []
    for size_bytes in joined.settings["size_bytes"]:
        source = torch.arange(size_bytes // 4, dtype=torch.int32).remainder(97).float() + joined.rank
        on_host, on_gpu, pinned = source.clone(), source.to(device), torch.empty_like(source).pin_memory()
        dist.all_reduce(on_host, group=group)
        dist.all_reduce(on_gpu, group=group)
        total = (source - joined.rank) * joined.world_size + sum(range(joined.world_size))
        if not (torch.equal(on_host, total) and torch.equal(on_gpu.cpu(), total)):
            raise RuntimeError(f"a wrong sum on rank {joined.rank}; nothing is timed")
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
        if joined.rank == 0:
            figures = ", ".join(f"{name} {format_time(seconds)}" for name, seconds in median_s.items())
            print(f"… {format_size(size_bytes)}: {figures}", file=sys.stderr, flush=True)
    joined.deliver(rows)


def main(argv: Sequence[str] | None = None) -> int:
    return session.main(parse(argv), run_rank, measure, report)


if __name__ == "__main__":
    sys.exit(main())
