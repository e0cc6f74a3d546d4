"""Muon beside AdamW: the loss, averaged in each step and in rounds, and a step whose work is shared over the ranks.

    python -m benchmarks muon                       both tables, 2 ranks
    python -m benchmarks muon --parts step          the second one
    python -m benchmarks muon --steps 2500 --seeds 3 --parts loss

`loss`: the GPT of examples/char_lm.py, 0.12 M parameters. torch.optim.Muon has the matrices of the blocks, with the
learning rate of AdamW (adjust_lr_fn="match_rms_adamw"), and AdamW the rest; nats per character on text that was not
trained on. `step`: what a step of the optimizer takes for the GPT of 10.8 M parameters, on each rank alone, and by
torch's ZeroRedundancyOptimizer over ring, where each rank orthogonalises its share of the matrices; both come to the
same bits first.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import ringdp
from benchmarks.compression.quality_runs import gpt_loss, small_gpt_options, text, unseen_nats, windows_of
from benchmarks.lib import session
from benchmarks.lib.measure import format_time, table
from benchmarks.lib.models import make
from benchmarks.lib.ranks import Failed
from examples.char_lm import GPT

PARTS = ("loss", "step")
OPTIMIZERS = ("AdamW", "Muon")
WAYS = {"each step exact": None, "each step int8": "int8", "each step int4": "int4"}
ROUNDS = {"rounds exact": None, "rounds int4": "int4", "rounds sparse2": "sparse2"}


def matrices_of(module: nn.Module) -> list[nn.Parameter]:
    """Those between the embeddings and the head."""
    return [p for name, p in module.named_parameters() if p.ndim == 2 and name.startswith("blocks.")]


def optimizers_of(module: nn.Module, which: str, lr: float) -> list[torch.optim.Optimizer]:
    matrices = matrices_of(module) if which == "Muon" else []
    of_muon = {id(p) for p in matrices}
    rest = [p for p in module.parameters() if id(p) not in of_muon]
    adamw = torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95))
    if not matrices:
        return [adamw]
    return [torch.optim.Muon(matrices, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"), adamw]


def train(way: str, which: str, seed: int, given: dict[str, Any], group: Any) -> float:
    """Nats per character after so many steps."""
    training, unseen, alphabet = text()
    options = small_gpt_options(steps=given["steps"])
    torch.manual_seed(seed)
    module: nn.Module = GPT(alphabet, options)
    optimizers = optimizers_of(module, which, options.lr)
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(
            one, options.lr, total_steps=given["steps"], pct_start=0.1, cycle_momentum=False
        )
        for one in optimizers
    ]
    rounds: ringdp.DiLoCo | None = None
    model = module
    if way in ROUNDS:
        rounds = ringdp.DiLoCo(module, optimizers, every=given["every"], compression=ROUNDS[way], process_group=group)
    else:
        model = ringdp.RingDP(module, compression=WAYS[way], process_group=group)
    draw = torch.Generator().manual_seed(seed * 10_007 + dist.get_rank())
    for _ in range(given["steps"]):
        for one in optimizers:
            one.zero_grad()
        gpt_loss(model, windows_of(training, options, draw)).backward()
        for one, schedule in zip(optimizers, schedules, strict=True):
            one.step()
            schedule.step()
    if rounds is not None:
        rounds.finish()
        rounds.detach()
    return unseen_nats(module, unseen, options.context)


def steps_of_ways(group: Any) -> dict[str, float]:
    """Seconds of Muon's step, by way; medians. Raises Failed where they come to different parameters."""
    seconds: dict[str, list[float]] = {"each rank all": [], "shared": []}
    modules, optimizers = {}, {}
    for name in seconds:
        modules[name] = make("gpt", rank=0).module
        matrices = matrices_of(modules[name])
        numbers: dict[str, Any] = {"lr": 1e-3, "adjust_lr_fn": "match_rms_adamw"}
        optimizers[name] = (
            torch.optim.Muon(matrices, **numbers)
            if name == "each rank all"
            else ZeroRedundancyOptimizer(matrices, torch.optim.Muon, process_group=group, **numbers)
        )
    for turn in range(11):
        for name, module in modules.items():
            draw = torch.Generator().manual_seed(turn)
            for p in matrices_of(module):
                p.grad = torch.randn(p.shape, generator=draw)
            dist.barrier(group=group)
            began = time.perf_counter()
            optimizers[name].step()
            took = session.slowest(time.perf_counter() - began)
            if turn > 1:
                seconds[name].append(took)
    first, second = (matrices_of(module) for module in modules.values())
    if not all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
        raise Failed("the shared step comes to other parameters, and is not timed")
    return {name: statistics.median(each) for name, each in seconds.items()}


def run_rank(joined: session.Joined) -> None:
    given, group = joined.settings, session.ring_group()
    losses: dict[str, list[float]] = {}
    for seed in range(given["seeds"]) if "loss" in given["parts"] else ():
        for way in (*WAYS, *ROUNDS):
            for which in OPTIMIZERS:
                nats = train(way, which, seed, given, group)
                losses.setdefault(f"{way}|{which}", []).append(nats)
                if joined.rank == 0:
                    print(f"seed {seed}, {way}, {which}: {nats:.4f} nats", flush=True)
    steps = steps_of_ways(group) if "step" in given["parts"] else {}
    joined.deliver({"losses": losses, "steps": steps})


def settings(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in ("parts", "steps", "every", "seeds")}


def tables(result: dict[str, Any]) -> Iterator[str]:
    losses, steps = result["rows"]["losses"], result["rows"]["steps"]
    rows = []
    for way in (*WAYS, *ROUNDS) if losses else ():
        each = [losses[f"{way}|{which}"] for which in OPTIMIZERS]
        better = statistics.fmean(b - a for a, b in zip(*each, strict=True))
        cells = [f"{statistics.fmean(one):.4f}" for one in each]
        rows.append([way, *cells, f"{better:+.4f}"])
    if rows:
        yield table(["nats per character", *OPTIMIZERS, "Muon - AdamW"], rows)
    if steps:
        alone, shared = steps["each rank all"], steps["shared"]
        cells = [format_time(alone), format_time(shared), f"{shared / alone:.2f}"]
        yield table(["step of Muon, 10.8 M parameters", *steps, "shared / all"], [["", *cells]])


def report(result: dict[str, Any]) -> str:
    given = result["settings"]
    words = f"{given['steps']} steps, rounds of {given['every']}, {given['seeds']} seeds"
    return session.text(result, words, "\n\n".join(tables(result)))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--steps", type=int, default=1000, help="of each rank (1000)")
    parser.add_argument("--every", type=int, default=50, help="steps of a round (50)")
    parser.add_argument("--seeds", type=int, default=3, help="how many (3)")


def check(args: argparse.Namespace) -> None:
    args.parts = session.chosen(args.parts, PARTS)
    session.at_least(1, steps=args.steps, every=args.every, seeds=args.seeds)
