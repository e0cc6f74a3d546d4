"""``python -m ringdp bench``: how fast all-reduce is here, and why."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from ringdp import config
from ringdp.ddp.words import format_size, format_time, parse_size, table
from ringdp.errors import RingError
from ringdp.tools.algorithm_table import algorithm, explain
from ringdp.tools.cost_model import HostLayout

SIZES = "4k,64k,1m,4m,25m"
DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64")
MIN_CALLS, MAX_CALLS = 3, 2000
_ABOUT = """\
Measure all-reduce (SUM) through torch.distributed on the backend ring, and print which algorithm ran.

  python -m ringdp bench --ranks 4                    on four ranks of this machine
  ringrun --nproc-per-node 2 -m ringdp bench          on the ranks of a launcher, also on several hosts
  python -m ringdp bench --explain --ranks 8 --hosts 4   starts nothing: which algorithm runs from which size on,
                                                      what it should take, and how many bytes cross a host's link

algbw is size / time, busbw algbw * 2(n-1)/n: what a link carries. GB are 10^9 bytes, KiB and MiB powers of 1024.
"""


def add_parser(commands: Any) -> None:
    """Add the command to the parsers of ``python -m ringdp``."""
    parser = commands.add_parser(
        "bench",
        help="how fast all-reduce is here; --explain: which algorithm runs, and why",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=2, help="ranks to start, or to explain (default 2)")
    parser.add_argument("--sizes", default=SIZES, type=_sizes, help=f"bytes to reduce, comma-separated ({SIZES})")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="type of the elements (float32)")
    parser.add_argument("--seconds", type=float, default=0.5, help="how long each size is measured (0.5)")
    parser.add_argument("--explain", action="store_true", help="start no ranks: print the table and the model")
    parser.add_argument("--hosts", type=int, help="with --explain: spread the ranks over that many hosts (default 1)")
    parser.add_argument("--cores", type=int, help="with --explain: cores of each host (default: this one's)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Do what was asked for; the exit code. Errors are printed as one sentence."""
    try:
        problem = _problem(args)
        if problem:
            sys.stderr.write(f"python -m ringdp bench: {problem}\n")
            return 2
        if args.explain:
            _explain(args)
        elif config.LaunchEnvironment.read() is not None:
            _measure_here(args)
        else:
            _measure_local(args)
    except RingError as error:
        sys.stderr.write(f"python -m ringdp bench: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _sizes(text: str) -> list[int]:
    try:
        return [parse_size(word) for word in text.split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _problem(args: argparse.Namespace) -> str | None:
    if args.ranks < 1:
        return f"--ranks must be 1 or more, not {args.ranks}"
    if args.seconds <= 0:
        return f"--seconds must be above 0, not {args.seconds:g}"
    if not args.explain and (args.hosts is not None or args.cores is not None):
        return "--hosts and --cores describe what --explain explains; to measure on several hosts start it with ringrun"
    if args.hosts is not None and not 1 <= args.hosts <= args.ranks:
        return f"--hosts must be 1 to {args.ranks}, the number of ranks, not {args.hosts}"
    if args.cores is not None and args.cores < 1:
        return f"--cores must be 1 or more, not {args.cores}"
    if any(size < 8 or size % 8 for size in args.sizes):
        return "a size must be a multiple of 8 bytes, and not 0"
    return None


def _explain(args: argparse.Namespace) -> None:
    place = HostLayout.spread(ranks=args.ranks, hosts=args.hosts or 1, cores=args.cores or _cores())
    tuning = config.RingConfig.from_environment().tuning
    sys.stdout.write(explain(place, args.dtype, args.sizes, tuning) + "\n")


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _measure_local(args: argparse.Namespace) -> None:
    """Start `--ranks` processes here and wait; the first that fails ends all."""
    import torch.multiprocessing

    with tempfile.TemporaryDirectory(prefix="ringdp-bench-") as folder:
        torch.multiprocessing.spawn(  # type: ignore[attr-defined]
            _local_rank, args=(args, f"file://{folder}/store"), nprocs=args.ranks
        )


def _local_rank(rank: int, args: argparse.Namespace, meet_at: str) -> None:
    import torch

    torch.set_num_threads(1)
    _measure_here(args, rank=rank, world_size=args.ranks, init_method=meet_at)


def _measure_here(args: argparse.Namespace, **place: Any) -> None:
    """Be one of the ranks; rank 0 prints."""
    import ringdp
    from ringdp.job.process_group import shutdown

    ringdp.init("ring", device="cpu", timeout=120, **place)
    try:
        _measure(args)
    finally:
        shutdown()


def _measure(args: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    settings = config.RingConfig.from_environment()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, config.host_identity(settings.host_id))
    place = _place(everyone)
    rows = []
    for size in args.sizes:
        x = torch.empty(size // getattr(torch, args.dtype).itemsize, dtype=getattr(torch, args.dtype))
        times = _time(x, args.seconds)
        median = statistics.median(times)
        algbw = size / median / 1e9
        busbw = algbw * 2 * (place.ranks - 1) / place.ranks
        cells = [format_size(size), format_time(median), format_time(max(times)), f"{algbw:.3g}", f"{busbw:.3g}"]
        rows.append([*cells, str(len(times)), algorithm(place, args.dtype, size, settings.tuning)])
    if dist.get_rank() != 0:
        return
    columns = ["size", "median", "slowest", "algbw GB/s", "busbw GB/s", "calls", "algorithm"]
    hosts = len(place.per_host)
    where = "one host" if hosts == 1 else f"{hosts} hosts"
    ranks = f"{place.ranks} rank{'s' if place.ranks > 1 else ''}"
    title = f"all-reduce, {args.dtype}, SUM, {ranks} on {where}; table: {settings.tuning.source}"
    sys.stdout.write(f"{title}\n\n{table(columns, rows)}\n")


def _place(host_of_rank: Sequence[str]) -> HostLayout:
    counts: dict[str, int] = {}
    for host in host_of_rank:
        counts[host] = counts.get(host, 0) + 1
    return HostLayout(tuple(counts.values()), _cores())


def _time(x: Any, seconds: float) -> list[float]:
    """Seconds of each call, those of the rank whose median is largest; ``x`` is checked before and after."""
    import torch
    import torch.distributed as dist

    def check(factor: int) -> None:
        x.fill_(1)
        dist.all_reduce(x)
        if not bool((x == factor).all()):
            raise RingError(f"all_reduce of ones gave {x.unique().tolist()[:3]}, not {factor}: nothing is timed")

    world = dist.get_world_size()
    check(world)
    x.zero_()  # stays 0, however often it is reduced
    start = time.perf_counter()
    for _ in range(MIN_CALLS):
        dist.all_reduce(x)
    slowest = torch.tensor([(time.perf_counter() - start) / MIN_CALLS], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    times = []
    for _ in range(max(MIN_CALLS, min(MAX_CALLS, int(seconds / slowest.item())))):
        start = time.perf_counter()
        dist.all_reduce(x)
        times.append(time.perf_counter() - start)
    check(world)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, times)
    return max(everyone, key=statistics.median)
