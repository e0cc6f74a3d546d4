"""Ranks of which one is slow: samples per second with equal batches and with batches by speed, side by side.

    python -m benchmarks unequal                          rank 0 of 2 sleeps twice as long for each sample
    python -m benchmarks unequal --slow none              all are equal: what balancing costs then

Each rank sleeps for each sample, in the forward, so that the machine's own speed matters little. Both samplers train in
one run, in alternating blocks, after warming up; a figure is the median over the blocks. The sum of the ranks' losses
is divided by the global batch, so both train alike.
    ideal     the ratio if every rank were busy all the time and nothing but its samples took time
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.lib import models, session

SLOW = ("sleep", "none")
MODES = ("equal", "speed")
MODELS = ("mlp", "gpt")
PER_RANK = 32  # samples of an equal batch
SLOWDOWN = 2.0


class Sleeping(nn.Module):
    """A model that also sleeps for each sample."""

    def __init__(self, inner: nn.Module, seconds: float) -> None:
        super().__init__()
        self.inner, self.seconds = inner, seconds

    def forward(self, x: Tensor) -> Tensor:
        if self.seconds:
            time.sleep(self.seconds * len(x))
        return self.inner(x)


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "gpt":
        return models.Gpt(characters=65, width=32, layers=1, heads=4, length=64)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def data(name: str, count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if name == "gpt":
        tokens = torch.randint(65, (count, 33), generator=generator)
        return tokens[:, :-1], tokens[:, 1:].contiguous()
    return torch.randn(count, 64, generator=generator), torch.randint(10, (count,), generator=generator)


class Trainee:
    """One model with one sampler."""

    def __init__(self, name: str, mode: str, seconds: float, *, group: dist.ProcessGroup) -> None:
        import ringdp

        self.batch = PER_RANK * group.size()
        self.inputs, self.targets = data(name, 64 * self.batch)
        self.model: Any = ringdp.RingDP(Sleeping(build(name), seconds), process_group=group)
        self.sampler = ringdp.data.BalancedSampler(self.inputs, self.batch, balance=mode, group=group)
        self.sampler.watch(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.batches = self._forever()

    def _forever(self) -> Iterator[list[int]]:
        while True:
            yield from self.sampler

    def step(self) -> None:
        ranks, indices = self.model.process_group.size(), next(self.batches)
        x, y = self.inputs[indices], self.targets[indices]
        self.optimizer.zero_grad()
        loss = functional.cross_entropy(self.model(x).flatten(0, -2), y.flatten(), reduction="sum")
        (loss * ranks / (self.batch * y[0].numel())).backward()
        self.optimizer.step()


def run_rank(joined: session.Joined) -> None:
    given = joined.settings
    torch.set_num_threads(1)
    group = session.ring_group()
    slowed = given["slow"] == "sleep" and joined.rank == 0
    seconds = given["sleep_s"] * (SLOWDOWN if slowed else 1.0)
    rows = []
    for name in given["models"]:
        trainees = {mode: Trainee(name, mode, seconds, group=group) for mode in MODES}
        calls: dict[str, Callable[[], object]] = {mode: one.step for mode, one in trainees.items()}
        times = session.alternate(calls, given["rounds"], given["steps"], warm_up=given["warm_up"])
        rates = {mode: [trainees[mode].batch / it for it in times[mode]] for mode in MODES}
        row = {"model": name, "blocks": rates, "counts": list(trainees["speed"].sampler.counts)}
        rows.append(row | {mode: statistics.median(it) for mode, it in rates.items()})
    joined.deliver(rows)


def ideal(ranks: int, slow: str) -> float:
    """Of the ratio: all ranks' speeds together over those of as many slow ones."""
    return 1.0 if slow == "none" else (ranks - 1 + 1 / SLOWDOWN) / (ranks / SLOWDOWN)


def settings(args: argparse.Namespace) -> dict[str, Any]:
    names = ("models", "slow", "rounds", "steps", "warm_up")
    return {name: getattr(args, name) for name in names} | {"sleep_s": args.sleep_ms * 1e-3}


def report(result: dict[str, Any]) -> str:
    columns = ["model", "equal, samples/s", "by speed", "ratio", "ideal", "split"]
    given, ranks = result["settings"], result["place"]["ranks"]
    rows = []
    for row in result["rows"]:
        cells = [row["model"], f"{row['equal']:.1f}", f"{row['speed']:.1f}", f"{row['speed'] / row['equal']:.3f}"]
        rows.append([*cells, f"{ideal(ranks, given['slow']):.2f}", "/".join(map(str, row["counts"]))])
    words = {"sleep": "rank 0 sleeps twice as long", "none": "all ranks are equal"}[given["slow"]]
    title = f"one step is {PER_RANK} samples a rank on average; {words}"
    return session.report_table(result, title, columns, rows)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--slow", choices=SLOW, default="sleep", help="what slows rank 0 down")
    parser.add_argument("--sleep-ms", type=float, default=1.0, help="for each sample on a fast rank (default 1)")
    parser.add_argument("--rounds", type=int, default=7, help="blocks of each sampler (default 7)")
    parser.add_argument("--steps", type=int, default=20, help="steps of a block (default 20)")
    parser.add_argument("--warm-up", type=int, default=100, help="steps before the first block (default 100)")


def check(args: argparse.Namespace) -> None:
    args.models = session.chosen(args.models, MODELS)
    session.at_least(1, rounds=args.rounds, steps=args.steps, warm_up=args.warm_up)
    session.at_least(2, ranks=args.place.ranks)
    session.at_least(0, sleep_ms=args.sleep_ms)
