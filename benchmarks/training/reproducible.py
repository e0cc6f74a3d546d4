#!/usr/bin/env python3
"""What RingDP(reproducible=True) costs: a training step with it and without, side by side.

    python benchmarks/reproducible.py                                 on one host, and on 2 and 4 hosts at 1 Gbit (root)
    python benchmarks/reproducible.py --places 1x4,2x2 --models mlp --compression int8

A place HxR is H hosts (network namespaces, above one) of R ranks. Both models train in one run, in alternating blocks;
a step's time is the median over the blocks of what the slowest rank took. What they have for gradients in the first
step is compared before anything is timed. `ratio` is reproducible over default.
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
from benchmarks.lib.measure import format_time, interval, machine, table

MODES = ("default", "reproducible")
PLACES = "1x2,1x4,2x1,4x1"


class Trainee:
    """A model that trains in a group of its own."""

    def __init__(self, mode: str, name: str, compression: str | None, rank: int, ranks: int) -> None:
        import ringdp

        group = dist.new_group(list(range(ranks)), backend="ring")
        self.task = models.make(name, rank=rank)
        self.model: Any = ringdp.RingDP(
            self.task.module, process_group=group, compression=compression, reproducible=mode == "reproducible"
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.0)  # so that both always have the same gradients
        self.step_times: list[float] = []

    def block(self, steps: int) -> None:
        """Time so many steps."""
        dist.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.task.loss(self.model, self.task.batch).backward()
            self.optimizer.step()
        self.step_times.append(session.slowest((time.perf_counter() - began) / steps))


def run_rank(path: str) -> None:
    joined = session.join(path)
    given = joined.settings
    rows = []
    for name in given["models"]:
        trainees = {mode: Trainee(mode, name, given["compression"], joined.rank, joined.world_size) for mode in MODES}
        for one in trainees.values():
            one.block(2)
            one.step_times.clear()
        compare(*(one.model for one in trainees.values()), compressed=given["compression"] is not None)
        for turn in range(given["rounds"]):
            for mode in MODES if turn % 2 else reversed(MODES):
                trainees[mode].block(given["steps"])
        rows.append({"model": name} | {mode: one.step_times for mode, one in trainees.items()})
    joined.deliver(rows)


def compare(default: Any, reproducible: Any, *, compressed: bool) -> None:
    """Raise AssertionError where the gradients are not those of the same mean."""
    for (name, ours), theirs in zip(reproducible.named_parameters(), default.parameters(), strict=True):
        size = float(theirs.grad.abs().max())
        error = float((ours.grad - theirs.grad).abs().max())
        assert error <= (0.05 if compressed else 1e-5) * size, f"{name} is off by {error} of {size}"


def place_named(text: str, rate: str) -> session.Place:
    hosts, per_host = (int(word) for word in text.split("x"))
    return session.Place(hosts * per_host, hosts=0 if hosts == 1 else hosts, rate=rate)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run everything and return what `--json` writes. Raises Unavailable, RanksFailed, HostsError."""
    if reason := session.why_no_ringdp():
        raise session.Unavailable(reason)
    compression = None if args.compression == "none" else args.compression
    settings = {
        "models": args.models.split(","),
        "rounds": args.rounds,
        "steps": args.steps,
        "compression": compression,
    }
    rows: list[dict[str, Any]] = []
    for place in args.place_list:
        load = os.getloadavg()[0]
        with session.make_hosts(place) as hosts:
            found, _ = session.run(__file__, settings, place, hosts=hosts, timeout_s=args.timeout)
        for row in found:
            ratios = [ours / theirs for ours, theirs in zip(row["reproducible"], row["default"], strict=True)]
            rows.append(row | {"place": str(place), "load": load, "ratios": ratios})
    return {"benchmark": "reproducible", "machine": machine(), "settings": settings, "rows": rows}


def report(result: dict[str, Any]) -> str:
    """The result as text."""
    rows = []
    for row in result["rows"]:
        mean, half = interval(row["ratios"])
        rows.append(
            [
                row["place"],
                row["model"],
                *(format_time(statistics.median(row[mode])) for mode in MODES),
                f"{statistics.median(row['ratios']):.3f}",
                f"{mean:.3f} ± {half:.3f}",
                f"{row['load']:.1f}",
            ]
        )
    about, compression = result["machine"], result["settings"]["compression"] or "exact"
    head = f"{compression}; {about['processor']}, {about['cores']} cores, torch {about['torch']}"
    return f"{head}\n\n{table(['place', 'model', *MODES, 'ratio', 'mean, 95 %', 'load'], rows)}"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--places", default=PLACES, help=f"hosts x ranks on each (default {PLACES})")
    parser.add_argument("--rate", default="1gbit", help="speed of each host's link, tc's words, or none")
    parser.add_argument("--models", default="mlp,gpt", help=f"of {', '.join(models.NAMES)} (default mlp,gpt)")
    parser.add_argument("--compression", default="none", help="a compressor's name (default none)")
    parser.add_argument("--rounds", type=int, default=9, help="blocks of each (default 9)")
    parser.add_argument("--steps", type=int, default=4, help="steps of a block (default 4)")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds before a run is given up")
    parser.add_argument("--json", metavar="FILE", help="write everything measured there, too")
    parser.add_argument("--as-rank", metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if unknown := [name for name in args.models.split(",") if name not in models.NAMES]:
        parser.error(f"{unknown[0]!r} is not known: choose from {', '.join(models.NAMES)}")
    try:
        args.place_list = [place_named(one, args.rate) for one in args.places.split(",")]
    except ValueError:
        parser.error(f"--places is a list like 1x2,4x1, not {args.places!r}")
    if min(args.rounds, args.steps) < 1 or min(place.ranks for place in args.place_list) < 2:
        parser.error("at least two ranks, one round and one step are needed")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    return session.main(parse(argv), run_rank, measure, report)


if __name__ == "__main__":
    sys.exit(main())
