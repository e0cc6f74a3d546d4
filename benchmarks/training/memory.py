"""How much memory a training step takes at its peak, under torch's DDP and under RingDP.

    python -m benchmarks memory                                  2 ranks on loopback, all models
    python -m benchmarks memory --models mlp --repeats 1 --json out.json

Models and modes are those of `step.py`. Every mode runs in fresh processes: what another one left behind, or the kernel
has given already, would hide what it takes. Columns, each the most that any rank had:
    resident        the peak of the process's memory in the first STEPS steps, beyond what it had before the module was
                    wrapped (VmHWM of /proc/PID/status, reset by /proc/PID/clear_refs; proc(5))
    later           the same for as many steps after those
    tensors         the peak of what tensors take, as torch's profiler counts them, from before the module is wrapped on
    / ddp-ring-view `resident` and `tensors` over those of DDP with gradient_as_bucket_view=True on the same backend
Afterwards three steps must agree with gradients averaged over all ranks' batches in one process.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.lib import models, session
from benchmarks.lib.measure import format_size, table
from benchmarks.lib.ranks import Unavailable
from benchmarks.training.modes import MODES as ALL_MODES
from benchmarks.training.modes import make_groups
from benchmarks.training.trainee import Trainee, reference

MODES = ("bare", "ddp-ring", "ddp-ring-view", "ringdp")
PEER = "ddp-ring-view"
COUNTS = ("resident", "later", "tensors")
STEPS = 6


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default=",".join(models.NAMES), help=f"of {', '.join(models.NAMES)}")
    parser.add_argument("--modes", default=",".join(MODES), help=f"of {', '.join(ALL_MODES)}")
    parser.add_argument("--zero-grad", choices=("none", "keep"), default="none", help="what zero_grad() leaves behind")
    parser.add_argument("--repeats", type=int, default=3, help="fresh processes for each mode, the median counts")


def check(args: argparse.Namespace) -> None:
    args.models, args.modes = session.chosen(args.models, models.NAMES), session.chosen(args.modes, tuple(ALL_MODES))
    session.at_least(1, repeats=args.repeats)


def run_rank(joined: session.Joined) -> None:
    """What each rank does: one mode of one model."""
    name, word = joined.settings["model"], joined.settings["mode"]
    mode = ALL_MODES[word]
    group = make_groups([word]).get(mode.backend)
    if group is not None:
        dist.all_reduce(torch.zeros(1), group=group)  # connections and their buffers are the backend's

    def trainee() -> Trainee:
        task = models.make(name, rank=joined.rank)
        return Trainee(f"{name} in mode {word}", mode, task, group, joined.settings["set_to_none"])

    one = trainee()
    dist.barrier()
    before = reset_peak()
    one.wrap()
    peaks = []
    for _ in range(2):
        for _ in range(STEPS):
            one.step()
        peaks.append(status_bytes("VmHWM") - before)
        reset_peak()

    def wrap_and_train() -> None:
        other = trainee()  # inside: its parameters count alike in every mode, and are taken off
        other.wrap()
        for _ in range(STEPS):
            other.step()

    mine = dict(zip(COUNTS, [*peaks, peak_of_tensors(wrap_and_train) - 4 * one.task.numel], strict=True))
    checked = trainee()
    checked.wrap()
    checked.check(reference(name, joined))
    everyone: list[Any] = [None] * joined.world_size
    dist.all_gather_object(everyone, mine)
    joined.deliver({key: max(each[key] for each in everyone) for key in COUNTS} | {"numel": one.task.numel})


def status_bytes(key: str) -> int:
    """A line of /proc/self/status that counts in kB."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise Unavailable(f"/proc/self/status says nothing of {key}: this kernel does not count it")


def reset_peak() -> int:
    """Begin to measure the peak anew; what the process has now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return status_bytes("VmRSS")


def peak_of_tensors(action: Any) -> int:
    """The most that tensors made during `action` took at once, in bytes."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        action()
    results = getattr(seen.profiler, "kineto_results")  # noqa: B009  # not in torch's annotations
    changes = sorted((event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]")
    live = peak = 0
    for _, change in changes:
        live += change
        peak = max(peak, live)
    return peak


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run everything and return what `--json` writes. Raises Unavailable, HostsError, RanksFailed."""
    session.need_ringdp()
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with session.make_hosts(args.place) as hosts:
        for _ in range(args.repeats):
            for name in args.models:
                for mode in args.modes:
                    settings = {"model": name, "mode": mode, "set_to_none": args.zero_grad == "none"}
                    result, quiet = session.run("memory", settings, args.place, hosts=hosts, timeout_s=args.timeout)
                    runs.setdefault((name, mode), []).append(result)
    rows = []
    for (name, mode), results in runs.items():
        numbers = {key: statistics.median(result[key] for result in results) for key in COUNTS}
        spread = [min(result["resident"] for result in results), max(result["resident"] for result in results)]
        rows.append({"model": name, "mode": mode, "numel": results[0]["numel"], "resident_spread": spread} | numbers)
    return session.result_of("memory", quiet, args.place, zero_grad=args.zero_grad, rows=over_ddp(rows))


def over_ddp(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with their shares of DDP's numbers, where PEER was measured."""
    peers = {row["model"]: row for row in rows if row["mode"] == PEER}
    return [
        row | {f"{key}_over_ddp": row[key] / peers[row["model"]][key] for key in COUNTS if row["model"] in peers}
        for row in rows
    ]


def report(result: dict[str, Any]) -> str:
    """The result as text."""
    columns = ["model", "mode", "resident", "from to", "later", "tensors"]
    columns += [f"{key} / {PEER}" for key in ("resident", "tensors")]
    rows = []
    for row in result["rows"]:
        low, high = (format_size(int(value)) for value in row["resident_spread"])
        cells = [row["model"], row["mode"], format_size(int(row["resident"])), f"{low} to {high}"]
        cells += [format_size(int(row[key])) for key in ("later", "tensors")]
        cells += [
            f"{row[f'{key}_over_ddp']:.3f}" if f"{key}_over_ddp" in row else "" for key in ("resident", "tensors")
        ]
        rows.append(cells)
    numel = {row["model"]: row["numel"] for row in result["rows"]}
    sizes = ", ".join(f"{name}: {format_size(4 * count)} of gradients" for name, count in numel.items())
    title = f"peak memory of {STEPS} steps, zero_grad leaves {result['zero_grad']}"
    return session.text(result, title, sizes, table(columns, rows))
