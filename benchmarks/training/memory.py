#!/usr/bin/env python3
"""How much memory a training step takes at its peak, under torch's DDP and under RingDP.

    python benchmarks/memory.py                                  2 ranks on loopback, all models
    python benchmarks/memory.py --models mlp --repeats 1 --json out.json

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
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.lib import models
from benchmarks.lib import session
from benchmarks.lib.measure import format_size, machine, table

MODES = ("bare", "ddp-ring", "ddp-ring-view", "ringdp")
PEER = "ddp-ring-view"
COUNTS = ("resident", "later", "tensors")
STEPS = 6


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(models.NAMES), help=f"of {', '.join(models.NAMES)}")
    parser.add_argument("--modes", default=",".join(MODES), help=f"of {', '.join(models.MODES)}")
    parser.add_argument("--zero-grad", choices=("none", "keep"), default="none", help="what zero_grad() leaves behind")
    parser.add_argument("--repeats", type=int, default=3, help="fresh processes for each mode, the median counts")
    parser.add_argument("--json", metavar="FILE", help="write everything measured there, too")
    session.add_place_options(parser)
    args = parser.parse_args(argv)
    args.mode_names, args.model_names = args.modes.split(","), args.models.split(",")
    for given, known in ((args.mode_names, models.MODES), (args.model_names, models.NAMES)):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"{unknown[0]!r} is not known: choose from {', '.join(known)}")
    if args.repeats < 1:
        parser.error("at least one repeat is needed")
    args.place = session.place_of(parser, args)
    return args


def run_rank(path: str) -> None:
    """What each rank does: one mode of one model."""
    from benchmarks.training import step_rank
    import torch
    import torch.distributed as dist

    joined = session.join(path)
    name, word = joined.settings["model"], joined.settings["mode"]
    mode = models.MODES[word]
    groups = step_rank.make_groups([word])
    group = groups.get(mode.backend)
    if group is not None:
        dist.all_reduce(torch.zeros(1), group=group)  # connections and their buffers are the backend's

    def trainee() -> step_rank.Trainee:
        task = models.make(name, rank=joined.rank)
        return step_rank.Trainee(task, task.module, group, joined.settings["set_to_none"])

    one = trainee()
    dist.barrier()
    before = reset_peak()
    one.module = step_rank.wrap(mode, one.module, group)
    peaks = []
    for _ in range(2):
        for _ in range(STEPS):
            one.step()
        peaks.append(status_bytes("VmHWM") - before)
        reset_peak()

    def wrap_and_train() -> None:
        other = trainee()  # inside: its parameters count alike in every mode, and are taken off
        other.module = step_rank.wrap(mode, other.module, group)
        for _ in range(STEPS):
            other.step()

    mine = dict(zip(COUNTS, [*peaks, peak_of_tensors(wrap_and_train) - 4 * one.task.numel], strict=True))
    averaged = bool(mode.wrapper) or joined.world_size == 1
    checked = trainee()
    checked.module = step_rank.wrap(mode, checked.module, group)
    step_rank.check_training(f"{name} in mode {word}", checked, step_rank.reference(name, joined) if averaged else None)
    everyone: list[Any] = [None] * joined.world_size
    dist.all_gather_object(everyone, mine)
    joined.deliver({key: max(each[key] for each in everyone) for key in COUNTS} | {"numel": one.task.numel})


def status_bytes(key: str) -> int:
    """A line of /proc/self/status that counts in kB."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise session.Unavailable(f"/proc/self/status says nothing of {key}: this kernel does not count it")


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
    if reason := session.why_no_ringdp():
        raise session.Unavailable(reason)
    runs: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with session.make_hosts(args.place) as hosts:
        for _ in range(args.repeats):
            for name in args.model_names:
                for mode in args.mode_names:
                    settings = {"model": name, "mode": mode, "set_to_none": args.zero_grad == "none"}
                    result, quiet = session.run(__file__, settings, args.place, hosts=hosts, timeout_s=args.timeout)
                    runs.setdefault((name, mode), []).append(result)
    rows = []
    for (name, mode), results in runs.items():
        numbers = {key: statistics.median(result[key] for result in results) for key in COUNTS}
        spread = [min(result["resident"] for result in results), max(result["resident"] for result in results)]
        rows.append({"model": name, "mode": mode, "numel": results[0]["numel"], "resident_spread": spread} | numbers)
    return {
        "benchmark": "memory",
        "machine": machine(),
        "place": asdict(args.place) | {"words": str(args.place)},
        "zero_grad": args.zero_grad,
        "quiet": quiet.as_dict() | {"words": str(quiet)},
        "rows": add_derived(rows),
    }


def add_derived(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
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
    about = result["machine"]
    return "\n".join(
        [
            f"peak memory of {STEPS} steps, {result['place']['words']}, zero_grad leaves {result['zero_grad']}",
            f"{about['processor']}, {about['cores']} cores, Linux {about['kernel']}, torch {about['torch']}",
            ", ".join(f"{name}: {format_size(4 * count)} of gradients" for name, count in numel.items()),
            "",
            table(columns, rows),
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    return session.main(parse(argv), run_rank, measure, report)


if __name__ == "__main__":
    sys.exit(main())
