#!/usr/bin/env python3
"""A training step with buckets of several sizes, and with those that RingDP(bucket_cap_mb="auto") chooses.

    ringrun -n 2 benchmarks/bucket_sizes.py                        two ranks of one host
    sudo python benchmarks/hosts.py run --hosts 2 --rate 1gbit -- python benchmarks/bucket_sizes.py
    ringrun -H one,two benchmarks/bucket_sizes.py --models small --steps 3

Each layout has a module of its own, with the same parameters (`benchmarks/models.py`), and blocks of steps in turns.
That of "auto" first trains until the sizes are chosen. Before anything is timed, a step of each must give the
gradients of the first. Times are those of the slower rank: `step` the median over all steps, `to default` the median
over the rounds of a block's median over that of the default in the same round, with the least and the most of them.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import checkout  # noqa: F401
import models
import torch
import torch.distributed as dist
from measure import format_time, table

import ringdp
from ringdp.ddp.layout_trial import layouts

DEFAULT, AUTO = "default", "auto"
_CHOSEN_WITHIN = 600  # steps


class Trainee:
    """A model whose buckets have one layout."""

    def __init__(self, model: str, caps_mb: Any) -> None:
        self.task = models.make(model, rank=ringdp.rank())
        self.module: Any = ringdp.RingDP(self.task.module, bucket_cap_mb=caps_mb)
        self.optimizer = torch.optim.SGD(self.module.parameters(), self.task.learning_rate)
        self.blocks: list[float] = []
        self.seconds: list[float] = []

    def step(self) -> float:
        began = time.perf_counter()
        self.optimizer.zero_grad()
        self.task.loss(self.module, self.task.batch).backward()
        self.optimizer.step()
        return time.perf_counter() - began

    def block(self, steps: int) -> None:
        dist.barrier()
        self.step()
        seconds = slower([self.step() for _ in range(steps)])
        self.seconds += seconds
        self.blocks.append(statistics.median(seconds))

    def gradients(self) -> torch.Tensor:
        self.task.loss(self.module, self.task.batch).backward()
        return torch.cat([one.grad.reshape(-1) for one in self.module.parameters()])

    def choose(self) -> int:
        """Train until the sizes are chosen: after so many steps."""
        for step in range(_CHOSEN_WITHIN):
            if "sizes are" not in self.module.stats().layout:
                return step
            self.step()
        raise SystemExit(f"nothing was chosen in {_CHOSEN_WITHIN} steps: {self.module.stats().layout}")


def slower(seconds: Sequence[float]) -> list[float]:
    """By the step, the same on all ranks."""
    told = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return told.tolist()


def measure(model: str, args: argparse.Namespace) -> str:
    trainees = {DEFAULT: Trainee(model, None)}
    caps = trainees[DEFAULT].module._caps_bytes
    for layout in layouts(caps)[1:]:
        caps_mb = [cap / 2**20 for cap in layout.caps_bytes] or [1e6]
        trainees[layout.name] = Trainee(model, caps_mb)
    trainees[AUTO] = Trainee(model, "auto")
    wanted = trainees[DEFAULT].gradients()
    for name, trainee in trainees.items():
        error = float((trainee.gradients() - (1 + (name == DEFAULT)) * wanted).norm() / wanted.norm())
        if not error < 1e-4:
            raise SystemExit(f"{model}, {name}: gradients differ by {error:.2e}: nothing is timed")
    steps = trainees[AUTO].choose()
    names = list(trainees)
    for turn in range(args.rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            trainees[name].block(args.steps)
    rows = []
    for name, trainee in trainees.items():
        ratios = [one / usual for one, usual in zip(trainee.blocks, trainees[DEFAULT].blocks, strict=True)]
        rows.append(
            [
                name,
                str(len(trainee.module.reducer.layout())),
                format_time(statistics.median(trainee.seconds)),
                f"{statistics.median(ratios):.3f}",
                f"{min(ratios):.3f} to {max(ratios):.3f}",
            ]
        )
    columns = [model, "buckets", "step", "to default", ""]
    return f"{table(columns, rows)}\n{trainees[AUTO].module.stats().layout}; known after {steps} steps"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="small,mlp", help=f"of {', '.join(models.NAMES)} (small,mlp)")
    parser.add_argument("--rounds", type=int, default=7, help="blocks of each layout (7)")
    parser.add_argument("--steps", type=int, default=10, help="in a block, beside one that is not timed (10)")
    args = parser.parse_args(argv)
    models.check_names(parser, args.models)
    if args.rounds < 1 or args.steps < 1:
        parser.error("at least one round of one step is needed")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    ringdp.init()
    for model in args.models.split(","):
        text = measure(model, args)
        if ringdp.rank() == 0:
            print(f"{ringdp.transports()}\n{text}\n", flush=True)
    ringdp.shutdown()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
