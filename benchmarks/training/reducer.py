"""What the wrapper itself costs the host in a training step: torch's DDP and RingDP, in one process, without a wire.

    python -m benchmarks reducer                                1,000 parameters of 16 elements, all modes
    python -m benchmarks reducer --parameters 600 --elements 1024 --modes ddp-view,ringdp --json out.json

Two cases. `alone` is a job of one rank: DDP on gloo does there what it always does, RingDP on ring has nobody to agree
with and leaves the gradients to autograd. `reducer` is what both do when there are others: a group of two of which one
is played by nobody (torch's backend `fake`, which sends nothing), and a communication hook that gives the bucket back
at once. So every gradient is counted, goes into its bucket and out of it again, and nobody waits.

Modes: `ddp`, `ringdp`, with `-view` (gradient_as_bucket_view=True), `-static` (static_graph=True), `-unused`
(find_unused_parameters=True) and `-strict` (find_unused_parameters=False, DDP's default; RingDP's is None).
Each mode's gradients must be the bare module's to the bit before anything is timed. Blocks of steps alternate between
the modes.
    / bare    step over the bare module's
    added     a block's median step less that of the bare module's block of the same round; the median over the rounds
    / ddp     `added` over that of DDP with the same settings, in the faster of its two ways to keep gradients
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.lib import session
from benchmarks.lib.measure import Quiet, Summary, format_time, percentile
from benchmarks.lib.ranks import Failed

CASES = ("alone", "reducer")
MODES = (
    "ddp", "ddp-view", "ddp-static", "ddp-view-static", "ddp-unused", "ddp-view-unused",
    "ringdp", "ringdp-strict", "ringdp-static", "ringdp-unused",
)  # fmt: skip
PHASES = ("step", "forward", "backward")
CHECKED_STEPS = 3


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--modes", default=",".join(MODES), help="see above; the bare module is always measured")
    parser.add_argument("--parameters", type=int, default=1000, help="how many (default 1000)")
    parser.add_argument("--elements", type=int, default=16, help="of each (default 16)")
    parser.add_argument("--rounds", type=int, default=30, help="blocks of steps for each mode (default 30)")
    parser.add_argument("--steps", type=int, default=5, help="timed in a block (default 5)")


def check(args: argparse.Namespace) -> None:
    args.cases, args.modes = session.chosen(args.cases, CASES), session.chosen(args.modes, MODES)
    session.at_least(1, rounds=args.rounds, steps=args.steps, parameters=args.parameters, elements=args.elements)


def settings_of(mode: str) -> dict[str, Any]:
    """The wrapper's arguments in that mode."""
    words = mode.split("-")[1:]
    settings: dict[str, Any] = {"gradient_as_bucket_view": True} if "view" in words else {}
    if "static" in words:
        settings["static_graph"] = True
    if "unused" in words or "strict" in words:
        settings["find_unused_parameters"] = "unused" in words
    return settings


@contextmanager
def groups(case: str) -> Iterator[dict[str, Any]]:
    """The process group of each wrapper in that case; torch's default group for the time of the `with`."""
    if case == "alone":
        dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
        made = {"ddp": dist.group.WORLD, "ringdp": dist.new_group(backend="ring")}
    else:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        made = dict.fromkeys(("ddp", "ringdp"), dist.group.WORLD)
    try:
        yield made
    finally:
        dist.destroy_process_group()


@dataclass
class Measured:
    """One mode's module, and its times."""

    module: nn.Module
    x: torch.Tensor
    seconds: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    block_medians_s: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})

    def step(self) -> tuple[float, ...]:
        """Forward and backward, into gradients that are None; the seconds of each of PHASES."""
        self.module.zero_grad(set_to_none=True)
        start = perf_counter()
        y = self.module(self.x).sum()
        forward_end = perf_counter()
        y.backward()
        end = perf_counter()
        return end - start, forward_end - start, end - forward_end

    def block(self, steps: int) -> None:
        self.step()  # not timed: the caches still hold the mode before
        timed = [self.step() for _ in range(steps)]
        for phase, values in zip(PHASES, zip(*timed, strict=True), strict=True):
            self.seconds[phase] += values
            self.block_medians_s[phase].append(percentile(values, 0.5))


class Rows(nn.Module):
    """Its parameters as the rows of a matrix: a gradient for each, and next to nothing else to do."""

    def __init__(self, parameters: int, elements: int) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(0)
        self.rows = nn.ParameterList(nn.Parameter(torch.randn(elements, generator=own)) for _ in range(parameters))
        self._listed = list(self.rows)  # going through a ParameterList takes longer than the rest

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._listed) * x


