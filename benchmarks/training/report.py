#!/usr/bin/env python3
"""What the report and the metrics cost a training step: RingDP with and without them, in alternating blocks of steps.

    python benchmarks/report.py                       2 ranks, all models of step.py
    python benchmarks/report.py --models mlp --blocks 40

Both have the same module; one has RINGDP_REPORT_EVERY=0 and no metrics, the other tells every 20 steps, as by default,
and writes a line of metrics for each step; a block is as long as that. `ratio` is the median over neighbouring blocks
of the time with them over the time without, on the slowest rank; `spread` is the distance of its quartiles, `error` the
standard error of that median. `monitor` is the CPU time of the training thread in Python beside.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.lib import models
from benchmarks.lib import session
import torch
import torch.distributed as dist
from benchmarks.lib.measure import format_time, headline, machine, table


def run_rank(path: str) -> None:
    import ringdp
    from ringdp.diagnosis.records import step_records

    joined = session.join(path)
    given = joined.settings
    group = dist.new_group(list(range(joined.world_size)), backend="ring")
    rows = []
    for name in given["models"]:
        trained = []
        for on in (False, True):
            task = models.make(name, rank=joined.rank)
            step_records.cache_clear()
            if on:
                os.environ["RINGDP_METRICS_DIR"] = given["folder"]
            else:
                os.environ.pop("RINGDP_METRICS_DIR", None)
            os.environ["RINGDP_REPORT_EVERY"] = "20" if on else "0"
            model: Any = ringdp.RingDP(task.module, process_group=group)
            trained.append((task, model, torch.optim.SGD(model.parameters(), task.learning_rate)))
        seconds: list[list[float]] = [[], []]
        monitors: list[float] = []
        before_forward = trained[1][1]._monitor.before_forward

        def timed(before_forward: Any = before_forward, monitors: list[float] = monitors) -> None:
            began = time.thread_time()
            before_forward()
            monitors.append(time.thread_time() - began)

        trained[1][1]._monitor.before_forward = timed
        for block in range(given["blocks"] + 1):
            order = (0, 1) if block % 2 else (1, 0)
            for which in order:
                task, model, optimizer = trained[which]
                dist.barrier()
                began = time.perf_counter()
                for _ in range(given["steps"]):
                    optimizer.zero_grad()
                    task.loss(model, task.batch).backward()
                    optimizer.step()
                seconds[which].append((time.perf_counter() - began) / given["steps"])
        slowest = torch.tensor(seconds)[:, 1:]
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        ratios = (slowest[1] / slowest[0]).tolist()
        quartiles = statistics.quantiles(ratios, n=4)
        rows.append(
            {
                "model": name,
                "step_s": float(slowest[0].median()),
                "ratio": statistics.median(ratios),
                "spread": quartiles[2] - quartiles[0],
                "error": 1.253 * (quartiles[2] - quartiles[0]) / 1.349 / len(ratios) ** 0.5,
                "monitor_s": statistics.mean(monitors[given["steps"] :]),
            }
        )
    joined.deliver(rows)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    if reason := session.why_no_ringdp():
        raise session.Unavailable(reason)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="ringdp-report-") as folder:
        settings = {"models": args.models.split(","), "blocks": args.blocks, "steps": args.steps, "folder": folder}
        rows, _ = session.run(__file__, settings, session.Place(args.ranks), hosts=None, timeout_s=args.timeout)
    return {"benchmark": "report", "machine": machine(), "ranks": args.ranks, "load": load, "rows": rows}


def report(result: dict[str, Any]) -> str:
    rows = [
        [
            row["model"],
            format_time(row["step_s"]),
            f"{row['ratio']:.4f}",
            f"{row['spread']:.4f}",
            f"{row['error']:.4f}",
            format_time(row["monitor_s"]),
            f"{row['monitor_s'] / row['step_s']:.3%}",
        ]
        for row in result["rows"]
    ]
    columns = ["model", "step without", "ratio", "spread", "error", "monitor", "share"]
    return f"{headline(result)}\n\n{table(columns, rows)}"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="(default 2)")
    parser.add_argument("--models", default=",".join(models.NAMES), help=f"of {', '.join(models.NAMES)}")
    parser.add_argument("--blocks", type=int, default=16, help="pairs of blocks of each model (default 16)")
    parser.add_argument("--steps", type=int, default=20, help="in a block (default 20)")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds before the run is given up")
    parser.add_argument("--json", metavar="FILE", help="write everything measured there, too")
    parser.add_argument("--as-rank", metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    models.check_names(parser, args.models)
    if args.ranks < 2 or args.steps < 1 or args.blocks < 2:
        parser.error("at least two ranks, two blocks and one step are needed")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    return session.main(parse(argv), run_rank, measure, report)


if __name__ == "__main__":
    sys.exit(main())
