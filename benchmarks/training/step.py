#!/usr/bin/env python3
"""A training step without communication, under torch's DDP and under RingDP: times, and how much communication hides.

    python benchmarks/step.py                                   2 ranks on loopback, all models, all modes
    python benchmarks/step.py --ranks 1 --modes bare,ringdp     what the wrapper alone costs
    sudo python benchmarks/step.py --hosts 2 --rate 1gbit --models mlp --json out.json

Models: `mlp` (23.1 M parameters), `gpt` (10.8 M), `small` (300 linear layers, so 600 small parameters); plain SGD.
Modes: `bare` (each rank for itself), `bare-barrier` (for itself, but all wait for the slowest at the end of each
backward, which a step with a mean cannot avoid), `ddp-gloo`, `ringdp` (RingDP on ring), `ringdp-nopool` (with
gradient_pool=False), `ddp-ring` (torch's DDP on ring),
`ddp-gloo-view` and `ddp-ring-view` (with gradient_as_bucket_view), `ringdp-gloo` (RingDP on gloo), `ringdp-int8`,
`-int4`, `-topk` and so on (RingDP with that compressor, by its name), `ringdp-topk-dgc` (top-k 1 % with momentum on the
ranks), `ringdp-buckets-1` and so on (RingDP with that bucket_cap_mb; `-ends`: small buckets at both ends),
`ringdp-weights` and `ringdp-unequal` (RingDP with weights that are equal, or differ by 0.1 %), `ddp-gloo-fp16`
and `ddp-ring-fp16` (DDP with its fp16 hook), `ddp-ring-powersgd` (with torch's PowerSGD hook, rank 4), `ddp-ring-int8`
and `ddp-ring-int4` (DDP with ringdp's hook).
Every mode first takes three steps that must agree with gradients averaged over all ranks' batches in one process; then
blocks of steps alternate between the modes. Times are the slowest rank's.
    exposed     step time over the bare module's, the communication a step had to wait for and the wrapper's own work
    all-reduce  the same buckets reduced with nothing else going on
    waited      what RingDP itself says the end of backward waited for communication, per step, on rank 0
    faults      pages the kernel gave the process anew, per step (minor faults of getrusage(2)), the most of any rank
    cpu         CPU time of all threads of a process, per step, the most of any rank: others' load shows less in it
    hidden      (bare backward + all-reduce - backward with communication) / min(bare backward, all-reduce)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.lib import models
from benchmarks.lib import session
from benchmarks.lib.hosts import INTERFACE
from benchmarks.lib.measure import Summary, format_size, format_time, machine, table


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(models.NAMES), help=f"of {', '.join(models.NAMES)}")
    parser.add_argument("--modes", default=",".join(models.DEFAULT_MODES), help=f"of {', '.join(models.MODES)}")
    parser.add_argument("--zero-grad", choices=("none", "keep"), default="none", help="what zero_grad() leaves behind")
    parser.add_argument("--rounds", type=int, default=7, help="blocks of steps for each mode (default 7)")
    parser.add_argument("--block-seconds", type=float, default=1.0, help="about how long a block lasts")
    parser.add_argument("--json", metavar="FILE", help="write everything measured there, too")
    session.add_place_options(parser)
    args = parser.parse_args(argv)
    args.mode_names, args.model_names = args.modes.split(","), args.models.split(",")
    for given, known in ((args.mode_names, models.MODES), (args.model_names, models.NAMES)):
        if unknown := [name for name in given if name not in known]:
            parser.error(f"{unknown[0]!r} is not known: choose from {', '.join(known)}")
    if args.rounds < 1:
        parser.error("at least one round is needed")
    args.place = session.place_of(parser, args)
    return args


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Run everything and return what `--json` writes. Raises Unavailable, HostsError, RanksFailed."""
    modes = [models.MODES[name] for name in args.mode_names]
    needs_ring = any(mode.backend == "ring" or mode.wrapper == "RingDP" for mode in modes)
    if needs_ring and (reason := session.why_no_ringdp()):
        raise session.Unavailable(f"{reason}; --modes bare,ddp-gloo measures without it")
    settings = {
        "modes": args.mode_names,
        "models": args.model_names,
        "rounds": args.rounds,
        "block_s": args.block_seconds,
        "set_to_none": args.zero_grad == "none",
        "interface": INTERFACE if args.place.hosts else None,
    }
    with session.make_hosts(args.place) as hosts:
        rows, quiet = session.run(__file__, settings, args.place, hosts=hosts, timeout_s=args.timeout)
    return {
        "benchmark": "step",
        "machine": machine(),
        "place": asdict(args.place) | {"words": str(args.place)},
        "zero_grad": args.zero_grad,
        "quiet": quiet.as_dict() | {"words": str(quiet)},
        "rows": add_derived(rows, args.place),
    }