def wrap(mode: str, module: nn.Module, group: Any, *, hooked: bool) -> DistributedDataParallel:
    import ringdp

    wrapper = ringdp.RingDP if mode.startswith("ringdp") else DistributedDataParallel
    wrapped = wrapper(module, process_group=group, **settings_of(mode))
    if hooked:
        wrapped.register_comm_hook(None, noop_hook)
    return wrapped


def compare(mode: str, one: Measured, bare: Measured) -> None:
    """Take CHECKED_STEPS steps; the gradients must be the bare module's to the bit."""
    for _ in range(CHECKED_STEPS):
        one.step()
    bare.step()
    pairs = zip(one.module.parameters(), bare.module.parameters(), strict=True)
    for number, (mine, right) in enumerate(pairs):
        if mine.grad is None or right.grad is None or not torch.equal(mine.grad, right.grad):
            raise Failed(f"{mode}: the gradient of parameter {number} is not the bare module's; nothing is timed")


def measure_case(case: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per mode. Raises Failed."""
    x = torch.arange(1.0, args.parameters * args.elements + 1).view(args.parameters, args.elements)
    measured = {"bare": Measured(Rows(args.parameters, args.elements), x)}
    with groups(case) as group:
        for mode in args.modes:
            module = Rows(args.parameters, args.elements)
            wrapped = wrap(mode, module, group[mode.split("-")[0]], hooked=case == "reducer")
            measured[mode] = Measured(wrapped, x)
            compare(mode, measured[mode], measured["bare"])
        modes = list(measured)
        for turn in range(args.rounds):
            for mode in modes[turn % len(modes) :] + modes[: turn % len(modes)]:
                measured[mode].block(args.steps)
    return [row(case, mode, one, measured["bare"]) for mode, one in measured.items()]


def row(case: str, mode: str, one: Measured, bare: Measured) -> dict[str, Any]:
    result: dict[str, Any] = {"case": case, "mode": mode}
    for phase in PHASES:
        result[phase] = asdict(Summary.of(one.seconds[phase]))
        pairs = zip(one.block_medians_s[phase], bare.block_medians_s[phase], strict=True)
        added = [mine - without for mine, without in pairs]
        result[f"{phase}_added_s"] = percentile(added, 0.5)
        result[f"{phase}_added_quartiles_s"] = [percentile(added, 0.25), percentile(added, 0.75)]
    result["over_bare"] = result["step"]["median_s"] / percentile(bare.seconds["step"], 0.5)
    return result


def add_over_ddp(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with `over_ddp`, where DDP with the same settings was measured and cost something."""
    added = {(one["case"], one["mode"]): one["step_added_s"] for one in rows}
    result = []
    for one in rows:
        suffix = "".join(f"-{word}" for word in one["mode"].split("-")[1:] if word not in ("view", "strict"))
        same = [added.get((one["case"], f"{name}{suffix}"), 0.0) for name in ("ddp", "ddp-view")]
        peers = [value for value in same if value > 0]
        extra = {"over_ddp": one["step_added_s"] / min(peers)} if peers and one["mode"].startswith("ringdp") else {}
        result.append(one | extra)
    return result


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run everything and return what `--json` writes. Raises Unavailable, Failed."""
    session.need_ringdp()
    torch.set_num_threads(1)
    quiet = Quiet.start()
    rows = [one for case in args.cases for one in measure_case(case, args)]
    quiet.stop(ranks_s=sum(resource.getrusage(resource.RUSAGE_SELF)[:2]))
    about = {"parameters": args.parameters, "elements": args.elements}
    return session.result_of("reducer", quiet, **about, rows=add_over_ddp(rows))


def report(result: dict[str, Any]) -> str:
    """The result as text."""
    columns = ["case", "mode", "step", "p99", "/ bare", "added", "quartiles", "in forward", "in backward", "/ ddp"]
    rows = []
    for one in result["rows"]:
        cells = [one["case"], one["mode"], format_time(one["step"]["median_s"]), format_time(one["step"]["p99_s"])]
        if one["mode"] == "bare":
            rows.append([*cells, *[""] * (len(columns) - len(cells))])
            continue
        low, high = (format_time(value) for value in one["step_added_quartiles_s"])
        cells += [f"{one['over_bare']:.3f}", format_time(one["step_added_s"]), f"{low} to {high}"]
        cells += [format_time(one[f"{phase}_added_s"]) for phase in ("forward", "backward")]
        cells += [f"{one['over_ddp']:.2f}" if "over_ddp" in one else ""]
        rows.append(cells)
    size = f"{result['parameters']} parameters of {result['elements']} elements"
    return session.report_table(result, f"the wrapper's own work per step, {size}", columns, rows)
