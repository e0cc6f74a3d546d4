#!/usr/bin/env python3
"""Choosing the largest 1 % of a gradient on one core: ringdp's top-k with error feedback beside torch.topk and memcpy.

    python benchmarks/selection.py                      25.6 M float32, as ResNet-50 has
    python benchmarks/selection.py --numel 4000000 --fraction 0.001

Each round takes all three once. `topk` is the whole selection: residual added, threshold followed, code written, new
residual written. Before anything is timed, what it sent and what it kept must add up to its input, and what it sent
must be as large as what torch.topk finds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from benchmarks.lib import command
import torch
from benchmarks.lib.measure import Quiet, format_time, machine, table
from torch import Tensor

from ringdp.compression import Info, TopK
from ringdp.compression.codecs import native


class NotBuilt(RuntimeError):
    """Without the extension torch operations would be measured."""


class WrongSelection(RuntimeError):
    """Times of it would mean nothing."""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=25_600_000, help="elements (default 25.6 M)")
    parser.add_argument("--fraction", type=float, default=0.01, help="of them that are chosen (default 0.01)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", metavar="FILE", help="write everything measured there, too")
    args = parser.parse_args(argv)
    if args.numel < 1 or args.rounds < 1:
        parser.error("at least one element and one round are needed")
    if not 0 < args.fraction <= 1:
        parser.error("the fraction must be above 0 and at most 1")
    return args


class Selection:
    """One parameter's, step by step, with two residuals that take turns."""

    def __init__(self, x: Tensor, fraction: float) -> None:
        self.x, self.compressor = x, TopK(fraction)
        self.residuals = [torch.zeros_like(x), torch.zeros_like(x)]
        self.info = Info(name="x", shape=tuple(x.shape), numel=x.numel(), state={})

    def step(self) -> Tensor:
        (code,), left = self.compressor.compress_with_residual(self.x, self.residuals[0], self.info, self.residuals[1])
        self.residuals = [left, self.residuals[0]]
        return code


def measure(args: argparse.Namespace) -> dict[str, Any]:
    if not native.serves(torch.zeros(1)):
        raise NotBuilt("ringdp is not built: run `make build`, and use the Python it made")
    torch.set_num_threads(1)
    x = torch.randn(args.numel, generator=torch.Generator().manual_seed(0))
    check(x, args.fraction)
    selection, copy = Selection(x, args.fraction), torch.empty_like(x)
    wanted = max(1, round(args.fraction * args.numel))
    calls: dict[str, Callable[[], object]] = {
        "topk": selection.step,
        "torch.topk": lambda: x.abs().topk(wanted, sorted=False),
        "memcpy": lambda: copy.copy_(x),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    quiet = Quiet.start()
    for turn in range(args.rounds + 1):
        for name, call in calls.items():
            began = perf_counter()
            call()
            if turn:
                times[name].append(perf_counter() - began)
    quiet.stop(ranks_s=0.0)
    return {"benchmark": "selection", "machine": machine(), "numel": args.numel, "fraction": args.fraction,
            "times_s": times, "quiet": quiet.as_dict() | {"words": str(quiet)}}  # fmt: skip


def check(x: Tensor, fraction: float) -> None:
    selection = Selection(x, fraction)
    for _ in range(3):
        before = selection.residuals[0].clone()
        decoded = selection.compressor.decompress((selection.step(),), selection.info)
        if not torch.allclose(decoded + selection.residuals[0], x + before, rtol=0, atol=1e-6):
            raise WrongSelection("what was sent and what was kept do not add up")
    found, wanted = int(decoded.count_nonzero()), max(1, round(fraction * x.numel()))
    if not wanted / 2 <= found <= 2 * wanted:
        raise WrongSelection(f"{found} elements were chosen, not about {wanted}")
    least = (x + before).abs().topk(found, sorted=False).values.min()
    if float(decoded[decoded != 0].abs().min()) < 0.99 * float(least):
        raise WrongSelection("smaller elements were chosen than there are")


def report(result: dict[str, Any]) -> str:
    times = {name: statistics.median(values) for name, values in result["times_s"].items()}
    ratios = {
        name: statistics.median(theirs / own for theirs, own in zip(values, result["times_s"]["topk"], strict=True))
        for name, values in result["times_s"].items()
    }
    rows = [[name, format_time(seconds), f"{ratios[name]:.2f}"] for name, seconds in times.items()]
    about = result["machine"]
    return "\n".join([
        f"the largest {result['fraction']:.2%} of {result['numel']:,} float32, one core",
        f"{about['processor']}, {about['cores']} cores, Linux {about['kernel']}, torch {about['torch']}", "",
        table(["", "median", "times topk's"], rows), "", result["quiet"]["words"],
        *(f"WARNING: {warning}" for warning in result["quiet"]["warnings"]),
    ])  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    return command.run(lambda: measure(args), report, json_path=args.json, cannot=(NotBuilt,), failed=(WrongSelection,))


if __name__ == "__main__":
    sys.exit(main())
