#!/usr/bin/env python3
"""A training step with loss scaling: RingDP with ringdp's scaler beside RingDP and torch's DDP with torch's.

    python benchmarks/amp.py                                    2 ranks on loopback, all models, SGD and fused AdamW
    python benchmarks/amp.py --models mlp --optimizers sgd --json out.json

Everything runs over ring. Modes: `ringdp` (RingDP with ringdp.amp.GradScaler), `ringdp-torch` (RingDP with
torch.amp.GradScaler), `ddp-torch` (DDP with torch.amp.GradScaler). Models are those of `step.py`. Both scalers on
RingDP must give the same parameters to the bit before anything is timed; then blocks of steps alternate between the
modes. Times are medians over all blocks, the slowest rank's; `unscale` is what the scaler's step takes beyond the
optimizer's own, before it.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

from benchmarks.lib import models
from benchmarks.lib import session
from benchmarks.lib.measure import Summary, format_time, machine, table

MODES = ("ringdp", "ringdp-torch", "ddp-torch")
OPTIMIZERS = ("sgd", "fused-adamw")
CHECKED_STEPS = 5
PEER = "ddp-torch"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(models.NAMES), help=f"of {', '.join(models.NAMES)}")
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS), help=f"of {', '.join(OPTIMIZERS)}")
    parser.add_argument("--rounds", type=int, default=7, help="blocks of steps for each mode (default 7)")
    parser.add_argument("--steps", type=int, default=10, help="steps of a block (default 10)")
    parser.add_argument("--json", metavar="FILE", help="write everything measured there, too")
    session.add_place_options(parser)
    args = parser.parse_args(argv)
    args.model_names, args.optimizer_names = args.models.split(","), args.optimizers.split(",")
    for given, known in ((args.model_names, models.NAMES), (args.optimizer_names, OPTIMIZERS)):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"{unknown[0]!r} is not known: choose from {', '.join(known)}")
    if min(args.rounds, args.steps) < 1:
        parser.error("at least one round of one step is needed")
    args.place = session.place_of(parser, args)
    return args


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run everything and return what `--json` writes. Raises Unavailable, HostsError, RanksFailed."""
    if reason := session.why_no_ringdp():
        raise session.Unavailable(reason)
    settings = {
        "models": args.model_names,
        "optimizers": args.optimizer_names,
        "rounds": args.rounds,
        "steps": args.steps,
    }
    with session.make_hosts(args.place) as hosts:
        rows, quiet = session.run(__file__, settings, args.place, hosts=hosts, timeout_s=args.timeout)
    return {
        "benchmark": "amp",
        "machine": machine(),
        "place": asdict(args.place) | {"words": str(args.place)},
        "quiet": quiet.as_dict() | {"words": str(quiet)},
        "rows": rows,
    }


def report(result: dict[str, Any]) -> str:
    """The result as text."""
    rows = []
    for row in result["rows"]:
        step = row["step"]["median_s"]
        peer = next(
            other["step"]["median_s"]
            for other in result["rows"]
            if (other["model"], other["optimizer"], other["mode"]) == (row["model"], row["optimizer"], PEER)
        )
        cells = [row["model"], row["optimizer"], row["mode"], format_time(step), format_time(row["step"]["p99_s"])]
        rows.append([*cells, format_time(row["unscale"]["median_s"]), f"{step / peer:.3f}"])
    about = result["machine"]
    lines = [
        f"training step with loss scaling, {result['place']['words']}",
        f"{about['processor']}, {about['cores']} cores, Linux {about['kernel']}, torch {about['torch']}",
        "",
        table(["model", "optimizer", "mode", "step", "p99", "unscale", f"/ {PEER}"], rows),
        "",
        result["quiet"]["words"],
    ]
    return "\n".join(lines + [f"WARNING: {warning}" for warning in result["quiet"]["warnings"]])


# What each rank does.


@dataclass
class Trainee:
    """One mode of one model with one optimizer on this rank."""

    task: models.Task
    module: Any
    optimizer: Any
    scaler: Any
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"step": [], "unscale": []})

    def __post_init__(self) -> None:
        self._entered_s = self._unscale_s = 0.0
        self.optimizer.register_step_pre_hook(self._before_optimizer)

    def _before_optimizer(self, *_: Any) -> None:
        self._unscale_s = perf_counter() - self._entered_s

    def step(self) -> tuple[float, float]:
        """Seconds of one step, and of unscaling in it."""
        start = perf_counter()
        self.optimizer.zero_grad()
        self.scaler.scale(self.task.loss(self.module, self.task.batch)).backward()
        self._entered_s = perf_counter()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return perf_counter() - start, self._unscale_s

    def digest(self) -> str:
        whole = hashlib.sha256()
        for parameter in self.task.module.parameters():
            whole.update(parameter.detach().numpy().tobytes())
        return whole.hexdigest()


def make(mode: str, model: str, optimizer: str, rank: int, group: Any) -> Trainee:
    import torch
    from torch.nn.parallel import DistributedDataParallel

    import ringdp

    task = models.make(model, rank=rank)
    wrapper: Any = DistributedDataParallel if mode == "ddp-torch" else ringdp.RingDP
    module = wrapper(task.module, process_group=group)
    chosen: Any = torch.optim.SGD(module.parameters(), lr=task.learning_rate)
    if optimizer == "fused-adamw":
        chosen = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    scaler = (ringdp.amp if mode == "ringdp" else torch.amp).GradScaler("cpu", init_scale=256.0)
    return Trainee(task, module, chosen, scaler)


def run_rank(path: str) -> None:
    import torch.distributed as dist

    import ringdp  # noqa: F401  # registers the backend

    joined = session.join(path)
    group = dist.new_group(backend="ring")
    rows = []
    for model in joined.settings["models"]:
        for optimizer in joined.settings["optimizers"]:
            if joined.rank == 0:
                print(f"… {model}, {optimizer}", file=sys.stderr, flush=True)
            trainees = {mode: make(mode, model, optimizer, joined.rank, group) for mode in MODES}
            for one in trainees.values():
                for _ in range(CHECKED_STEPS):
                    one.step()
            digests: list[Any] = [None] * joined.world_size
            dist.all_gather_object(digests, [trainees[mode].digest() for mode in MODES[:2]])
            if len({digest for both in digests for digest in both}) != 1:
                raise RuntimeError(f"{model}, {optimizer}: the scalers trained different models; nothing is timed")
            for turn in range(joined.settings["rounds"]):
                for mode in MODES[turn % 3 :] + MODES[: turn % 3]:
                    _block(trainees[mode], joined.settings["steps"])
            for mode, one in trainees.items():
                rows.append({"model": model, "optimizer": optimizer, "mode": mode, **_slowest(one)})
    joined.deliver(rows)


def _block(one: Trainee, steps: int) -> None:
    import torch.distributed as dist

    dist.barrier()
    one.step()  # not timed: the caches still hold the mode before
    for _ in range(steps):
        step_s, unscale_s = one.step()
        one.seconds["step"].append(step_s)
        one.seconds["unscale"].append(unscale_s)


def _slowest(one: Trainee) -> dict[str, Any]:
    import torch.distributed as dist

    mine = {name: Summary.of(seconds) for name, seconds in one.seconds.items()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return {name: asdict(Summary.slowest([each[name] for each in everyone])) for name in mine}


def main(argv: Sequence[str] | None = None) -> int:
    return session.main(parse(argv), run_rank, measure, report)


if __name__ == "__main__":
    sys.exit(main())
