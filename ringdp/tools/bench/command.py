"""The command line of ``python -m ringdp bench``."""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from ringdp import config
from ringdp.costs import HostLayout
from ringdp.errors import InvalidArgumentError, RingError
from ringdp.tools import starting
from ringdp.tools.algorithm_table import algorithm, explain
from ringdp.tools.option_types import size

SIZES = "4k,64k,1m,4m,25m"
DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64")
OPERATIONS = ("sum", "avg", "max", "min")
BACKENDS = ("ring", "gloo", "nccl")
NAMES = (
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter", "all_to_all", "send_recv",
    "barrier",
)  # fmt: skip
MOST_SIZES = 64
AFTER_FAILURE_S = 10.0
"""Seconds that ranks of this host have to end when one of them has failed."""

_ABOUT = """\
Measure collectives through torch.distributed, with nccl-tests' columns, side by side, and compare their results.

  python -m ringdp bench -n 4                             all-reduce on four ranks of this host
  python -m ringdp bench -n 2 --backend ring,gloo         beside gloo, in turns
  python -m ringdp bench -n 2 --codec int8,topk           beside compressors: bytes on the wire, error, time
  python -m ringdp bench -n 2 --collective all -b 1k -e 16m -f 4 --check
  python -m ringdp bench -H node1:4,node2:4 --json out.json
  ringrun --nproc-per-node 2 -m ringdp bench              on the ranks of a launcher, also on several hosts
  python -m ringdp bench --explain --ranks 8 --hosts 4    starts nothing: which algorithm runs from which size on,
                                                          what it should take, and how many bytes cross a host's link

The size is that of the larger of a rank's input and output; algbw is size / time, busbw algbw times what a link carries
of it: 2(n-1)/n for all_reduce, (n-1)/n for all_gather, reduce_scatter, gather, scatter and all_to_all, else 1. GB are
10^9 bytes, KiB and MiB powers of 1024. Times are those of the slowest rank: the median of blocks, ± half of the
distance between the fastest and the slowest block. A result is compared before it is timed, and not timed if wrong: the
exit code is then 1.
"""


