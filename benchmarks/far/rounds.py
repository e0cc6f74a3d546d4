"""What rounds (ringdp.DiLoCo) cost.

    python -m benchmarks rounds step        one outer step: DiLoCo beside the usual loop on gloo (an all-reduce for each
                                            parameter, torch's SGD, parameters copied out and back), in turns
    python -m benchmarks rounds overlap --hosts 2 --rate 100mbit
                                            a larger GPT between hosts: a step alone, and with streaming rounds
    ringrun -H one,two -m benchmarks rounds overlap         the same between your own machines
    sudo python -m benchmarks long_line --rate 100mbit --timeout 1500 -- python -m benchmarks rounds overlap
                                            and between two namespaces, 50 ms there and back

`step` checks that both come to the same parameters before it times them. What rounds do to the loss: far_loss.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ringdp
from benchmarks.compression.quality_runs import gpt_loss, gpt_options
from benchmarks.lib import session
from benchmarks.lib.measure import interval, table
from examples.char_lm import GPT

STREAMING: dict[str, Any] = {"fragments": ringdp.Fragments(4, delay=5)}
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
# One outer step.


class UsualLoop:
    """A round as scripts write it: each parameter's change is averaged by an operation of its own, then SGD steps."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = list(module.parameters())
        self.outer = torch.optim.SGD(self.parameters, lr=0.7, momentum=0.9, nesterov=True)
        self.before = [p.detach().clone() for p in self.parameters]

    def __call__(self) -> None:
        for before, p in zip(self.before, self.parameters, strict=True):
            p.grad = before - p.data
            dist.all_reduce(p.grad)  # the default group, which is gloo
            p.grad /= dist.get_world_size()
            p.data.copy_(before)
        self.outer.step()
        self.outer.zero_grad()
        self.before = [p.detach().clone() for p in self.parameters]


class Round:
    """A round of DiLoCo, which begins when an inner optimizer steps that does nothing."""

    def __init__(self, module: nn.Module, group: Any, compression: str | None) -> None:
        self.inner = torch.optim.SGD(module.parameters(), lr=0.0)
        self.rounds = ringdp.DiLoCo(
            module, self.inner, every=1, outer=OUTER, compression=compression, process_group=group
        )

    def __call__(self) -> None:
        self.inner.step()


def drift(module: nn.Module, rank: int) -> None:
    """What inner steps would have done."""
    draw = torch.Generator().manual_seed(rank)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape, generator=draw), alpha=1e-3)


def outer_steps(given: dict[str, Any], joined: session.Joined) -> dict[str, Any]:
    group = session.ring_group()
    modules = {name: large_gpt() for name in ("usual loop, gloo", "DiLoCo", "DiLoCo, int4")}
    calls: dict[str, Callable[[], object]] = {
        "usual loop, gloo": UsualLoop(modules["usual loop, gloo"]),
        "DiLoCo": Round(modules["DiLoCo"], group, None),
        "DiLoCo, int4": Round(modules["DiLoCo, int4"], group, "int4"),
    }
    for _ in range(2):
        for name, module in modules.items():
            drift(module, joined.rank)
            calls[name]()
    exact, ours, coded = (torch.cat([p.detach().flatten() for p in one.parameters()]) for one in modules.values())
    assert torch.allclose(exact, ours, atol=1e-6), "the rounds disagree"
    assert (exact - coded).abs().max() < 5e-3
    return {"parameters": exact.numel(), "times": session.alternate(calls, given["blocks"], 3)}


def report_steps(result: dict[str, Any]) -> tuple[str, str]:
    times = result["rows"]["times"]
    base = times["usual loop, gloo"]
    rows = []
    for name, each in times.items():
        ratio, half = interval([a / b for a, b in zip(each, base, strict=True)])
        rows.append([name, f"{statistics.median(each) * 1e3:.1f} ms", f"{ratio:.3f} ± {half if half < 9 else 0:.3f}"])
    words = f"one outer step of {result['rows']['parameters']:,} parameters"
    return words, table(["", "median of the slowest rank", "to the usual loop"], rows)


# A step beside rounds.


