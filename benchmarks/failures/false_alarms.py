"""Ranks that are slow for want of a core, for a long time: nobody may be called lost, stuck or late.

    python -m benchmarks false_alarms --minutes 30               4 ranks on 2 cores beside a process that never rests
    python -m benchmarks false_alarms --elastic --ranks 8        steps of an elastic job, in which no rank may be lost

Every rank mixes collectives of all sizes (with --elastic: steps of models of all sizes, and means of metrics), pauses
and computation, and checks the results. It fails at the first error, wrong sum or log line, and prints how much was
done and how long the slowest call took.
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
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.lib.ranks import ROOT, Command, run_commands

SIZES = (1, 1000, 20_000, 300_000, 4_000_000)
CALLS_PER_ROUND = 20


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks false_alarms",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="how long (default 30)")
    parser.add_argument("--ranks", type=int, default=4, help="how many (default 4)")
    parser.add_argument("--cores", type=int, default=2, help="cores that all share (default 2)")
    parser.add_argument("--elastic", action="store_true", help="steps of an elastic job in place of collectives")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31), help="of sizes and pauses; printed")
    print(json.dumps(run(**vars(parser.parse_args(argv)))))
    return 0


def run(*, minutes: float, ranks: int, cores: int, seed: int, elastic: bool = False) -> dict[str, float]:
    """Returns what was done; raises RanksFailed, or AssertionError with the line that should not be."""
    lines: list[str] = []
    lock = threading.Lock()

    def hear(label: str, line: str) -> None:
        with lock:
            lines.append(f"{label}: {line.rstrip()}")

    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])  # the children inherit it
    with tempfile.TemporaryDirectory(prefix="ringdp-false-alarms-") as folder:
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks)}
        if elastic:
            env |= {"RINGDP_ELASTIC": "1", "RINGDP_REPORT_EVERY": "0"}
        rank = [sys.executable, "-m", "benchmarks.failures.false_alarms", folder, str(seed), str(minutes * 60)]
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


def collectives(rank: int, world: int) -> Callable[[random.Random], None]:
    """A call of a random size, whose result is checked."""
    import torch
    import torch.distributed as dist

    def call(shared: random.Random) -> None:
        x = torch.full((shared.choice(SIZES),), float(rank + 1))
        if shared.random() < 0.5:
            dist.all_reduce(x)
        else:
            dist.all_reduce(x, async_op=True).wait()
        wanted = world * (world + 1) / 2
        assert x[0].item() == x[-1].item() == wanted, f"{x[0].item()} is not {wanted}"

    return call


def steps(rank: int, world: int) -> Callable[[random.Random], None]:
    """A step of a model of a random size, or a mean of metrics; the same members must have been in each."""
    import torch

    import ringdp

    models = [ringdp.RingDP(torch.nn.Linear(size, 1, bias=False)) for size in SIZES]
    wanted = (world + 1) / 2

    def call(shared: random.Random) -> None:
        if shared.random() < 0.1:
            mean = ringdp.metrics.mean(float(rank + 1))
            assert mean == wanted, f"{mean} is not {wanted}"
            return
        model = shared.choice(models)
        weight = model.module.weight
        model(torch.full((1, weight.shape[1]), float(rank + 1))).sum().backward()
        got = weight.grad
        assert got is not None
        assert (got == wanted).all(), f"{got.min().item()} to {got.max().item()} is not {wanted}"
        assert ringdp.world_size() == world, f"{ringdp.world_size()} ranks are left of {world}"
        model.zero_grad()

    return call


def work(folder: str, seed: int, seconds: float) -> None:
    """One rank. Everybody draws the same calls, and pauses of its own."""
    import torch
    import torch.distributed as dist

    import ringdp
    from ringdp import config

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    ringdp.init(init_method=f"file://{folder}/store", rank=rank, world_size=world, device="cpu")
    call = (steps if config.elastic() else collectives)(rank, world)
    shared, own = random.Random(seed), random.Random(seed * 1000 + rank)
    calls, slowest_s, end = 0, 0.0, time.monotonic() + seconds
    more = torch.ones(1)
    while more.item() > 0:
        for _ in range(CALLS_PER_ROUND):
            if own.random() < 0.02:
                time.sleep(own.random() * 2)  # a slow data loader
            started = time.monotonic()
            call(shared)
            slowest_s = max(slowest_s, time.monotonic() - started)
            calls += 1
        more[0] = 1.0 if rank == 0 and time.monotonic() < end else 0.0
        dist.broadcast(more, src=0)
    dist.barrier()
    if rank == 0:
        Path(folder, "done").touch()
    ringdp.shutdown()
    print(json.dumps({"calls": calls, "slowest_s": slowest_s}))


if __name__ == "__main__":  # a rank
    work(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
