"""A training step without communication, under torch's DDP and under RingDP: times, and how much communication hides.

    python -m benchmarks step                                   2 ranks on loopback, all models, the usual modes
    python -m benchmarks step --ranks 1 --modes bare,ringdp     what the wrapper alone costs
    python -m benchmarks step --modes ringdp,ringdp-reproducible,ringdp-guard-100       what options cost
    python -m benchmarks step --modes ddp-ring-scaled,ringdp-scaled --optimizer fused-adamw
    sudo python -m benchmarks step --hosts 2 --rate 1gbit --models mlp --json out.json

Models: `mlp` (23.1 M parameters), `gpt` (10.8 M), `small` (300 linear layers, so 600 small parameters).
Modes: `bare` (each rank for itself), `bare-barrier` (for itself, but all wait for the slowest at the end of each
backward, which a step with a mean cannot avoid), `ddp-gloo` and `ddp-ring` (torch's DDP), with `-view`
(gradient_as_bucket_view), `-fp16` (its hook), `-powersgd` (torch's hook, rank 4), `-int8` and `-int4` (ringdp's hook);
`ringdp` (RingDP on ring), `ringdp-gloo`, `ringdp-nopool` (gradient_pool=False), `ringdp-reproducible`,
`ringdp-guard-100` (guard=), `ringdp-silent` and `ringdp-metrics` (without reports; with them and a line of metrics
a step), `ringdp-buckets-1` (bucket_cap_mb), `ringdp-weights` and `ringdp-unequal`
(weights that are equal, or differ by 0.1 %), `ringdp-int8`, `-topk` and so on (a compressor, by its name; `-topk-dgc`:
1 % with momentum on the ranks); with loss scaling `ringdp-scaled`, and by torch's scaler `ringdp-torch-scaled` and
`ddp-ring-scaled`.
Every mode first takes three steps that must agree with gradients averaged over all ranks' batches in one process; then
blocks of steps alternate between the modes. Times are the slowest rank's.
    / MODE      step time over that of `--against`, by pairs of blocks of a round: the mean and its 95 % interval
    exposed     step time over the bare module's, the communication a step had to wait for and the wrapper's own work
    all-reduce  the same buckets reduced with nothing else going on
    loop        the same buckets through a loop written for nothing but speed (collectives/ceiling.cpp; one host)
    exposed / loop   the step beyond the bare one in units of that: what is left to what the machine can do
    waited      what RingDP itself says the end of backward waited for communication, per step, on rank 0
    faults      pages the kernel gave the process anew, per step (minor faults of getrusage(2)), the most of any rank
    cpu         CPU time of all threads of a process, per step, the most of any rank: others' load shows less in it
    hidden      (bare backward + all-reduce - backward with communication) / min(bare backward, all-reduce)
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.collectives import ceiling
from benchmarks.lib import models, session
from benchmarks.lib.goodput import interface_bytes
from benchmarks.lib.hosts import INTERFACE
from benchmarks.lib.measure import Summary, format_size, format_time, interval, table
from benchmarks.training.modes import DEFAULT_MODES, MODES, make_groups, wire_bytes
from benchmarks.training.trainee import OPTIMIZERS, PHASES, Trainee, reference

MIN_STEPS, MAX_STEPS = 3, 200  # of one mode in one block


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default=",".join(models.NAMES), help=f"of {', '.join(models.NAMES)}")
    parser.add_argument("--modes", default=",".join(DEFAULT_MODES), help=f"of {', '.join(MODES)}")
    parser.add_argument("--against", help="the mode that others are compared with (ringdp, or the first)")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd", help="(default sgd)")
    parser.add_argument("--zero-grad", choices=("none", "keep"), default="none", help="what zero_grad() leaves behind")
    parser.add_argument("--rounds", type=int, default=7, help="blocks of steps for each mode (default 7)")
    parser.add_argument("--block-seconds", type=float, default=1.0, help="about how long a block lasts")


def check(args: argparse.Namespace) -> None:
    args.models, args.modes = session.chosen(args.models, models.NAMES), session.chosen(args.modes, tuple(MODES))
    args.against = args.against or ("ringdp" if "ringdp" in args.modes else args.modes[0])
    session.chosen(args.against, args.modes)
    session.at_least(1, rounds=args.rounds)


def settings(args: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(args, name) for name in ("modes", "models", "rounds", "optimizer", "against", "zero_grad")}
    given |= {"block_s": args.block_seconds, "interface": INTERFACE if args.place.hosts else None}
    return given | {"ceiling": args.ceiling}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Raises Unavailable, Failed."""
    with contextlib.ExitStack() as stack:
        there = ceiling.why_not(ranks=args.place.ranks, hosts=args.place.hosts) is None
        args.ceiling = stack.enter_context(ceiling.prepared()) if there else None
        return session.measured(sys.modules[__name__], "step", args)