def large_gpt(width: int = 384, layers: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return GPT(96, gpt_options(width=width, layers=layers, heads=6, context=64))


def overlap(given: dict[str, Any], joined: session.Joined) -> dict[str, Any]:
    """Seconds of a step alone and with rounds, in alternating blocks, of the slower rank; and its processor time, which
    other programs do not change much."""
    group = session.ring_group()
    alone, shared = large_gpt(given["width"], given["layers"]), large_gpt(given["width"], given["layers"])
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-4) for one in (alone, shared)]
    rounds = ringdp.DiLoCo(
        shared, optimizers[1], every=given["every"], compression=given["compression"], process_group=group, **STREAMING
    )
    draw = torch.Generator().manual_seed(joined.rank)
    ends = torch.zeros(1, dtype=torch.float64)

    def block(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> tuple[float, float]:
        began, computed = time.perf_counter(), time.process_time()
        for _ in range(steps):
            x = torch.randint(96, (given["batch"], 65), generator=draw)
            optimizer.zero_grad()
            gpt_loss(module, x).backward()
            optimizer.step()
        return (time.perf_counter() - began) / steps, (time.process_time() - computed) / steps

    for module, optimizer in zip((alone, shared), optimizers, strict=True):
        block(module, optimizer, 2)
    dist.all_reduce(ends, group=group)
    before = rounds.stats()
    each: list[list[float]] = []  # seconds alone and with rounds, processor time of both
    steps = -(-given["every"] // 2)
    for turn in range(given["blocks"]):
        mine = [0.0] * 4
        for which in (0, 1) if turn % 2 else (1, 0):
            mine[which], mine[which + 2] = block((alone, shared)[which], optimizers[which], steps)
        told = torch.tensor(mine, dtype=torch.float64)
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=group)
        each.append(told.tolist())
    after = rounds.stats()
    rounds.finish()
    waited = (after.waited_s - before.waited_s) / (steps * len(each))
    ended = rounds.stats()
    return {
        "alone": [one[0] for one in each],
        "with rounds": [one[1] for one in each],
        "cpu alone": [one[2] for one in each],
        "cpu with rounds": [one[3] for one in each],
        "waited_s": waited,
        "less": ended.bytes_of_exact_steps / max(1, ended.bytes_sent),
        "steps": ended.steps,
        "parameters": sum(p.numel() for p in alone.parameters()),
    }


def report_overlap(result: dict[str, Any]) -> tuple[str, str]:
    row, settings = result["rows"], result["settings"]
    alone, shared = row["alone"], row["with rounds"]
    ratio, half = interval([b / a for a, b in zip(alone, shared, strict=True)])
    code = settings["compression"] or "exact"
    cpu, cpu_half = interval([b / a for a, b in zip(row["cpu alone"], row["cpu with rounds"], strict=True)])
    rows = [
        ["alone", f"{statistics.median(alone) * 1e3:.1f} ms", "1", "1"],
        [f"every {settings['every']}, streaming, {code}", f"{statistics.median(shared) * 1e3:.1f} ms",
         f"{ratio:.3f} ± {half:.3f}", f"{cpu:.3f} ± {cpu_half:.3f}"],
    ]  # fmt: skip
    wait = row["waited_s"] / statistics.median(shared)
    words = f"{row['parameters']:,} parameters; exposed wait {100 * wait:.2f} % of a step"
    sent = f"{row['steps']} steps and the last round sent 1/{row['less']:.0f} of the bytes of exact ones"
    columns = ["", "a step of the slower rank", "ratio, 95 %", "processor time, ratio"]
    return f"{words}; {sent}", table(columns, rows)


# Running.


def run_rank(joined: session.Joined) -> None:
    joined.deliver({"step": outer_steps, "overlap": overlap}[joined.settings["what"]](joined.settings, joined))


def settings(args: argparse.Namespace) -> dict[str, Any]:
    names = ("what", "blocks", "every", "batch", "width", "layers")
    found = {name: getattr(args, name) for name in names}
    return found | {"compression": None if args.compression == "none" else args.compression}


def report(result: dict[str, Any]) -> str:
    words, shown = REPORTS[result["settings"]["what"]](result)
    return session.text(result, words, shown)


REPORTS: dict[str, Callable[[dict[str, Any]], tuple[str, str]]] = {
    "step": report_steps, "overlap": report_overlap
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    module = sys.modules[__name__]
    if "RANK" not in os.environ or "--as-rank" in argv:
        return session.main(module, "rounds", argv)
    args = session.parse(module, argv)  # on ranks that somebody else has started
    ringdp.init()
    given = settings(args)
    row = overlap(given, session.Joined(given, ringdp.rank(), ringdp.world_size(), 0, print))
    if ringdp.rank() == 0:
        words, shown = report_overlap({"rows": row, "settings": given})
        print(f"{words}, {ringdp.world_size()} ranks, {ringdp.transports()}\n\n{shown}", flush=True)
    ringdp.shutdown()
    return 0


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", default="step", choices=("step", "overlap"), help="default step")
    parser.add_argument("--blocks", type=int, default=9, help="of each kind (default 9)")
    parser.add_argument("--every", type=int, default=50, help="steps of a round (overlap; default 50)")
    parser.add_argument("--compression", default="int4", help="of overlap: a codec, or none (default int4)")
    parser.add_argument("--batch", type=int, default=4, help="windows of 64 characters a step (overlap; default 4)")
    parser.add_argument("--width", type=int, default=384, help="of the model (overlap; default 384)")
    parser.add_argument("--layers", type=int, default=6, help="of the model (overlap; default 6)")


def check(args: argparse.Namespace) -> None:
    session.at_least(1, blocks=args.blocks, every=args.every, batch=args.batch)
