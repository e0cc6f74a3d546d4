"""Time until a loss is reached, between two sites, against what the line carries: exact, as codes, and in rounds.

    python -m benchmarks far_loss steps                 2 ranks here: after how many steps each way reaches --loss
    sudo python -m benchmarks long_line --rate 10mbit --delay 25ms -- python -m benchmarks far_loss pace --rate-mbit 10
                                                        seconds that a step takes each way on such a line

Both write to docs/lab/plots/far.json (--keep), each what it measures, for `python -m benchmarks plots far`. The GPT of
examples/char_lm.py, 0.12 M parameters, AdamW at a constant rate; the first --warm-up steps of rounds are exact. The
line changes no loss, so steps are counted without one, and one run of each serves all lines. The loss is that of unseen
text, every --look steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ringdp
from benchmarks.compression.quality_runs import gpt_loss, small_gpt_options, text, unseen_nats, windows_of
from benchmarks.lib import session
from benchmarks.lib.measure import machine, table
from benchmarks.lib.plots import FOLDER
from examples.char_lm import GPT

WAYS: dict[str, dict[str, Any]] = {
    "exact": {},
    "int8": {"compression": "int8"},
    "int4": {"compression": "int4"},
    "DiLoCo, 50 steps, int4": {"every": 50, "fragments": ringdp.Fragments(4, delay=5), "compression": "int4"},
}
FILE = FOLDER / "far.json"
LEAST_STEPS, LEAST_S = 6, 8.0  # of `pace`, in each way


class Training:
    """One way, on this rank; the same batches in each way."""

    def __init__(self, way: str, warm_up: int, group: Any) -> None:
        self.training, self.unseen, alphabet = text()
        self.options = small_gpt_options(steps=1)
        torch.manual_seed(0)
        self.module: nn.Module = GPT(alphabet, self.options)
        chosen = dict(WAYS[way])
        self.rounds: ringdp.DiLoCo | None = None
        in_rounds = "every" in chosen
        self.model = self.module if in_rounds else ringdp.RingDP(self.module, process_group=group, **chosen)
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=self.options.lr, betas=(0.9, 0.95))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.inner, lambda step: min(1.0, (step + 1) / 100))
        if in_rounds:
            chosen["compression"] = ringdp.Compression(chosen.get("compression"), warmup_steps=warm_up)
            self.rounds = ringdp.DiLoCo(self.module, self.inner, process_group=group, **chosen)
        self.draw = torch.Generator().manual_seed(dist.get_rank())

    def step(self) -> None:
        self.inner.zero_grad()
        gpt_loss(self.model, windows_of(self.training, self.options, self.draw)).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.inner.step()
        self.schedule.step()

    def nats(self) -> float:
        """The same on all ranks."""
        if self.rounds is None:
            return unseen_nats(self.module, self.unseen, self.options.context)
        with self.rounds.global_parameters():
            return unseen_nats(self.module, self.unseen, self.options.context)


def steps_until(way: str, given: dict[str, Any], group: Any) -> list[tuple[int, float]]:
    one, seen = Training(way, given["warm_up"], group), []
    for step in range(1, given["most"] + 1):
        one.step()
        if step % given["look"] == 0:
            seen.append((step, round(one.nats(), 4)))
            if seen[-1][1] <= given["loss"]:
                break
    return seen


def pace_of(way: str) -> float:
    """Seconds of a step of the slower rank, after the first ones; in rounds over whole rounds."""
    one = Training(way, 0, dist.group.WORLD)
    every = WAYS[way].get("every", 1)
    for _ in range(2 if every == 1 else every + 1):
        one.step()
    times: list[float] = []
    began = time.perf_counter()
    while len(times) < LEAST_STEPS or (len(times) % every) or time.perf_counter() - began < LEAST_S:
        at = time.perf_counter()
        one.step()
        times.append(time.perf_counter() - at)
        if len(times) % every == 0:  # the ranks end together
            began = time.perf_counter() - session.slowest(time.perf_counter() - began)
    return session.slowest(statistics.fmean(times))


def keep(path: Path, kind: str, found: dict[str, Any]) -> None:
    """Beside what the file has already."""
    path.parent.mkdir(parents=True, exist_ok=True)
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"machine": machine()}
    before.setdefault(kind, {}).update(found)
    path.write_text(json.dumps(before) + "\n", encoding="utf-8")


# Running.


def run_rank(joined: session.Joined) -> None:
    group = session.ring_group()
    joined.deliver({way: steps_until(way, joined.settings, group) for way in joined.settings["ways"]})


def settings(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in ("ways", "loss", "most", "look", "warm_up")}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Raises Unavailable, RanksFailed."""
    if args.what == "pace":
        return pace(args)
    result = session.measured(sys.modules[__name__], "far_loss", args)
    keep(args.keep, "steps", {way: {"seen": seen, "loss": args.loss} for way, seen in result["rows"].items()})
    return result


def report(result: dict[str, Any]) -> str:
    rows = []
    if "pace" in result:
        rows = [[way, f"{seconds * 1e3:.1f} ms"] for way, seconds in result["pace"].items()]
        return (
            table([f"{result['rate']:g} Mbit/s", "a step of the slower rank"], rows)
            if os.environ["RANK"] == "0"
            else ""
        )
    loss = result["settings"]["loss"]
    for way, seen in result["rows"].items():
        reached = f"{seen[-1][0]:,}" if seen[-1][1] <= loss else f"not in {seen[-1][0]:,}"
        rows.append([way, reached, f"{seen[-1][1]:.4f}"])
    return session.report_table(result, "steps to a loss", ["", f"steps to {loss:g} nats", "loss then"], rows)


def pace(args: argparse.Namespace) -> dict[str, Any]:
    """On the ranks of long_line or another launcher."""
    ringdp.init()
    found = {way: pace_of(way) for way in args.ways}
    if ringdp.rank() == 0:
        keep(args.keep, "pace", {f"{args.rate_mbit:g}": found})
    ringdp.shutdown()
    return {"benchmark": "far_loss", "pace": found, "rate": args.rate_mbit}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", default="steps", choices=("steps", "pace"), help="default steps")
    parser.add_argument("--ways", default=";".join(WAYS), help="with semicolons (all)")
    parser.add_argument("--loss", type=float, default=2.0, help="nats per character to reach (2.0)")
    parser.add_argument("--most", type=int, default=6000, help="steps at most (6000)")
    parser.add_argument("--look", type=int, default=50, help="steps between two looks at the loss (50)")
    parser.add_argument("--warm-up", type=int, default=100, help="steps of rounds that are exact (steps; 100)")
    parser.add_argument("--rate-mbit", type=float, default=0.0, help="of the line that this is measured on (pace)")
    parser.add_argument("--keep", type=Path, default=FILE, help="where figures are kept (docs/lab/plots/far.json)")


def check(args: argparse.Namespace) -> None:
    args.ways = session.chosen(args.ways, tuple(WAYS), ";")
    if args.what == "pace" and args.rate_mbit <= 0:
        raise ValueError("pace needs --rate-mbit: that of the line, which it cannot know")