def add_derived(rows: Sequence[dict[str, Any]], place: session.Place) -> list[dict[str, Any]]:
    """The rows with what follows from comparing modes of one model; a number that cannot be had is left out."""
    by_mode = {(row["model"], row["mode"]): row for row in rows}
    result = []
    for row in rows:
        extra: dict[str, Any] = {}
        bare, gloo = by_mode.get((row["model"], "bare")), by_mode.get((row["model"], "ddp-gloo"))
        step_s = row["step"]["median_s"]
        if gloo is not None:
            extra["over_ddp_gloo"] = step_s / gloo["step"]["median_s"]
        if bare is not None and row["mode"] != "bare":
            extra["over_bare"] = step_s / bare["step"]["median_s"]
            extra["exposed_s"] = step_s - bare["step"]["median_s"]
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
    """The result as text."""
    columns = ["model", "mode", "step", "p99", "forward", "backward", "/ ddp-gloo", "/ bare", "exposed"]
    columns += ["waited", "all-reduce", "hidden", "buckets", "faults", "cpu", "steps"]
    between_hosts = any(row["sent_bytes_per_step"] for row in result["rows"])
    columns += ["sent, MB", "sent / theory"] if between_hosts else []
    rows = []
    for row in result["rows"]:
        step = Summary(**row["step"])
        cells = [row["model"], row["mode"], format_time(step.median_s), format_time(step.p99_s)]
        cells += [format_time(row[phase]["median_s"]) for phase in ("forward", "backward")]
        cells += [f"{row[key]:.3f}" if key in row else "" for key in ("over_ddp_gloo", "over_bare")]
        cells += [format_time(row["exposed_s"]) if "exposed_s" in row else ""]
        cells += [format_time(row["waited_s"]) if row["waited_s"] is not None else ""]
        cells += [format_time(row["all_reduce"]["median_s"]) if row["all_reduce"] else ""]
        cells += [f"{row['hidden']:.0%}" if "hidden" in row else ""]
        cells += [str(len(row["bucket_bytes"])) if row["bucket_bytes"] else ""]
        cells += [f"{row['faults_per_step']:.0f}", format_time(row["cpu_s_per_step"]), str(step.count)]
        cells += [f"{max(row['sent_bytes_per_step']) / 1e6:.4g}"] if between_hosts else []
        cells += [f"{row['sent_over_theory']:.3f}" if "sent_over_theory" in row else ""] if between_hosts else []
        rows.append(cells)
    about, numel = result["machine"], {row["model"]: row["numel"] for row in result["rows"]}
    lines = [
        f"training step, {result['place']['words']}, zero_grad leaves {result['zero_grad']}",
        f"{about['processor']}, {about['cores']} cores, Linux {about['kernel']}, torch {about['torch']}",
        ", ".join(f"{name}: {format_size(4 * count)} of gradients" for name, count in numel.items()),
        "",
        table(columns, rows),
        "",
        result["quiet"]["words"],
    ]
    lines += [f"WARNING: {warning}" for warning in result["quiet"]["warnings"]]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.as_rank:
        from benchmarks.training.step_rank import run_rank

        run_rank(args.as_rank)
        return 0
    return session.command_line(args, measure, report)


if __name__ == "__main__":
    sys.exit(main())
