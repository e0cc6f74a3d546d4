#!/usr/bin/env python3
"""What the divergence guard costs a training step: the CPU time of its looks, against the time of a step.

    python benchmarks/guard.py                     2 ranks, the default, guard_every 100 and 500, all models
    python benchmarks/guard.py --ranks 4 --every 100 --models mlp

Models are those of step.py. `look` is the mean over the steps of the CPU time that the training thread spends in the
guard, its exchanges among them; `share` is that of the median step. CPU time is little disturbed by other programs, the
step's is.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.lib import models
from benchmarks.lib import session
import torch
import torch.distributed as dist
from benchmarks.lib.measure import format_time, headline, machine, table

_WARM_UP = 15  # steps: the first look lists all tensors


def timed(call: Any, seconds: list[float]) -> Any:
    """The same, which notes its CPU time."""

    def wrapper(*args: Any) -> Any:
        began = time.thread_time()
        found = call(*args)
        seconds.append(time.thread_time() - began)
        return found

    return wrapper


def run_rank(path: str) -> None:
    import ringdp

    joined = session.join(path)
    given = joined.settings
    group = dist.new_group(list(range(joined.world_size)), backend="ring")
    rows = []
    for name in given["models"]:
        for every in given["every"]:
            task = models.make(name, rank=joined.rank)
            model: Any = ringdp.RingDP(task.module, process_group=group, guard_every=every)
            optimizer = torch.optim.SGD(model.parameters(), task.learning_rate)
            looks: list[float] = []
            steps: list[float] = []
            for name_of_call in ("look", "message", "hear"):  # the default's hash travels with the ranks' reports
                if call := getattr(model._guard, name_of_call, None):
                    setattr(model._guard, name_of_call, timed(call, looks))
            for number in range(given["steps"] + _WARM_UP):
                if number == _WARM_UP:
                    looks.clear()
                    steps.clear()
                began = time.perf_counter()
                optimizer.zero_grad()
                task.loss(model, task.batch).backward()
                optimizer.step()
                steps.append(time.perf_counter() - began)
            dist.barrier()
            rows.append(
                {
                    "model": name,
                    "every": every or "default",
                    "step_s": statistics.median(steps),
                    "look_s": sum(looks) / len(steps),
                }
            )
    joined.deliver(rows)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    if reason := session.why_no_ringdp():
        raise session.Unavailable(reason)
    settings = {"models": args.models.split(","), "every": args.every_list, "steps": args.steps}
    load = os.getloadavg()[0]
    rows, _ = session.run(__file__, settings, session.Place(args.ranks), hosts=None, timeout_s=args.timeout)
    rows = [row | {"share": row["look_s"] / row["step_s"]} for row in rows]
    return {"benchmark": "guard", "machine": machine(), "ranks": args.ranks, "load": load, "rows": rows}


def report(result: dict[str, Any]) -> str:
    rows = [
        [
            row["model"],
            str(row["every"]),
            format_time(row["step_s"]),
            format_time(row["look_s"]),
            f"{row['share']:.3%}",
        ]
        for row in result["rows"]
    ]
    return f"{headline(result)}\n\n{table(['model', 'guard_every', 'step', 'look', 'share'], rows)}"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="(default 2)")
    parser.add_argument("--models", default=",".join(models.NAMES), help=f"of {', '.join(models.NAMES)}")
    parser.add_argument("--every", default="default,100,500", help="values of guard_every (default default,100,500)")
    parser.add_argument("--steps", type=int, default=120, help="steps of each (default 120)")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds before the run is given up")
    parser.add_argument("--json", metavar="FILE", help="write everything measured there, too")
    parser.add_argument("--as-rank", metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    models.check_names(parser, args.models)
    try:
        args.every_list = [None if one == "default" else int(one) for one in args.every.split(",")]
    except ValueError:
        parser.error(f"--every is a list of numbers like default,100,500, not {args.every!r}")
    if args.ranks < 2 or args.steps < 2 or any(one is not None and one < 1 for one in args.every_list):
        parser.error("at least two ranks, two steps, and guard_every of 1 are needed")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    return session.main(parse(argv), run_rank, measure, report)


if __name__ == "__main__":
    sys.exit(main())
