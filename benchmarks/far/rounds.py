#!/usr/bin/env python3
"""What rounds (ringdp.DiLoCo) cost, and what they do to the loss.

    python benchmarks/rounds.py step        one outer step: DiLoCo beside the usual loop on gloo (an all-reduce for each
                                            parameter, torch's SGD, parameters copied out and back), in turns
    python benchmarks/rounds.py loss        the GPT of examples/char_lm.py on 4 ranks, equal tokens, several seeds:
                                            RingDP, and rounds of 50 and 100 steps, exact and as codes,
                                            after --warm-up of the steps, which are exact (0.1)
    python benchmarks/rounds.py overlap --hosts 2 --rate 100mbit
                                            a larger GPT between hosts: a step alone, and with streaming rounds
    ringrun -H one,two benchmarks/rounds.py overlap         the same between your own machines
    sudo python benchmarks/long_line.py --rate 100mbit --timeout 1500 -- python benchmarks/rounds.py overlap
                                            and between two namespaces, 50 ms there and back

`step` checks that both come to the same parameters before it times them. `loss` prints nats per character on text that
was not trained on, after the last round; differences are between runs of the same seed, with 95 % intervals.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.lib import session
import torch
import torch.distributed as dist
from benchmarks.lib.measure import interval, machine, table
from benchmarks.compression.quality_runs import gpt_loss, small_gpt_options, text, unseen_nats, windows_of
from benchmarks.far.rounds_overlap import STREAMING, large_gpt, overlap, report_overlap
from torch import nn

import ringdp
from examples.char_lm import GPT

OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
RUNS: dict[str, dict[str, Any] | None] = {
    "RingDP": None,
    "every 50, streaming": {"every": 50, **STREAMING},
    "every 50, streaming, int4": {"every": 50, **STREAMING, "compression": "int4"},
    "every 100, streaming, int4": {"every": 100, **STREAMING, "compression": "int4"},
}

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
    group = dist.new_group(backend="ring")
    assert isinstance(group, dist.ProcessGroup)
    modules = {name: large_gpt() for name in ("usual loop, gloo", "DiLoCo", "DiLoCo, int4")}
    calls: dict[str, Callable[[], None]] = {
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
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(given["blocks"]):
        for name in list(calls) if turn % 2 else reversed(list(calls)):
            dist.barrier()
            began = time.perf_counter()
            for _ in range(3):
                calls[name]()
            times[name].append(session.slowest((time.perf_counter() - began) / 3))
    return {"parameters": exact.numel(), "times": times}


def report_steps(result: dict[str, Any]) -> str:
    times = result["rows"][0]["times"]
    base = times["usual loop, gloo"]
    rows = []
    for name, each in times.items():
        ratio, half = interval([a / b for a, b in zip(each, base, strict=True)])
        rows.append([name, f"{statistics.median(each) * 1e3:.1f} ms", f"{ratio:.3f} ± {half if half < 9 else 0:.3f}"])
    words = f"one outer step of {result['rows'][0]['parameters']:,} parameters, {result['ranks']} ranks, loopback"
    return words + "\n\n" + table(["", "median of the slowest rank", "to the usual loop"], rows)


# The loss.


def average_gradients(module: nn.Module, group: Any) -> None:
    """As RingDP does; its wrapper could not be taken off again."""
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    flat = torch.cat([it.flatten() for it in gradients])
    dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=group)
    for it, mean in zip(gradients, flat.split([it.numel() for it in gradients]), strict=True):
        it.copy_(mean.view_as(it))


def train(
    name: str, seed: int, steps: int, warm_up: int, group: Any, rank: int, outer: dict[str, Any]
) -> tuple[float, dict[str, float]]:
    """Nats per character at the end, the same on all ranks; and how many times fewer bytes rounds have sent.

    The first `warm_up` steps are exact, as RingDP's; then the rounds begin.
    """
    training, unseen, alphabet = text()
    options = small_gpt_options(steps=steps)
    torch.manual_seed(seed)
    module: nn.Module = GPT(alphabet, options)
    chosen = RUNS[name]
    model = ringdp.RingDP(module, process_group=group) if chosen is None else module
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95))
    rounds: ringdp.DiLoCo | None = None
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=steps, pct_start=0.1)
    draw = torch.Generator().manual_seed(seed * 10_007 + rank)
    for step in range(steps):
        if chosen is not None and step == warm_up:
            rounds = ringdp.DiLoCo(model, optimizer, process_group=group, **({"outer": outer} | chosen))
        optimizer.zero_grad()
        gpt_loss(model, windows_of(training, options, draw)).backward()
        if chosen is not None and rounds is None:
            average_gradients(module, group)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    cost = {}
    if rounds is not None:
        rounds.finish()
        rounds.detach()
        sent = rounds.stats()
        cost = {"less": sent.bytes_of_exact_steps / max(1, sent.bytes_sent)}
    return unseen_nats(module, unseen, options.context), cost


def losses(given: dict[str, Any], joined: session.Joined) -> dict[str, Any]:
    group = dist.new_group(backend="ring")
    found: dict[str, list[float]] = {name: [] for name in given["runs"]}
    costs: dict[str, dict[str, float]] = {}
    for seed in given["seeds"]:
        for name in given["runs"]:
            loss, costs[name] = train(name, seed, given["steps"], given["warm_up"], group, joined.rank, given["outer"])
            found[name].append(loss)
            if joined.rank == 0:
                print(f"seed {seed}, {name}: {loss:.4f}", flush=True)
    return {"losses": found, "costs": costs}


def report_losses(result: dict[str, Any]) -> str:
    found, costs = result["rows"][0]["losses"], result["rows"][0]["costs"]
    base = next(iter(found.values()))
    rows = []
    for name, each in found.items():
        mean, half = interval([a - b for a, b in zip(each, base, strict=True)])
        spread = statistics.stdev(each) if len(each) > 1 else 0.0
        less = costs[name].get("less")
        shown = "" if each is base else f"{mean:+.4f}" + ("" if half == float("inf") else f" ± {half:.4f}")
        rows.append([name, f"{statistics.fmean(each):.4f}", f"{spread:.4f}", shown, f"1/{less:.0f}" if less else "1"])
    settings = result["settings"]
    exact = f"the first {settings['warm_up']} exact"
    seeds = ", ".join(map(str, settings["seeds"]))
    words = f"{result['ranks']} ranks, {settings['steps']} steps each, {exact}, seeds {seeds}"
    columns = ["", "nats per character", "σ of seeds", f"to {next(iter(found))}, 95 %", "bytes"]
    return words + "\n\n" + table(columns, rows)


# Running.


def run_rank(path: str) -> None:
    joined = session.join(path)
    given = joined.settings
    if given["what"] == "overlap":
        group = dist.new_group(backend="ring")
        joined.deliver(overlap(given, group, joined.rank, joined.world_size))
        return
    joined.deliver((outer_steps if given["what"] == "step" else losses)(given, joined))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run everything and return what `--json` writes. Raises Unavailable, RanksFailed."""
    if reason := session.why_no_ringdp():
        raise session.Unavailable(reason)
    settings = settings_of(args)
    ranks = args.ranks or (4 if args.what == "loss" else args.hosts or 2)
    place = session.Place(ranks, args.hosts, args.rate)
    with session.make_hosts(place) as hosts:
        row, quiet = session.run(__file__, settings, place, hosts=hosts, timeout_s=args.timeout)
    return {
        "benchmark": "rounds",
        "what": args.what,
        "machine": machine(),
        "settings": settings,
        "ranks": ranks,
        "where": str(place),
        "quiet": str(quiet),
        "rows": [row],
    }


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "what": args.what,
        "blocks": args.blocks,
        "runs": args.runs.split(";"),
        "seeds": list(range(args.seeds)),
        "steps": args.steps,
        "warm_up": round(args.warm_up * args.steps),
        "outer": OUTER | {"lr": args.outer_lr, "momentum": args.outer_momentum},
        "every": args.every,
        "compression": None if args.compression == "none" else args.compression,
        "batch": args.batch,
        "width": args.width,
        "layers": args.layers,
    }


