#!/usr/bin/env python3
"""Time until a loss is reached, between two sites, against what the line carries: exact, as codes, and in rounds.

    python benchmarks/far_loss.py steps                 2 ranks here: after how many steps each way reaches --loss
    sudo python benchmarks/long_line.py --rate 10mbit --delay 25ms -- python benchmarks/far_loss.py pace --rate 10
                                                        seconds that a step takes each way on such a line
    python benchmarks/far_loss.py draw                  the picture (matplotlib: requirements/plots.txt)

Both write to docs/lab/plots/far.json (--json), each what it measures; the picture is beside it. The GPT of
examples/char_lm.py, 0.12 M parameters, AdamW at a constant rate; the first --warm-up steps of rounds are exact. The
line changes no loss, so steps are counted without one, and one run of each serves all lines. The loss is that of unseen
text, every --look steps.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.lib import command
from benchmarks.lib import session
import torch
import torch.distributed as dist
from benchmarks.lib.measure import machine, table
from benchmarks.pictures.pictures import pyplot
from benchmarks.compression.quality_runs import gpt_loss, small_gpt_options, text, unseen_nats, windows_of
from benchmarks.lib.ranks import RanksFailed
from torch import nn

import ringdp
from examples.char_lm import GPT

WAYS: dict[str, dict[str, Any]] = {
    "exact": {},
    "int8": {"compression": "int8"},
    "int4": {"compression": "int4"},
    "DiLoCo, 50 steps, int4": {"every": 50, "fragments": 4, "delay": 5, "compression": "int4"},
}
COLOURS = ("#808080", "#3060c0", "#208040", "#c02030")
FILE = Path(__file__).resolve().parents[1] / "docs" / "lab" / "plots" / "far.json"
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
            self.rounds = ringdp.DiLoCo(self.module, self.inner, warmup_steps=warm_up, process_group=group, **chosen)
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
    """Into the file, which others may write, too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        before = json.loads(file.read() or "{}")
        before.setdefault(kind, {}).update(found)
        before.setdefault("machine", machine())
        file.truncate(0)
        json.dump(before, file)
        file.write("\n")


# Running.


def run_rank(path: str) -> None:
    joined = session.join(path)
    given = joined.settings
    group = dist.new_group(backend="ring")
    found = {way: steps_until(way, given, group) for way in given["ways"]}
    joined.deliver(found)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Raises Unavailable, RanksFailed."""
    if reason := session.why_no_ringdp():
        raise session.Unavailable(reason)
    given = {name: getattr(args, name) for name in ("ways", "loss", "most", "look", "warm_up")}
    place = session.Place(2, 0, "none")
    with session.make_hosts(place) as hosts:
        found, quiet = session.run(__file__, given, place, hosts=hosts, timeout_s=args.timeout)
    keep(args.json, "steps", {way: {"seen": seen, "loss": args.loss} for way, seen in found.items()})
    return {"found": found, "quiet": str(quiet), "loss": args.loss}


def report(result: dict[str, Any]) -> str:
    rows = []
    for way, seen in result["found"].items():
        reached = f"{seen[-1][0]:,}" if seen[-1][1] <= result["loss"] else f"not in {seen[-1][0]:,}"
        rows.append([way, reached, f"{seen[-1][1]:.4f}"])
    return result["quiet"] + "\n" + table(["", f"steps to {result['loss']:g} nats", "loss then"], rows)


def pace(args: argparse.Namespace) -> int:
    ringdp.init()
    found = {way: pace_of(way) for way in args.ways}
    if ringdp.rank() == 0:
        keep(args.json, "pace", {f"{args.rate:g}": found})
        rows = [[way, f"{seconds * 1e3:.1f} ms"] for way, seconds in found.items()]
        print(table([f"{args.rate:g} Mbit/s", "a step of the slower rank"], rows), flush=True)
    ringdp.shutdown()
    return 0


def draw(path: Path) -> int:
    plt = pyplot("far_loss.py")
    if plt is None:
        return 2
    kept = json.loads(path.read_text(encoding="utf-8"))
    figure, axis = plt.subplots(figsize=(7, 4.5))
    rates = sorted(kept["pace"], key=float)
    for (way, its), colour in zip(kept["steps"].items(), COLOURS, strict=False):
        steps, last = its["seen"][-1]
        assert last <= its["loss"], f"{way} has not reached {its['loss']}"
        minutes = [kept["pace"][rate][way] * steps / 60 for rate in rates]
        axis.plot([float(it) for it in rates], minutes, marker="o", color=colour, label=f"{way} ({steps:,} steps)")
    axis.set(xscale="log", yscale="log", xlabel="Mbit/s of each site's line, 50 ms there and back")
    loss = next(iter(kept["steps"].values()))["loss"]
    axis.set(ylabel=f"minutes to {loss:g} nats", title="GPT of 0.12 M parameters, 2 sites")
    axis.set_xticks([float(it) for it in rates], rates)
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    print(f"{path.with_suffix('.svg')}: drawn")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="steps", choices=("steps", "pace", "draw"), help="default steps")
    parser.add_argument("--ways", type=lambda given: given.split(";"), default=list(WAYS), help="with semicolons (all)")
    parser.add_argument("--loss", type=float, default=2.0, help="nats per character to reach (2.0)")
    parser.add_argument("--most", type=int, default=6000, help="steps at most (6000)")
    parser.add_argument("--look", type=int, default=50, help="steps between two looks at the loss (50)")
    parser.add_argument("--warm-up", type=int, default=100, help="steps of rounds that are exact (steps; 100)")
    parser.add_argument("--rate", type=float, default=0.0, help="Mbit/s of the line that this is measured on (pace)")
    parser.add_argument("--json", type=Path, default=FILE, help="where figures are kept (docs/lab/plots/far.json)")
    parser.add_argument("--timeout", type=float, default=3000.0, help="seconds before `steps` is given up (3000)")
    parser.add_argument("--as-rank", metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if unknown := [way for way in args.ways if way not in WAYS]:
        parser.error(f"{unknown[0]!r} is not known: choose from {'; '.join(WAYS)}")
    if args.what == "pace" and args.rate <= 0:
        parser.error("pace needs --rate: the Mbit/s of the line, which it cannot know")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.what == "pace":
        return pace(args)
    if args.what == "draw":
        return draw(args.json)
    if args.as_rank:
        run_rank(args.as_rank)
        return 0
    cannot, failed = (session.Unavailable,), (RanksFailed,)
    return command.run(lambda: measure(args), report, json_path=None, cannot=cannot, failed=failed)


if __name__ == "__main__":
    sys.exit(main())
