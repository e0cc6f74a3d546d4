"""Whether a long training with RingDP keeps its memory: resident memory, descriptors and threads, while shapes change.

    python -m benchmarks memory_soak                   2 ranks, 1 minute
    python -m benchmarks memory_soak --minutes 60 --json out.json
    python -m benchmarks memory_soak --bare            the same model without a wrapper, to compare

Each step has another number of rows, and its backward keeps some of what it allocates for some steps. Every fiftieth
step the wrapper is made anew. Columns: `resident`; of it `free`, which malloc holds and nobody uses, `pool`,
which the pool for gradients holds, and `rest`; and `allocated`, which the process has got from malloc and not freed.
These are medians, descriptors and threads the most, of the second and of the last fifth of the time.

`free` is no leak, but it can grow for as long as shapes change: see docs/lab/gradient_memory.md. So a failure is more
than `--slack` MiB between the two fifths in `rest`, `allocated` or `pool`, or one descriptor or thread more.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.lib import session
from benchmarks.lib.measure import format_size, table

PARTS = 5
WIDTH = 700
MOST_ROWS = 1500
STEPS_PER_WRAPPER = 50
IN_BYTES = ("resident", "free", "pool", "rest", "allocated")
COUNTED = (*IN_BYTES, "descriptors", "threads")
MAY_GROW = ("resident", "free")


_MALLINFO2 = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class Mallinfo2(ctypes.Structure):
    """What glibc's mallinfo2(3) returns, for all arenas together."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _MALLINFO2.split())


def mallinfo2() -> Mallinfo2:
    """Raises AttributeError where the C library has no such function."""
    function = ctypes.CDLL(None).mallinfo2
    function.restype = Mallinfo2
    return function()


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--slack", type=float, default=16.0, help="MiB that count as the same")
    without = parser.add_mutually_exclusive_group()
    without.add_argument("--no-pool", action="store_true", help="with gradient_pool=False, to compare")
    without.add_argument("--bare", action="store_true", help="without RingDP, to compare")


def check(args: argparse.Namespace) -> None:
    if args.minutes <= 0:
        raise ValueError("--minutes must be above 0")
    args.timeout = max(args.timeout, 2 * 60 * args.minutes + 120)


def resources(pool: int) -> dict[str, int]:
    """What this process has now: bytes of memory, of which the pool holds `pool`, descriptors, threads."""
    status = dict(
        line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines() if ":" in line
    )
    resident, heap = int(status["VmRSS"].split()[0]) * 1024, mallinfo2()
    return {
        "resident": resident,
        "free": heap.fordblks,
        "pool": pool,
        "rest": resident - heap.fordblks - pool,
        "allocated": heap.uordblks + heap.hblkhd,
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": int(status["Threads"]),
    }


def run_rank(joined: session.Joined) -> None:
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn

    import ringdp

    group = dist.new_group(backend="ring")
    shared, own = random.Random(1), random.Random(2 + joined.rank)
    torch.manual_seed(0)
    module = nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)), nn.Linear(WIDTH, 1600)
    )
    kept: list[Tensor] = []

    def keep(gradient: Tensor) -> None:  # as a hook that collects something does
        if own.random() < 0.2:
            kept.append(gradient.clone())
        while len(kept) > own.randrange(1, 8):
            kept.pop(own.randrange(len(kept)))

    for parameter in module.parameters():
        parameter.register_hook(keep)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    begin, seconds = time.monotonic(), 60 * joined.settings["minutes"]
    seen: list[dict[str, list[int]]] = [{name: [] for name in COUNTED} for _ in range(PARTS)]
    steps = 0
    over = torch.zeros(1)
    model: nn.Module = module
    while not over.item():
        if not joined.settings["bare"] and steps % STEPS_PER_WRAPPER == 0:
            model = ringdp.RingDP(module, process_group=group, gradient_pool=joined.settings["pool"])
        optimizer.zero_grad()
        model(torch.randn(shared.randrange(1, MOST_ROWS), WIDTH)).square().mean().backward()
        optimizer.step()
        steps += 1
        gone = time.monotonic() - begin
        part = seen[min(PARTS - 1, int(PARTS * gone / seconds))]
        for name, value in resources(pool=sum(ringdp.gradient_memory()[1:])).items():
            part[name].append(value)
        over.fill_(gone > seconds)
        dist.all_reduce(over)
    mine = {"steps": steps, "parts": [summary(part) for part in seen]}
    everyone: list[Any] = [None] * joined.world_size
    dist.all_gather_object(everyone, mine)
    joined.deliver(everyone)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Raises Unavailable, HostsError, RanksFailed."""
    result = session.measured(sys.modules[__name__], "memory_soak", args)
    ranks = result["rows"]
    failed = [f"rank {rank}: {it}" for rank, one in enumerate(ranks) for it in grown(one["parts"], args.slack)]
    return result | {"failed": failed}


def settings(args: argparse.Namespace) -> dict[str, Any]:
    return {"minutes": args.minutes, "pool": not args.no_pool, "bare": args.bare}


def summary(part: dict[str, list[int]]) -> dict[str, int]:
    return {name: int((median if name in IN_BYTES else max)(values)) for name, values in part.items() if values}


def grown(parts: Sequence[dict[str, int]], slack_mib: float) -> list[str]:
    """What the last part has more of than the second."""
    first, last = parts[1], parts[-1]
    slack = int(slack_mib * 2**20)
    return [
        f"{name} {first[name]} -> {last[name]}"
        for name in COUNTED
        if name not in MAY_GROW and last[name] > first[name] + (slack if name in IN_BYTES else 0)
    ]


def report(result: dict[str, Any]) -> str:
    """The result as text."""
    rows = []
    for rank, it in enumerate(result["rows"]):
        ends = [
            [format_size(part[name]) if name in IN_BYTES else str(part[name]) for name in COUNTED]
            for part in (it["parts"][1], it["parts"][-1])
        ]
        rows.append([str(rank), str(it["steps"]), *(f"{first} -> {last}" for first, last in zip(*ends, strict=True))])
    verdict = "; ".join(result["failed"]) or "nothing grew"
    return session.text(result, "memory over time", table(["rank", "steps", *COUNTED], rows), verdict)