def add_parsers(commands: Any) -> None:
    """Add the command to the parsers of ``python -m ringdp``."""
    parser = commands.add_parser(
        "bench",
        help="how fast collectives are here, beside other backends and compressors; --explain: which algorithm and why",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    starting.add_options(parser.add_argument_group("ranks (default: a launcher's, or two on this host)"))
    what = parser.add_argument_group("what")
    what.add_argument("--collective", default="all_reduce", type=_collectives, help=f"all, or of {', '.join(NAMES)}")
    what.add_argument("--backend", default="ring", type=_backends, help="of ring, gloo, nccl; comma-separated (ring)")
    what.add_argument("--codec", default=[], type=_split, help="also ring with these compressors: int8,topk,powersgd")
    what.add_argument("--sizes", type=_sizes, help=f"bytes, comma-separated ({SIZES}), or:")
    what.add_argument("-b", "--begin", type=size, metavar="SIZE", help="the first size")
    what.add_argument("-e", "--end", type=size, metavar="SIZE", help="the last size")
    what.add_argument("-f", "--step-factor", type=float, metavar="F", help="each size is F times the last (2)")
    what.add_argument("-i", "--step-bytes", type=size, metavar="SIZE", help="each size is so many bytes larger")
    what.add_argument("--dtype", default="float32", choices=DTYPES, help="type of the elements (float32)")
    what.add_argument("--op", default="sum", choices=OPERATIONS, help="how reductions reduce (sum)")
    what.add_argument("--root", type=int, default=0, help="of broadcast, reduce, gather and scatter (0)")
    what.add_argument("--device", choices=("cpu", "cuda"), help="of the tensors (cuda with nccl, else cpu)")
    how = parser.add_argument_group("how")
    how.add_argument("--seconds", type=float, default=0.5, help="how long each size is measured (0.5)")
    how.add_argument("--iters", type=int, metavar="N", help="calls in a block, instead of --seconds")
    how.add_argument("--warmup", type=int, default=5, metavar="N", help="calls before the first block (5)")
    how.add_argument("--rounds", type=int, default=5, metavar="N", help="blocks of each, in turns (5)")
    how.add_argument("--check", action="store_true", help="compare results again after each block")
    out = parser.add_argument_group("output")
    out.add_argument("--json", metavar="FILE", help="write everything there; - prints it instead of the table")
    model = parser.add_argument_group("the model")
    model.add_argument("--explain", action="store_true", help="start no ranks: print the table and the model")
    model.add_argument(
        "--hosts", type=int, metavar="N", help="with --explain: spread the ranks over N hosts (default 1)"
    )
    model.add_argument(
        "--cores", type=int, metavar="N", help="with --explain: cores of each host (default: this one's)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit code. Errors are printed as one sentence."""
    try:
        problem = _problem(args)
        if problem:
            sys.stderr.write(f"python -m ringdp bench: {problem}\n")
            return 2
        if args.explain:
            _explain(args)
            return 0
        if config.launch_environment() is not None:
            return _measure_here(args)
        if args.host_list is not None or args.hostfile is not None:
            return starting.launch("bench", args.argv)
        return _measure_local(args)
    except RingError as error:
        sys.stderr.write(f"python -m ringdp bench: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def _problem(args: argparse.Namespace) -> str | None:
    """The problem with the command line; None without one. The same on all ranks."""
    if problem := starting.problem(args):
        return problem
    if not 0 < args.seconds < math.inf:
        return f"--seconds must be above 0, and finite, not {args.seconds:g}"
    for name in ("iters", "warmup", "rounds"):
        if (number := getattr(args, name)) is not None and number < (0 if name == "warmup" else 1):
            return f"--{name} must be {0 if name == 'warmup' else 1} or more, not {number}"
    ranks = args.ranks or 2
    if not args.explain and (args.hosts is not None or args.cores is not None):
        return "--hosts and --cores describe what --explain explains; -H names the hosts to measure on"
    if args.hosts is not None and not 1 <= args.hosts <= ranks:
        return f"--hosts must be 1 to {ranks}, the number of ranks, not {args.hosts}"
    if args.cores is not None and args.cores < 1:
        return f"--cores must be 1 or more, not {args.cores}"
    if args.op == "avg" and args.dtype.startswith("int"):
        return "an average of whole numbers is rounded in other ways by other backends: use --op sum"
    if args.codec and (args.dtype != "float32" or args.op not in ("sum", "avg") or "all_reduce" not in args.collective):
        return "--codec measures the all-reduce of float32: leave out --dtype and --op"
    if "nccl" in args.backend and args.device == "cpu":
        return "nccl moves CUDA tensors only: leave out --device cpu"
    try:
        sizes = sizes_of(args)
    except ValueError as error:
        return str(error)
    if any(size < 8 or size % 8 for size in sizes):
        return "a size must be a multiple of 8 bytes, and not 0"
    return None


def sizes_of(args: argparse.Namespace) -> list[int]:
    """In bytes. Raises ValueError for flags that do not make a list."""
    stepped = [args.begin, args.end, args.step_factor, args.step_bytes]
    if args.sizes is not None:
        if any(it is not None for it in stepped):
            raise ValueError("--sizes names all sizes: leave out --begin, --end and the steps")
        return list(args.sizes)
    if all(it is None for it in stepped):
        return _sizes(SIZES)
    if args.begin is None or args.end is None or args.begin > args.end:
        raise ValueError("--begin and --end go together, the smaller one first")
    if args.step_factor is not None and args.step_bytes is not None:
        raise ValueError("--step-factor and --step-bytes are two ways to step: give one of them")
    factor = 2.0 if args.step_factor is None else args.step_factor
    if not (1.0 < factor < math.inf) or args.step_bytes == 0:
        raise ValueError("sizes must grow: --step-factor must be above 1, --step-bytes above 0")
    found, size = [], args.begin
    while size <= args.end:
        found.append(size)
        larger = size + args.step_bytes if args.step_bytes else int(size * factor) // 8 * 8
        size = max(larger, size + 8)
        if len(found) > MOST_SIZES:
            raise ValueError(f"these steps make more than {MOST_SIZES} sizes: take larger ones")
    return found


def _explain(args: argparse.Namespace) -> None:
    place = HostLayout.spread(ranks=args.ranks or 2, hosts=args.hosts or 1, cores=args.cores or _cores())
    tuning = config.RingConfig.from_environment().tuning
    sys.stdout.write(explain(place, args.dtype, sizes_of(args), tuning) + "\n")


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _measure_local(args: argparse.Namespace) -> int:
    """Start ranks here and wait; one that fails ends all. The exit code of the first that failed."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="ringdp-bench-") as folder:
        ranks = [
            context.Process(target=_local_rank, args=(rank, args, f"file://{folder}/store"), daemon=True)
            for rank in range(args.ranks or 2)
        ]
        try:
            for it in ranks:
                it.start()
            multiprocessing.connection.wait([it.sentinel for it in ranks])
            while not any(it.exitcode for it in ranks) and any(it.exitcode is None for it in ranks):
                multiprocessing.connection.wait([it.sentinel for it in ranks if it.exitcode is None])
            deadline = time.monotonic() + AFTER_FAILURE_S  # the other ranks print their errors, too
            for it in ranks:
                it.join(max(0.0, deadline - time.monotonic()))
            codes = [it.exitcode for it in ranks if it.exitcode]
        finally:
            for it in ranks:
                if it.pid is not None and it.exitcode is None:
                    it.kill()
                    it.join()
    if codes and not 0 < codes[0] <= 2:
        sys.stderr.write(f"python -m ringdp bench: a rank died with code {codes[0]}\n")
    return min(codes[0], 2) if codes and codes[0] > 0 else int(bool(codes))


def _local_rank(rank: int, args: argparse.Namespace, meet_at: str) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        code = _measure_here(args, rank=rank, world_size=args.ranks or 2, init_method=meet_at)
    except RingError as error:
        if rank == 0:
            sys.stderr.write(f"python -m ringdp bench: {error}\n")
        code = 1
    sys.exit(code)


def _measure_here(args: argparse.Namespace, **place: Any) -> int:
    """Be one of the ranks; rank 0 prints. Every rank returns the same exit code."""
    import torch

    import ringdp
    from ringdp.job.process_group import shutdown

    cuda = (
        _wants_cuda(args) and torch.cuda.is_available()
    )  # where it is not, the error is raised on all ranks after the rendezvous
    ringdp.init("ring", device="cuda" if cuda else "cpu", timeout=120, **place)
    try:
        return _measure(args)
    finally:
        shutdown()


def _measure(args: argparse.Namespace) -> int:
    import torch
    import torch.distributed as dist

    from ringdp import compression, device
    from ringdp.job import byte_collectives
    from ringdp.tools.bench import collectives, contenders, measuring, output

    settings = config.RingConfig.from_environment()
    world = byte_collectives.require_member(None, "bench")
    card = json.dumps([config.host_identity(settings.host_id), _of_this_rank(args)]).encode()
    everyone = [json.loads(one) for one in byte_collectives.all_gather_bytes(card, world)]
    if problem := next((theirs for _, theirs in everyone if theirs), None):
        if dist.get_rank() == 0:
            sys.stderr.write(f"python -m ringdp bench: {problem}\n")
        return 2
    layout = _layout([host for host, _ in everyone])
    place = collectives.Place(
        dist.get_rank(), dist.get_world_size(), getattr(torch, args.dtype), device(), args.op, args.root
    )
    made = contenders.make(args.backend, args.codec, resolve=compression.get)
    plan = measuring.Plan(args.rounds, args.warmup, args.iters, args.seconds, args.check)
    tables, found, quiet = [], [], args.json == "-" or place.rank != 0
    for name in args.collective:
        rows: list[measuring.Row] = []
        able = [it for it in made if name == "all_reduce" or not isinstance(it, contenders.Compressed)]
        for of_size in measuring.measure(name, sizes_of(args), able, place, plan):
            rows += of_size
        found += rows
        chosen = _algorithms(rows, layout, args.dtype, settings) if name == "all_reduce" else {}
        tables.append(f"{_title(name, args, layout, settings)}\n\n{output.text(rows, chosen)}\n")
        if not quiet:
            sys.stdout.write(tables[-1] + "\n")
            sys.stdout.flush()
    if place.rank == 0:
        sys.stderr.writelines(f"{line}\n" for line in output.remarks(found))
        _write(args, layout, found)
    return int(any(row.wrong for row in found))


def _of_this_rank(args: argparse.Namespace) -> str | None:
    """The problem of this rank with the command line; all ranks exchange theirs before anything is measured."""
    import torch
    import torch.distributed as dist

    from ringdp import compression

    if not 0 <= args.root < dist.get_world_size():
        return f"--root must be 0 to {dist.get_world_size() - 1}, not {args.root}"
    if _wants_cuda(args) and not torch.cuda.is_available():
        what = "nccl" if "nccl" in args.backend else "--device cuda"
        return f"rank {dist.get_rank()}: {what} needs a GPU, and torch sees none"
    for name in args.backend:
        if name != "ring" and not dist.is_backend_available(name):
            return f"rank {dist.get_rank()}: this torch is built without {name}"
    for name in args.codec:
        try:
            compression.get(name)
        except InvalidArgumentError as error:
            return f"--codec {name}: {error}"
    return None


def _wants_cuda(args: argparse.Namespace) -> bool:
    return args.device == "cuda" or "nccl" in args.backend


def _title(name: str, args: argparse.Namespace, layout: HostLayout, settings: config.RingConfig) -> str:
    hosts = len(layout.per_host)
    where = "one host" if hosts == 1 else f"{hosts} hosts"
    ranks = f"{layout.ranks} rank{'s' if layout.ranks > 1 else ''}"
    words = [name.replace("_", "-"), args.dtype]
    if name in ("all_reduce", "reduce", "reduce_scatter"):
        words.append(args.op.upper())
    table = f"; table: {settings.tuning.source}" if name == "all_reduce" else ""
    return f"{', '.join(words)}, {ranks} on {where}{table}"


def _algorithms(
    rows: Sequence[Any], layout: HostLayout, dtype: str, settings: config.RingConfig
) -> dict[tuple[str, int], str]:
    return {(row.collective, row.size_bytes): algorithm(layout, dtype, row.size_bytes, settings.tuning) for row in rows}


def _write(args: argparse.Namespace, layout: HostLayout, rows: Sequence[Any]) -> None:
    import torch

    from ringdp import __version__
    from ringdp.tools.bench import output

    about = {
        "ringdp": __version__,
        "torch": torch.__version__,
        "ranks": layout.ranks,
        "ranks_of_hosts": layout.per_host,
    }
    try:
        if args.json is not None:
            output.write(output.as_json(about, rows), args.json)
    except OSError as error:
        raise InvalidArgumentError(f"the results cannot be written to {args.json}: {error}") from error


def _layout(host_of_rank: Sequence[str]) -> HostLayout:
    counts: dict[str, int] = {}
    for host in host_of_rank:
        counts[host] = counts.get(host, 0) + 1
    return HostLayout(tuple(counts.values()), _cores())


def _split(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _collectives(text: str) -> list[str]:
    names = list(NAMES) if text == "all" else [word.replace("-", "_") for word in _split(text)]
    if not names or (unknown := [name for name in names if name not in NAMES]):
        raise argparse.ArgumentTypeError(f"{unknown[0] if names else text!r} is not one of all, {', '.join(NAMES)}")
    return names


def _backends(text: str) -> list[str]:
    names = _split(text)
    if not names or (unknown := [name for name in names if name not in BACKENDS]):
        raise argparse.ArgumentTypeError(f"{unknown[0] if names else text!r} is not one of {', '.join(BACKENDS)}")
    return list(dict.fromkeys(names))


def _sizes(text: str) -> list[int]:
    return [size(word) for word in text.split(",")]