def report(result: dict[str, Any]) -> str:
    """The result as text."""
    shown = {"step": report_steps, "loss": report_losses, "overlap": report_overlap}[result["what"]](result)
    about = result["machine"]
    return f"{about['processor']}, {about['cores']} cores, torch {about['torch']}; {result['quiet']}\n{shown}"


def under_a_launcher(args: argparse.Namespace) -> int:
    """`overlap` on ranks that somebody else has started."""
    ringdp.init()
    settings = settings_of(args)
    row = overlap(settings, dist.group.WORLD, ringdp.rank(), ringdp.world_size())
    if ringdp.rank() == 0:
        hosts = {"rows": [row], "settings": settings, "where": f"{ringdp.world_size()} ranks, {ringdp.transports()}"}
        print(report_overlap(hosts), flush=True)
    ringdp.shutdown()
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="step", choices=("step", "loss", "overlap"), help="default step")
    parser.add_argument("--blocks", type=int, default=9, help="of each kind (step, overlap; default 9)")
    parser.add_argument("--runs", default=";".join(RUNS), help="of loss, with semicolons; the first is compared with")
    parser.add_argument("--seeds", type=int, default=3, help="how many (loss; default 3)")
    parser.add_argument("--steps", type=int, default=2500, help="of each rank (loss; default 2500)")
    parser.add_argument("--warm-up", type=float, default=0.1, help="part of the steps before rounds (loss; 0.1)")
    parser.add_argument("--outer-lr", type=float, default=OUTER["lr"], help="of the outer optimizer (loss; 0.7)")
    parser.add_argument("--outer-momentum", type=float, default=OUTER["momentum"], help="the same (default 0.9)")
    parser.add_argument("--every", type=int, default=50, help="steps of a round (overlap; default 50)")
    parser.add_argument("--compression", default="int4", help="of overlap: a codec, or none (default int4)")
    parser.add_argument("--batch", type=int, default=4, help="windows of 64 characters a step (overlap; default 4)")
    parser.add_argument("--width", type=int, default=384, help="of the model (overlap; default 384)")
    parser.add_argument("--layers", type=int, default=6, help="of the model (overlap; default 6)")
    parser.add_argument("--json", metavar="FILE", help="write everything measured there, too")
    session.add_place_options(parser)
    args = parser.parse_args(argv)
    if unknown := [name for name in args.runs.split(";") if name not in RUNS]:
        parser.error(f"{unknown[0]!r} is not known: choose from {'; '.join(RUNS)}")
    if not 0 <= args.warm_up < 1:
        parser.error("--warm-up is a part of the steps: from 0 to below 1")
    if min(args.blocks, args.seeds, args.steps, args.every, args.batch) < 1:
        parser.error("numbers are at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.what == "overlap" and not args.as_rank and "RANK" in os.environ:
        return under_a_launcher(args)
    return session.main(args, run_rank, measure, report)


if __name__ == "__main__":
    sys.exit(main())
