#!/usr/bin/env python3
"""Ranks that are slow for want of a core, for a long time: nobody may be called lost, stuck or late.

    false_alarms.py --minutes 30               4 ranks on 2 cores beside a process that never rests

Every rank mixes collectives of all sizes, pauses and computation, and checks the results. It fails at the first error,
wrong sum or log line, and prints how much was done and how long the slowest call took.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from ranks import Command, run_commands

SIZES = (1, 1000, 20_000, 300_000, 4_000_000)
CALLS_PER_ROUND = 20


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (default 30)")
    parser.add_argument("--ranks", type=int, default=4, help="how many (default 4)")
    parser.add_argument("--cores", type=int, default=2, help="cores that all share (default 2)")
    parser.add_argument("--seed", type=int, default=None, help="of sizes and pauses; printed")
    args = parser.parse_args(argv)
    seed = random.randrange(2**31) if args.seed is None else args.seed
    print(json.dumps(run(minutes=args.minutes, ranks=args.ranks, cores=args.cores, seed=seed)))
    return 0


def run(*, minutes: float, ranks: int, cores: int, seed: int) -> dict[str, float]:
    """Returns what was done; raises RanksFailed, or AssertionError with the line that should not be."""
    lines: list[str] = []
    lock = threading.Lock()

    def hear(label: str, line: str) -> None:
        with lock:
            lines.append(f"{label}: {line.rstrip()}")

    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])  # the children inherit it
    with tempfile.TemporaryDirectory(prefix="ringdp-false-alarms-") as folder:
        root = str(Path(__file__).resolve().parents[1])
        env = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks)}
        rank = [sys.executable, __file__, "--rank", folder, str(seed), str(minutes * 60)]
        commands = [Command(rank, {**env, "RANK": str(i)}, f"rank {i}") for i in range(ranks)]
        busy = f"import os, time\nwhile not os.path.exists({folder + '/done'!r}):\n  [0 for _ in range(10**6)]"
        commands.append(Command([sys.executable, "-c", busy], env, "the busy process"))
        run_commands(commands, timeout_s=minutes * 60 + 300, echo=hear)
    reports = [json.loads(line.partition(": ")[2]) for line in lines if '"calls"' in line]
    others = [line for line in lines if '"calls"' not in line]
    assert not others, f"seed {seed}: somebody had something to say:\n" + "\n".join(others)
    assert len(reports) == ranks, reports
    return {
        "minutes": minutes,
        "ranks": ranks,
        "seed": seed,
        "calls": min(report["calls"] for report in reports),
        "slowest_call_s": round(max(report["slowest_s"] for report in reports), 3),
    }


def work(folder: str, seed: int, seconds: float) -> None:
    """One rank. Everybody draws the same calls, and pauses of its own."""
    import torch
    import torch.distributed as dist

    import ringdp  # noqa: F401  (registers the backend)

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("ring", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    shared, own = random.Random(seed), random.Random(seed * 1000 + rank)
    calls, slowest_s, end = 0, 0.0, time.monotonic() + seconds
    more = torch.ones(1)
    while more.item() > 0:
        for _ in range(CALLS_PER_ROUND):
            size = shared.choice(SIZES)
            x = torch.full((size,), float(rank + 1))
            if own.random() < 0.02:
                time.sleep(own.random() * 2)  # a slow data loader
            started = time.monotonic()
            if shared.random() < 0.5:
                dist.all_reduce(x)
            else:
                dist.all_reduce(x, async_op=True).wait()
            slowest_s = max(slowest_s, time.monotonic() - started)
            wanted = world * (world + 1) / 2
            assert x[0].item() == x[-1].item() == wanted, f"{x[0].item()} is not {wanted}"
            calls += 1
        more[0] = 1.0 if rank == 0 and time.monotonic() < end else 0.0
        dist.broadcast(more, src=0)
    dist.barrier()
    if rank == 0:
        Path(folder, "done").touch()
    dist.destroy_process_group()
    print(json.dumps({"calls": calls, "slowest_s": slowest_s}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        work(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
        sys.exit(0)
    sys.exit(main())
