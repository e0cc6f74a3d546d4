#!/usr/bin/env python3
"""Ranks of which one is slow: samples per second with equal batches and with batches by speed, side by side.

    python benchmarks/unequal.py                          2 and 4 ranks, rank 0 sleeps twice as long for each sample
    python benchmarks/unequal.py --slow quota --ranks 2   rank 0 gets half a core by a cgroup's quota (needs root)
    python benchmarks/unequal.py --slow none              all are equal: what balancing costs then

Each rank sleeps for each sample, in the forward, so that the machine's own speed matters little; with `quota`
none sleeps, and a larger model computes. Both samplers train in one run, in alternating blocks, after warming up; a
figure is the median over the blocks. The sum of the ranks' losses is divided by the global batch, so both train alike.
    ideal     the ratio if every rank were busy all the time and nothing but its samples took time
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib import models
from benchmarks.lib import session
import torch
import torch.distributed as dist
from benchmarks.lib.measure import machine, table
from torch import Tensor, nn
from torch.nn import functional

SLOW = ("sleep", "quota", "none")
MODES = ("equal", "speed")
MODELS = ("mlp", "gpt")
PER_RANK = 32  # samples of an equal batch
SLOWDOWN = 2.0
_PERIOD_US = 20_000


class Sleeping(nn.Module):
    """A model that also sleeps for each sample."""

    def __init__(self, inner: nn.Module, seconds: float) -> None:
        super().__init__()
        self.inner, self.seconds = inner, seconds

    def forward(self, x: Tensor) -> Tensor:
        if self.seconds:
            time.sleep(self.seconds * len(x))
        return self.inner(x)


def build(name: str, *, large: bool) -> nn.Module:
    torch.manual_seed(0)
    if name == "gpt":
        width, layers = (128, 3) if large else (32, 1)
        return models.Gpt(characters=65, width=width, layers=layers, heads=4, length=64)
    width = 1024 if large else 64
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def data(name: str, count: int, *, large: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if name == "gpt":
        tokens = torch.randint(65, (count, 33), generator=generator)
        return tokens[:, :-1], tokens[:, 1:].contiguous()
    rows = (32,) if large else ()  # of a sample, so that its work outweighs what a step costs besides
    inputs = torch.randn(count, *rows, 64, generator=generator)
    return inputs, torch.randint(10, (count, *rows), generator=generator)


@contextlib.contextmanager
def slow_down(share: float) -> Iterator[None]:
    """Let this process have `share` of a core, by a cgroup of its own. Raises Unavailable."""
    old, new = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
    root = old if (old / "cpu.cfs_quota_us").exists() else new
    group = root / f"ringdp-unequal-{os.getpid()}"
    quota = int(share * _PERIOD_US)
    try:
        before = (
            root / "cgroup.procs"
            if root == old
            else new / Path("/proc/self/cgroup").read_text().split("::/")[1].strip()
        )
        group.mkdir()
        if root == old:
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (group / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except (OSError, IndexError) as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        raise session.Unavailable(f"no quota of the processor can be set here ({error}): take --slow sleep") from error
    try:
        yield
    finally:
        procs = before if before.name == "cgroup.procs" else before / "cgroup.procs"
        with contextlib.suppress(OSError):
            procs.write_text(str(os.getpid()))
            group.rmdir()


class Trainee:
    """One model with one sampler."""

    def __init__(self, name: str, mode: str, seconds: float, *, large: bool, group: dist.ProcessGroup) -> None:
        import ringdp

        self.batch = PER_RANK * group.size()
        self.inputs, self.targets = data(name, 64 * self.batch, large=large)
        self.model: Any = ringdp.RingDP(Sleeping(build(name, large=large), seconds), process_group=group)
        self.sampler = ringdp.data.BalancedSampler(self.inputs, self.batch, balance=mode, group=group)
        self.sampler.watch(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.batches = self._forever()
        self.rates: list[float] = []

    def _forever(self) -> Iterator[list[int]]:
        while True:
            yield from self.sampler

    def block(self, steps: int) -> float:
        """Train so many steps and return the seconds that the slowest rank took."""
        ranks = self.model.process_group.size()
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            indices = next(self.batches)
            x, y = self.inputs[indices], self.targets[indices]
            self.optimizer.zero_grad()
            logits = self.model(x)
            loss = functional.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="sum")
            (loss * ranks / (self.batch * y[0].numel())).backward()
            self.optimizer.step()
        return session.slowest(time.perf_counter() - began)


def run_rank(path: str) -> None:
    joined = session.join(path)
    given = joined.settings
    torch.set_num_threads(1)
    group = dist.new_group(list(range(joined.world_size)), backend="ring")
    assert isinstance(group, dist.ProcessGroup)
    slow, rank = given["slow"], joined.rank
    seconds = given["sleep_s"] * (SLOWDOWN if slow == "sleep" and rank == 0 else 1.0) if slow != "quota" else 0.0
    rows = []
    with slow_down(1 / SLOWDOWN) if slow == "quota" and rank == 0 else contextlib.nullcontext():
        for name in given["models"]:
            trainees = {mode: Trainee(name, mode, seconds, large=slow == "quota", group=group) for mode in MODES}
            for one in trainees.values():
                one.block(given["warm_up"])
            for turn in range(given["rounds"]):
                for mode in MODES if turn % 2 else reversed(MODES):
                    one = trainees[mode]
                    one.rates.append(given["steps"] * one.batch / one.block(given["steps"]))
            rows.append(
                {"model": name, "ranks": joined.world_size}
                | {mode: statistics.median(one.rates) for mode, one in trainees.items()}
                | {"blocks": {mode: one.rates for mode, one in trainees.items()}}
                | {"counts": list(trainees["speed"].sampler.counts)}
            )
    joined.deliver(rows)


def ideal(ranks: int, slow: str) -> float:
    """Of the ratio: all ranks' speeds together over those of as many slow ones."""
    return 1.0 if slow == "none" else (ranks - 1 + 1 / SLOWDOWN) / (ranks / SLOWDOWN)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run everything and return what `--json` writes. Raises Unavailable, RanksFailed."""
    if reason := session.why_no_ringdp():
        raise session.Unavailable(reason)
    if args.slow == "quota":
        with slow_down(0.5):
            pass
    settings = {
        "models": args.models.split(","),
        "slow": args.slow,
        "sleep_s": args.sleep_ms * 1e-3,
        "rounds": args.rounds,
        "steps": args.steps,
        "warm_up": args.warm_up,
    }
    rows: list[dict[str, Any]] = []
    loads = []
    for ranks in args.rank_counts:
        loads.append(os.getloadavg()[0])
        found, _ = session.run(__file__, settings, session.Place(ranks), hosts=None, timeout_s=args.timeout)
        rows += [row | {"ratio": row["speed"] / row["equal"], "ideal": ideal(ranks, args.slow)} for row in found]
    return {"benchmark": "unequal", "machine": machine(), "settings": settings, "load": loads, "rows": rows}


def report(result: dict[str, Any]) -> str:
    """The result as text."""
    columns = ["ranks, model", "equal, samples/s", "by speed", "ratio", "ideal", "split"]
    rows = [
        [
            f"{row['ranks']}, {row['model']}",
            f"{row['equal']:.1f}",
            f"{row['speed']:.1f}",
            f"{row['ratio']:.3f}",
            f"{row['ideal']:.2f}",
            "/".join(map(str, row["counts"])),
        ]
        for row in result["rows"]
    ]
    words = {"sleep": "rank 0 sleeps twice as long", "quota": "rank 0 has half a core", "none": "all ranks are equal"}
    about = result["machine"]
    load = ", ".join(f"{one:.1f}" for one in result["load"])
    return "\n".join(
        [
            f"one step is {PER_RANK} samples a rank on average; {words[result['settings']['slow']]}",
            f"{about['processor']}, {about['cores']} cores, torch {about['torch']}; load before each run: {load}",
            "",
            table(columns, rows),
        ]
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="2,4", help="how many, one run for each (default 2,4)")
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--slow", choices=SLOW, default="sleep", help="what slows rank 0 down")
    parser.add_argument("--sleep-ms", type=float, default=1.0, help="for each sample on a fast rank (default 1)")
    parser.add_argument("--rounds", type=int, default=7, help="blocks of each sampler (default 7)")
    parser.add_argument("--steps", type=int, default=20, help="steps of a block (default 20)")
    parser.add_argument("--warm-up", type=int, default=100, help="steps before the first block (default 100)")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds before a run is given up")
    parser.add_argument("--json", metavar="FILE", help="write everything measured there, too")
    parser.add_argument("--as-rank", metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if unknown := [name for name in args.models.split(",") if name not in MODELS]:
        parser.error(f"{unknown[0]!r} is not known: choose from {', '.join(MODELS)}")
    try:
        args.rank_counts = [int(one) for one in args.ranks.split(",")]
    except ValueError:
        parser.error(f"--ranks is a list of numbers like 2,4, not {args.ranks!r}")
    if min(args.rank_counts) < 2 or min(args.rounds, args.steps, args.warm_up) < 1 or args.sleep_ms < 0:
        parser.error("at least two ranks, one round, one step and one step of warm-up are needed")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    return session.main(parse(argv), run_rank, measure, report)


if __name__ == "__main__":
    sys.exit(main())
