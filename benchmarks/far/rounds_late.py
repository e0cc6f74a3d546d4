"""What late ranks cost in rounds: samples a second that count, and the loss, of an undisturbed run and of ones in which
a rank is slow for a while, or stands still.

    python -m benchmarks rounds_late --ranks 8                       all ways, 2 seeds
    python -m benchmarks rounds_late --ranks 4 --rounds 20 --ways waits,quorum --seeds 1

The GPT of examples/char_lm.py, 0.12 M parameters; a step takes --step-ms: the ranks sleep for the rest of it, so that
they do not compete for cores. In each --period one rank after the other makes steps that take four times as long, for a
fifth of the period; and another one stands still once, for a sixth. `waits` is the default, `unequal` ends rounds at an
agreed time, `quorum` at --quorum of the ranks and --grace seconds. Each run has the same number of rounds. Printed are
the samples of all ranks that are in a mean, by second, relative to those of the undisturbed run, and nats per character
on text that was not trained on after it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ringdp
from benchmarks.compression.quality_runs import gpt_loss, small_gpt_options, text, unseen_nats, windows_of
from benchmarks.lib import session
from benchmarks.lib.measure import table
from examples.char_lm import GPT

WAYS: dict[str, dict[str, Any]] = {"waits": {}, "unequal": {"unequal": True}, "quorum": {}}
UNDISTURBED = "undisturbed"
SLOWER, SLOW_PART, STILL_PART = 4.0, 1 / 5, 1 / 6


def is_slow(rank: int, ranks: int, at_s: float, period_s: float) -> bool:
    number, place = divmod(at_s, period_s)
    return place < SLOW_PART * period_s and 3 * number % ranks == rank


def stands_still_s(rank: int, ranks: int, begin_s: float, end_s: float, period_s: float) -> float:
    """Seconds for which the rank stands still that was busy between these times: once, in the middle of a period."""
    number = int(begin_s // period_s)
    comes = (number + 0.5) * period_s
    return STILL_PART * period_s if begin_s <= comes < end_s and (3 * number + 1) % ranks == rank else 0.0


def train(way: str, seed: int, given: dict[str, Any], group: Any) -> tuple[float, float, float]:
    """Seconds, samples of all ranks, nats per character at the end; the same on all ranks."""
    training, unseen, alphabet = text()
    options = small_gpt_options(steps=given["rounds"] * given["every"])
    torch.manual_seed(seed)
    module: nn.Module = GPT(alphabet, options)
    inner = torch.optim.AdamW(module.parameters(), lr=options.lr, betas=(0.9, 0.95))
    named = WAYS.get(way, {}) | ({"quorum": given["quorum"], "grace": given["grace"]} if way == "quorum" else {})
    rounds = ringdp.DiLoCo(module, inner, every=given["every"], process_group=group, **named)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    draw = torch.Generator().manual_seed(seed * 10_007 + rank)
    step_s, period_s = given["step_ms"] / 1e3, given["period"]
    dist.barrier(group=group)
    began = time.monotonic()
    while rounds.round < given["rounds"]:
        step_began = time.monotonic() - began
        inner.zero_grad()
        gpt_loss(module, windows_of(training, options, draw)).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        busy_s = time.monotonic() - began - step_began
        wanted_s = step_s
        if way != UNDISTURBED:
            wanted_s *= SLOWER if is_slow(rank, ranks, step_began, period_s) else 1.0
            wanted_s += stands_still_s(rank, ranks, step_began, step_began + step_s, period_s)
        time.sleep(max(0.0, wanted_s - busy_s))
        inner.step()
    rounds.finish()
    rounds.detach()
    took = torch.tensor([time.monotonic() - began], dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX, group=group)
    samples = torch.tensor([float(rounds.step)], dtype=torch.float64)
    dist.all_reduce(samples, group=group)
    return float(took), float(samples) * options.batch_size, unseen_nats(module, unseen, options.context)


def run_rank(joined: session.Joined) -> None:
    given, group = joined.settings, session.ring_group()
    found: dict[str, list[tuple[float, float, float]]] = {}
    for seed in range(given["seeds"]):
        for way in (UNDISTURBED, *given["ways"]):
            found.setdefault(way, []).append(train(way, seed, given, group))
            if joined.rank == 0:
                seconds, samples, nats = found[way][-1]
                print(f"seed {seed}, {way}: {samples / seconds:.0f} samples/s, {nats:.4f} nats", flush=True)
    joined.deliver(found)


def settings(args: argparse.Namespace) -> dict[str, Any]:
    names = ("ways", "seeds", "rounds", "every", "step_ms", "period", "quorum", "grace")
    return {name: getattr(args, name) for name in names}


def report(result: dict[str, Any]) -> str:
    rows, found = [], result["rows"]
    usual = [samples / seconds for seconds, samples, _ in found[UNDISTURBED]]
    for way, each in found.items():
        speeds = [samples / seconds for seconds, samples, _ in each]
        share = statistics.median(speed / one for speed, one in zip(speeds, usual, strict=True))
        seconds = statistics.median(one[0] for one in each)
        nats = statistics.fmean(one[2] for one in each)
        rows.append([way, f"{seconds:.1f}", f"{statistics.median(speeds):.0f}", f"{share:.0%}", f"{nats:.4f}"])
    given = result["settings"]
    words = f"{given['rounds']} rounds of {given['every']} steps, {given['seeds']} seeds"
    return session.text(result, words, table(["", "seconds", "samples/s", "of undisturbed", "nats"], rows))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)}")
    parser.add_argument("--seeds", type=int, default=2, help="how many (2)")
    parser.add_argument("--rounds", type=int, default=40, help="of each run (40)")
    parser.add_argument("--every", type=int, default=20, help="steps of a round (20)")
    parser.add_argument("--step-ms", type=float, default=60.0, help="of a step (60)")
    parser.add_argument("--period", type=float, default=30.0, help="seconds between disturbances (30)")
    parser.add_argument("--quorum", type=float, default=0.75, help="(0.75)")
    parser.add_argument("--grace", type=float, default=0.3, help="seconds (0.3)")


def check(args: argparse.Namespace) -> None:
    args.ways = session.chosen(args.ways, tuple(WAYS))
    session.at_least(1, seeds=args.seeds, rounds=args.rounds, every=args.every)
    if args.period <= 0 or args.step_ms < 0:
        raise ValueError("--period is above 0 and --step-ms at least 0")
