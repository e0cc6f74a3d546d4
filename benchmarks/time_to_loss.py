#!/usr/bin/env python3
"""How long a character GPT trains until its loss is what was asked for: RingDP with and without compression, and DDP.

    sudo python benchmarks/time_to_loss.py --hosts 4 --rate 100mbit --modes ddp-gloo-fp16,ringdp-int8,ringdp-int4
    sudo python benchmarks/time_to_loss.py … --modes ringdp-int4 --add-to loss.json    adds one mode to the file

The model of examples/char_lm.py on its text, 0.8 M parameters, the same weights and batches in each mode (step.py has
their names), one after the other. The loss is the training loss in nats, the mean over ranks and the last 20 steps; the
loss to reach is the highest of those that the modes end with, unless `--loss` says otherwise.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import command
import models
import session
from hosts import HostsError
from measure import format_time, machine, table
from ranks import RanksFailed

WINDOW = 20  # steps


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default="ddp-gloo-fp16,ringdp-int8,ringdp-int4", help="of step.py's")
    parser.add_argument("--steps", type=int, default=200, help="of training, in each mode (default 200)")
    parser.add_argument("--width", type=int, default=128, help="of the GPT (128 is 0.8 M parameters)")
    parser.add_argument("--layers", type=int, default=4, help="of the GPT (default 4)")
    parser.add_argument("--batch-size", type=int, default=4, help="windows of 64 characters per rank (default 4)")
    parser.add_argument("--loss", type=float, help="the loss to reach")
    parser.add_argument("--add-to", metavar="FILE", help="as --json, keeping what other modes measured there")
    parser.add_argument("--json", metavar="FILE", help="write everything measured there, too")
    session.add_place_options(parser)
    args = parser.parse_args(argv)
    args.mode_names = args.modes.split(",")
    if unknown := [name for name in args.mode_names if name not in models.MODES or name == "bare"]:
        parser.error(f"{unknown[0]!r} is not known, or does not train together")
    if args.steps < WINDOW:
        parser.error(f"at least {WINDOW} steps are needed")
    try:
        args.place = session.place_of(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Train in every mode. Raises Unavailable, HostsError, RanksFailed."""
    if reason := session.why_no_ringdp():
        raise session.Unavailable(reason)
    settings = {
        "modes": args.mode_names,
        "steps": args.steps,
        "gpt": {"width": args.width, "layers": args.layers, "batch_size": args.batch_size, "steps": args.steps},
    }
    with session.make_hosts(args.place) as hosts:
        rows, quiet = session.run(__file__, settings, args.place, hosts=hosts, timeout_s=args.timeout)
    path = Path(args.add_to) if args.add_to else None
    if path is not None and path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))["rows"]
        rows = [row for row in kept if row["mode"] not in args.mode_names] + rows
    return {
        "benchmark": "time_to_loss",
        "machine": machine(),
        "place": asdict(args.place) | {"words": str(args.place)},
        "settings": settings,
        "quiet": quiet.as_dict() | {"words": str(quiet)},
        "rows": rows,
        "loss": args.loss if args.loss is not None else max(smooth(row["losses"])[-1] for row in rows),
    }


def smooth(losses: Sequence[float]) -> list[float]:
    """The mean of each loss and those before it, `WINDOW` in all."""
    return [statistics.fmean(losses[max(0, end - WINDOW) : end]) for end in range(1, len(losses) + 1)]


def seconds_until(row: dict[str, Any], loss: float) -> float | None:
    """When the smoothed loss first was so low, in seconds of training; None: never."""
    for place, value in enumerate(smooth(row["losses"])):
        if place + 1 >= WINDOW and value <= loss:
            return float(row["seconds"][place])
    return None


def report(result: dict[str, Any]) -> str:
    rows = []
    reached = {row["mode"]: seconds_until(row, result["loss"]) for row in result["rows"]}
    base = reached.get("ddp-gloo-fp16")
    for row in result["rows"]:
        steps, took = row["seconds"], reached[row["mode"]]
        cells = [row["mode"], format_time(steps[-1] / len(steps)), f"{smooth(row['losses'])[-1]:.4f}"]
        cells += ["never" if took is None else format_time(took)]
        rows.append([*cells, f"{base / took:.2f}" if base and took else ""])
    about = result["machine"]
    columns = ["mode", "step", "loss at the end", f"until {result['loss']:.4f}", "faster than ddp-gloo-fp16"]
    lines = [
        f"time to a loss, character GPT, {result['rows'][0]['numel']:,} parameters, {result['place']['words']}",
        f"{about['processor']}, {about['cores']} cores, Linux {about['kernel']}, torch {about['torch']}",
        "",
        table(columns, rows),
        "",
        result["quiet"]["words"],
    ]
    return "\n".join([*lines, *(f"WARNING: {it}" for it in result["quiet"]["warnings"])])


def run_rank(path: str) -> None:
    joined = session.join(path)
    from step_rank import make_groups

    groups = make_groups(joined.settings["modes"])
    joined.deliver([_train(joined, name, groups[models.MODES[name].backend]) for name in joined.settings["modes"]])


def _train(joined: session.Joined, name: str, group: Any) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from quality_runs import gpt_loss, gpt_options, text, windows_of
    from step_rank import wrap

    from examples.char_lm import GPT

    options = gpt_options(**joined.settings["gpt"])
    training, _, alphabet = text()
    torch.manual_seed(0)
    gpt = GPT(alphabet, options)
    model = wrap(models.MODES[name], gpt, group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95))
    draw = torch.Generator().manual_seed(joined.rank)
    losses, seconds = [], []
    step = functools.partial(gpt_loss, model)
    for _ in range(2):  # buckets are shaped, connections warm; the weights stay
        step(windows_of(training, options, draw)).backward()
    dist.barrier()
    start = perf_counter()
    for done in range(joined.settings["steps"]):
        for group_of in optimizer.param_groups:
            group_of["lr"] = options.lr * min(1.0, (done + 1) / WINDOW)
        optimizer.zero_grad()
        loss = step(windows_of(training, options, draw))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        seconds.append(perf_counter() - start)
    everyone = torch.tensor([losses, seconds], dtype=torch.float64)
    dist.all_reduce(everyone)
    losses, seconds = (everyone / joined.world_size).tolist()
    numel = sum(it.numel() for it in gpt.parameters())
    return {"mode": name, "numel": numel, "losses": losses, "seconds": seconds}


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.as_rank:
        run_rank(args.as_rank)
        return 0
    return command.run(
        lambda: measure(args),
        report,
        json_path=args.json or args.add_to,
        cannot=(session.Unavailable, HostsError),
        failed=(RanksFailed,),
    )


if __name__ == "__main__":
    sys.exit(main())
