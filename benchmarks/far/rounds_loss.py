"""What rounds do to the loss: each step exact, and rounds with exact changes, int4 and sparse2, equal tokens, by seed.

    python -m benchmarks rounds_loss --ranks 4                      3 seeds, 2,500 steps, rounds of 15, 50 and 100
    python -m benchmarks rounds_loss --ranks 4 --every 50 --ways "sparse2 1/16" --decay 0.9 --outer 0.7,0
    python -m benchmarks rounds_loss --ranks 4 --every 50 --ways exact --outer 0.7,0.9      in place of "auto"

The GPT of examples/char_lm.py, 0.12 M parameters, new; AdamW with OneCycleLR; the first --warm-up of the steps average
gradients exactly, then rounds begin, with the default `outer` where --outer gives none. Printed are nats per
character on text that was not trained on, after the last round, and how many times fewer bytes than exact steps rounds
have sent; differences are between runs of the same seed, with 95 % intervals.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ringdp
from benchmarks.compression.quality_runs import gpt_loss, small_gpt_options, text, unseen_nats, windows_of
from benchmarks.lib import session
from benchmarks.lib.measure import interval, table
from examples.char_lm import GPT
from ringdp.compression import ErrorFeedback, Sparse2

WAYS = {"exact": 0.0, "int4": 0.0, "sparse2": 1 / 64, "sparse2 1/16": 1 / 16, "sparse2 1/4": 1 / 4}
"""How changes are encoded, and the density of that."""
EACH_STEP = "each step exact"


def codec_of(way: str, given: dict[str, Any]) -> Any:
    if not WAYS[way]:
        return None if way == "exact" else way
    return Sparse2(WAYS[way], error_feedback=ErrorFeedback(given["decay"]))


def average_gradients(module: nn.Module, group: Any) -> None:
    """As RingDP does; its wrapper could not be taken off again."""
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    flat = torch.cat([it.flatten() for it in gradients])
    dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=group)
    for it, mean in zip(gradients, flat.split([it.numel() for it in gradients]), strict=True):
        it.copy_(mean.view_as(it))


def train(way: str, every: int, seed: int, given: dict[str, Any], group: Any) -> tuple[float, float]:
    """Nats per character at the end, the same on all ranks, and how many times fewer bytes than exact steps were sent
    in rounds. `every` 0: each step is exact."""
    training, unseen, alphabet = text()
    options = small_gpt_options(steps=given["steps"])
    torch.manual_seed(seed)
    module: nn.Module = GPT(alphabet, options)
    inner = torch.optim.AdamW(module.parameters(), lr=options.lr, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.OneCycleLR(inner, options.lr, total_steps=given["steps"], pct_start=0.1)
    draw = torch.Generator().manual_seed(seed * 10_007 + dist.get_rank())
    rounds: ringdp.DiLoCo | None = None
    outer: dict[str, Any] | None = None
    if given["outer"] is not None:
        lr, momentum = given["outer"]
        outer = {"lr": lr, "momentum": momentum, "nesterov": momentum > 0}
    for step in range(given["steps"]):
        if every and step == given["warm_up"]:
            codec = codec_of(way, given)
            cut = ringdp.Fragments(given["fragments"], delay=given["delay"])
            rounds = ringdp.DiLoCo(
                module, inner, every=every, outer=outer, fragments=cut, compression=codec, process_group=group
            )
        inner.zero_grad()
        gpt_loss(module, windows_of(training, options, draw)).backward()
        if rounds is None:
            average_gradients(module, group)
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        inner.step()
        schedule.step()
    less = 1.0
    if rounds is not None:
        rounds.finish()
        rounds.detach()
        sent = rounds.stats()
        less = sent.bytes_of_exact_steps / max(1, sent.bytes_sent)
    return unseen_nats(module, unseen, options.context), less


def run_rank(joined: session.Joined) -> None:
    given, group = joined.settings, session.ring_group()
    found: dict[str, list[float]] = {}
    fewer: dict[str, float] = {}
    for seed in range(given["first_seed"], given["first_seed"] + given["seeds"]):
        rounds = [(f"every {every}, {way}", way, every) for every in given["every"] for way in given["ways"]]
        for name, way, every in [(EACH_STEP, "exact", 0), *rounds]:
            loss, fewer[name] = train(way, every, seed, given, group)
            found.setdefault(name, []).append(loss)
            if joined.rank == 0:
                print(f"seed {seed}, {name}: {loss:.4f} nats, 1/{fewer[name]:.0f} of the bytes", flush=True)
    joined.deliver({"losses": found, "fewer": fewer})


def settings(args: argparse.Namespace) -> dict[str, Any]:
    names = ("ways", "every", "seeds", "first_seed", "steps", "decay", "outer", "fragments", "delay")
    return {name: getattr(args, name) for name in names} | {"warm_up": round(args.warm_up * args.steps)}


def report(result: dict[str, Any]) -> str:
    found, fewer = result["rows"]["losses"], result["rows"]["fewer"]
    base, rows = found[EACH_STEP], []
    for name, each in found.items():
        mean, half = interval([a - b for a, b in zip(each, base, strict=True)])
        spread = statistics.stdev(each) if len(each) > 1 else 0.0
        shown = "" if each is base else f"{mean:+.4f}" + ("" if half == float("inf") else f" ± {half:.4f}")
        rows.append([name, f"{statistics.fmean(each):.4f}", f"{spread:.4f}", shown, f"1/{fewer[name]:.0f}"])
    given = result["settings"]
    words = f"{given['steps']} steps of each rank, the first {given['warm_up']} exact, {given['seeds']} seeds"
    columns = ["", "nats per character", "σ of seeds", f"to {EACH_STEP}, 95 %", "bytes"]
    return session.text(result, words, table(columns, rows))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ways", default="exact,int4,sparse2", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--every", default="15,50,100", help="steps of a round (15,50,100)")
    parser.add_argument("--seeds", type=int, default=3, help="how many (3)")
    parser.add_argument("--first-seed", type=int, default=0, help="(0)")
    parser.add_argument("--steps", type=int, default=2500, help="of each rank (2500)")
    parser.add_argument("--warm-up", type=float, default=0.1, help="part of the steps before rounds (0.1)")
    parser.add_argument("--decay", type=float, default=0.95, help="of sparse2's residual (0.95)")
    parser.add_argument("--fragments", type=int, default=1, help="parts that are averaged one after the other (1)")
    parser.add_argument("--delay", type=int, default=0, help="steps from sending one to using its mean (0)")
    parser.add_argument("--outer", help="learning rate and Nesterov's momentum, 0.7,0.9 (what DiLoCo has by default)")


def check(args: argparse.Namespace) -> None:
    args.ways = session.chosen(args.ways, tuple(WAYS))
    args.every = [int(it) for it in args.every.split(",")]
    if args.outer is not None:
        args.outer = [float(it) for it in args.outer.split(",")]
        if len(args.outer) != 2:
            raise ValueError("--outer has two numbers: 0.7,0.9")
    session.at_least(1, seeds=args.seeds, steps=args.steps, every=min(args.every))
    if not 0 <= args.warm_up < 1:
        raise ValueError("--warm-up is a part of the steps: from 0 to below 1")