# What each rank does.


class Measured(Trainee):
    """A trainee, and what was measured of it on this rank."""

    loop: ceiling.Ceiling | None = None

    def begin(self) -> None:
        self.wire_bytes = wire_bytes(self.mode, self.task.module)
        self.wrap()
        self.seconds: dict[str, list[float]] = {phase: [] for phase in (*PHASES, "all_reduce", "loop")}
        self.block_medians_s: list[float] = []
        self.steps = self.sent_bytes = self.faults = 0
        self.cpu_s = 0.0  # of all threads, user and system

    def block(self, count: int, interface: str | None) -> None:
        dist.barrier()
        sent_before = interface_bytes(interface)[1] if interface else 0
        before = resource.getrusage(resource.RUSAGE_SELF)
        self.step()  # not timed: the caches still hold the mode before
        timed = [self.step()[1] for _ in range(count)]
        after = resource.getrusage(resource.RUSAGE_SELF)
        self.faults += after.ru_minflt - before.ru_minflt
        self.cpu_s += after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        dist.barrier()
        self.sent_bytes += (interface_bytes(interface)[1] if interface else 0) - sent_before
        self.steps += count + 1
        for phase, seconds in zip(PHASES, zip(*timed, strict=True), strict=True):
            self.seconds[phase] += seconds
        self.block_medians_s.append(Summary.of([step for step, *_ in timed]).median_s)
        if self.mode.wrapper and not (self.mode.compression or self.mode.hook):  # those are another exchange
            self.all_reduce_alone(max(MIN_STEPS, count // 3))

    def all_reduce_alone(self, count: int) -> None:
        """Reduce the mode's own buckets, all issued at once, with nothing else going on."""
        buckets = [torch.zeros(size // 4) for size in bucket_bytes(self.module)]

        def reduce() -> None:
            for work in [dist.all_reduce(bucket, group=self.group, async_op=True) for bucket in buckets]:
                work.wait()

        reduce()
        self.seconds["all_reduce"].append(session.block(reduce, count))
        if (loop := self.loop) is not None:

            def by_loop() -> None:
                for bucket in buckets:
                    loop.all_reduce(bucket)

            self.seconds["loop"].append(session.block(by_loop, count))

    def over_ranks(self, joined: session.Joined) -> dict[str, Any]:
        mine: dict[str, Any] = {"times": {name: Summary.of(it) for name, it in self.seconds.items() if it}}
        mine |= {"medians": self.block_medians_s, "sent": self.sent_bytes / self.steps}
        mine |= {"faults": self.faults / self.steps, "cpu_s": self.cpu_s / self.steps}
        everyone: list[Any] = [None] * joined.world_size
        dist.all_gather_object(everyone, mine | {"reports": joined.local_rank == 0})
        times = {name: Summary.slowest([each["times"][name] for each in everyone]) for name in mine["times"]}
        stats: Any = getattr(self.module, "stats", lambda: None)()  # RingDP's
        return {
            **{name: asdict(times[name]) if name in times else None for name in self.seconds},
            "block_medians_s": [max(values) for values in zip(*(each["medians"] for each in everyone), strict=True)],
            "sent_bytes_per_step": [each["sent"] for each in everyone if each["reports"] and each["sent"]],
            "faults_per_step": max(each["faults"] for each in everyone),
            "cpu_s_per_step": max(each["cpu_s"] for each in everyone),
            "bucket_bytes": bucket_bytes(self.module) if self.mode.wrapper else [],
            "waited_s": stats.total_exposed_wait_s / max(1, stats.steps) if stats is not None else None,
        }


def bucket_bytes(module: nn.Module) -> list[int]:
    """Sizes of the buckets that DDP or RingDP reduces, in bytes, as they are once the first steps have shaped them."""
    assert isinstance(module, DistributedDataParallel)
    data = module._get_ddp_logging_data()
    text = data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
    return [int(word) for word in text.split(",")]


def run_rank(joined: session.Joined) -> None:
    groups = make_groups(joined.settings["modes"])
    paths, loop = joined.settings["ceiling"], None
    if paths:
        files = Path(paths["library"]), Path(paths["memory"])
        loop = ceiling.Ceiling(*files, rank=joined.rank, ranks=joined.world_size)
    rows = []
    for name in joined.settings["models"]:
        joined.say(name)
        rows += _one_model(joined, name, groups, loop)
    joined.deliver(rows)


def _one_model(
    joined: session.Joined, name: str, groups: dict[str, dist.ProcessGroup], loop: ceiling.Ceiling | None
) -> list[dict[str, Any]]:
    given = joined.settings
    trainees: dict[str, Measured] = {}
    wanted = reference(name, joined)
    for word in given["modes"]:
        mode, task = MODES[word], models.make(name, rank=joined.rank)
        none = given["zero_grad"] == "none"
        one = Measured(f"{name} in mode {word}", mode, task, groups.get(mode.backend), none, given["optimizer"])
        one.loop = loop
        one.begin()
        one.check(wanted)
        trainees[word] = one
    counts = {}
    for word, one in trainees.items():
        dist.barrier()
        step_s = session.slowest(min(one.step()[1][0] for _ in range(MIN_STEPS)))
        counts[word] = max(MIN_STEPS, min(MAX_STEPS, int(given["block_s"] / step_s)))
    names = list(trainees)
    for turn in range(given["rounds"]):
        for word in names[turn % len(names) :] + names[: turn % len(names)]:
            trainees[word].block(counts[word], given["interface"])
    return [
        {"model": name, "mode": word, "numel": one.task.numel, "wire_bytes": one.wire_bytes, **one.over_ranks(joined)}
        for word, one in trainees.items()
    ]


# Around them.


def add_derived(rows: Sequence[dict[str, Any]], place: session.Place) -> list[dict[str, Any]]:
    """The rows with what follows from comparing modes of one model; a number that cannot be had is left out."""
    by_mode = {(row["model"], row["mode"]): row for row in rows}
    result = []
    for row in rows:
        extra: dict[str, Any] = {}
        bare = by_mode.get((row["model"], "bare"))
        if bare is not None and row["mode"] != "bare":
            extra["exposed_s"] = row["step"]["median_s"] - bare["step"]["median_s"]
            if row["loop"]:
                extra["exposed_over_loop"] = extra["exposed_s"] / row["loop"]["median_s"]
            if place.ranks > 1 and row["all_reduce"]:
                backward_s, alone_s = bare["backward"]["median_s"], row["all_reduce"]["median_s"]
                together_s = row["backward"]["median_s"]
                extra["hidden"] = (backward_s + alone_s - together_s) / min(backward_s, alone_s)
        if place.hosts > 1 and row["mode"] != "bare" and row["wire_bytes"] is not None:
            least = 2 * (place.hosts - 1) / place.hosts * row["wire_bytes"]
            extra["sent_over_theory"] = max(row["sent_bytes_per_step"]) / least
        result.append(row | extra)
    return result


def report(result: dict[str, Any]) -> str:
    given, between_hosts = result["settings"], result["place"]["hosts"] > 1
    columns = ["model", "mode", "step", "p99", "forward", "backward", "optimizer", f"/ {given['against']}", "exposed"]
    columns += ["waited", "all-reduce", "loop", "exposed / loop", "hidden", "buckets", "faults", "cpu", "steps"]
    columns += ["sent, MB", "sent / theory"] if between_hosts else []
    base = {row["model"]: row["block_medians_s"] for row in result["rows"] if row["mode"] == given["against"]}
    rows = []
    for row in result["rows"]:
        step = Summary(**row["step"])
        cells = [row["model"], row["mode"], format_time(step.median_s), format_time(step.p99_s)]
        cells += [format_time(row[phase]["median_s"]) for phase in PHASES[1:]]
        pairs = zip(row["block_medians_s"], base[row["model"]], strict=True)
        mean, half = interval([mine / other for mine, other in pairs])
        cells += [f"{mean:.3f} ± {half:.3f}" if row["mode"] != given["against"] else ""]
        cells += ["" if row.get(name) is None else format_time(row[name]) for name in ("exposed_s", "waited_s")]
        cells += [format_time(row[name]["median_s"]) if row[name] else "" for name in ("all_reduce", "loop")]
        cells += [f"{row['exposed_over_loop']:.2f}" if "exposed_over_loop" in row else ""]
        cells += [f"{row['hidden']:.0%}" if "hidden" in row else ""]
        cells += [str(len(row["bucket_bytes"])) if row["bucket_bytes"] else ""]
        cells += [f"{row['faults_per_step']:.0f}", format_time(row["cpu_s_per_step"]), str(step.count)]
        cells += [f"{max(row['sent_bytes_per_step'], default=0) / 1e6:.4g}"] if between_hosts else []
        cells += [f"{row['sent_over_theory']:.3f}" if "sent_over_theory" in row else ""] if between_hosts else []
        rows.append(cells)
    numel = {row["model"]: row["numel"] for row in result["rows"]}
    sizes = ", ".join(f"{name}: {format_size(4 * count)} of gradients" for name, count in numel.items())
    title = f"training step, {given['optimizer']}, zero_grad leaves {given['zero_grad']}"
    return session.text(result, title, sizes, table(columns, rows))
