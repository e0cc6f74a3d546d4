"""An elastic job (`ringrun --elastic`): what it costs while no rank is lost, and how long the loss of one takes.

    python benchmarks/elastic.py                                 2 ranks, all models, then 4 ranks of which 3 are killed
    python benchmarks/elastic.py --ranks 4 --models mlp --losses 0
    RINGDP_TRANSPORT=tcp python benchmarks/elastic.py

Cost: each process has two wrappers of the same model, of which one makes steps again after a loss and the other does
not; blocks of steps take turns, a round is one block of each. A time is the slowest rank's; the ratio is of the two
blocks of a round, and its 95 % interval over the rounds is printed.

Losses: one rank after another is killed when the gradient of its first layer is there, so that its last bucket never
leaves. `until the step was made` is from just before the kill, by the host's clock, until the last of the others has
the means of that step; `a step` is the one after it.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib import models
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from benchmarks.lib.measure import format_time, interval

import ringdp

_WRAPPERS = ("elastic", "plain")


def join(rank: int, ranks: int, folder: str, name: str) -> None:
    torch.set_num_threads(1)
    os.environ["RINGDP_ELASTIC"] = "1"
    ringdp.init(init_method=f"file://{folder}/{name}", rank=rank, world_size=ranks, timeout=60)


def wrapped(name: str, rank: int, wrapper: str) -> tuple[models.Task, Any, torch.optim.Optimizer]:
    task = models.make(name, rank=rank)
    os.environ["RINGDP_ELASTIC"] = str(int(wrapper == "elastic"))
    group = dist.group.WORLD if wrapper == "elastic" else dist.new_group(backend="ring")
    model = ringdp.RingDP(task.module, process_group=group)
    return task, model, torch.optim.SGD(model.parameters(), task.learning_rate)


def step(task: models.Task, model: Any, optimizer: torch.optim.Optimizer) -> None:
    task.loss(model, task.batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def cost_rank(rank: int, ranks: int, folder: str, name: str, rounds: int, block_s: float) -> None:
    os.environ["RINGDP_REPORT_EVERY"] = "0"
    join(rank, ranks, folder, f"store-{name}")
    both = {wrapper: wrapped(name, rank, wrapper) for wrapper in _WRAPPERS}
    for one in both.values():
        for _ in range(5):
            step(*one)
    begin = time.perf_counter()
    for _ in range(5):
        step(*both["plain"])
    took = torch.tensor([(time.perf_counter() - begin) / 5])
    dist.broadcast(took, src=0)
    steps = max(2, round(block_s / took.item()))
    times: dict[str, list[float]] = {wrapper: [] for wrapper in _WRAPPERS}
    for number in range(rounds):
        for wrapper in _WRAPPERS if number % 2 == 0 else reversed(_WRAPPERS):
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(steps):
                step(*both[wrapper])
            slowest = torch.tensor([(time.perf_counter() - begin) / steps])
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
            times[wrapper].append(slowest.item())
    if rank == 0:
        ratios = [a / b for a, b in zip(times["elastic"], times["plain"], strict=True)]
        mean, half = interval([100 * (ratio - 1) for ratio in ratios])
        cells = [name, str(ranks), *(format_time(statistics.median(times[w])) for w in ("plain", "elastic"))]
        cells += [
            f"{100 * (statistics.median(ratios) - 1):+.2f} %",
            f"{mean:+.2f} ± {half:.2f} %",
            f"{rounds} x {steps}",
        ]
        Path(folder, f"cost-{name}").write_text(" | ".join(cells))
    dist.barrier()
    ringdp.shutdown()


def loss_rank(rank: int, ranks: int, folder: str, name: str) -> None:
    """Rank 0 dies first, then rank 1, and so on; the last one is left."""
    join(rank, ranks, folder, "store-losses")
    task, model, optimizer = wrapped(name, rank, "elastic")
    first = next(iter(task.module.parameters()))
    for _ in range(5):
        step(task, model, optimizer)
    for victim in range(ranks - 1):
        for kind in ("lost", "after"):

            def die(gradient: Any, kind: str = kind, victim: int = victim) -> None:
                if kind == "lost" and rank == victim:
                    Path(folder, f"killed-{victim}").write_text(repr(time.time()))
                    os.kill(os.getpid(), signal.SIGKILL)

            handle = first.register_hook(die)
            begin = time.time()
            task.loss(model, task.batch).backward()
            handle.remove()
            Path(folder, f"{kind}-{victim}-{rank}").write_text(f"{begin!r} {time.time()!r}")
            optimizer.step()
            optimizer.zero_grad()
    ringdp.shutdown()


def measure_losses(ranks: int, name: str) -> list[tuple[float, float]]:
    """Seconds from a kill until the step was made, and those of the next one, for each loss."""
    with tempfile.TemporaryDirectory(prefix="ringdp-elastic-") as folder:
        context = multiprocessing.get_context("spawn")
        processes = [context.Process(target=loss_rank, args=(rank, ranks, folder, name)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if [process.exitcode for process in processes] != [-signal.SIGKILL] * (ranks - 1) + [0]:
            raise SystemExit(f"the ranks ended with {[process.exitcode for process in processes]}")
        found = []
        for victim in range(ranks - 1):
            killed = float(Path(folder, f"killed-{victim}").read_text())
            spans = {
                kind: [
                    tuple(map(float, Path(folder, f"{kind}-{victim}-{rank}").read_text().split()))
                    for rank in range(victim + 1, ranks)
                ]
                for kind in ("lost", "after")
            }
            made = max(end for _, end in spans["lost"]) - killed
            found.append((made, max(end - begin for begin, end in spans["after"])))
        return found


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="of the jobs in which no rank is lost (2)")
    parser.add_argument("--models", default=",".join(models.NAMES), help=f"of {', '.join(models.NAMES)}")
    parser.add_argument("--rounds", type=int, default=12, help="blocks of steps for each wrapper (12)")
    parser.add_argument("--block-seconds", type=float, default=1.0, help="about how long a block lasts (1)")
    parser.add_argument("--losses", type=int, default=4, help="ranks of the job that loses all but one; 0: none (4)")
    arguments = parser.parse_args(argv)
    models.check_names(parser, arguments.models)
    if arguments.rounds < 1 or arguments.ranks < 2 or (arguments.losses != 0 and arguments.losses < 2):
        parser.error("at least two ranks and one round are needed")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    names = arguments.models.split(",")
    print("| model | ranks | plain | elastic | median | mean, 95 % | rounds x steps |\n|---|---|---|---|---|---|---|")
    for name in names:
        with tempfile.TemporaryDirectory(prefix="ringdp-elastic-") as folder:
            given = (arguments.ranks, folder, name, arguments.rounds, arguments.block_seconds)
            multiprocessing.spawn(  # type: ignore[attr-defined]
                cost_rank, given, nprocs=arguments.ranks
            )
            print(f"| {Path(folder, f'cost-{name}').read_text()} |", flush=True)
    if arguments.losses == 0:
        return 0
    print("\n| model | ranks before | until the step was made | a step |\n|---|---|---|---|")
    for name in names:
        for lost, (made, after) in enumerate(measure_losses(arguments.losses, name)):
            print(f"| {name} | {arguments.losses - lost} | {format_time(made)} | {format_time(after)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
