#!/usr/bin/env python3
"""How long a model trains until its loss is what was asked for: RingDP with and without compression, and DDP.

    sudo python benchmarks/time_to_loss.py --hosts 4 --rate 100mbit --modes ddp-gloo-fp16,ringdp-int8,ringdp-int4
    sudo python benchmarks/time_to_loss.py … --modes ringdp-int4 --add-to loss.json    adds one mode to the file
    sudo python benchmarks/time_to_loss.py --model resnet --steps 40 --hosts 4 --rate 100mbit --modes all

`gpt`: the character GPT of examples/char_lm.py on its text, 0.8 M parameters, by AdamW. `resnet`: the ResNet-18 of
examples/resnet.py on its digits, 11.2 M parameters, by SGD with momentum; the images are made smaller (`--pixels`), for
the sake of the time that is not communication. The same weights and batches in each mode (step.py has their names), one
after the other. The loss is the training loss in nats, the mean over ranks and the last steps (`--window`); the loss to
reach is the highest of those that the modes end with, unless `--loss` says otherwise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.lib import models
from benchmarks.lib import session
from benchmarks.compression import trainees
from benchmarks.lib.measure import format_time, machine, table

WINDOW = 20  # steps
BASE = "ddp-gloo-fp16"  # what the others are compared with
RESNET_MODES = (
    "ddp-gloo",
    BASE,
    "ddp-ring-powersgd",
    "ringdp",
    *(f"ringdp-{name}" for name in ("int8", "int6", "int5", "int4", "nf4", "qsgd", "terngrad", "sign", "signsgd")),
    *(f"ringdp-{name}" for name in ("topk", "topk-dgc", "randomk", "powersgd")),
)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=trainees.MODELS, default="gpt", help="what is trained (default gpt)")
    parser.add_argument("--modes", default="ddp-gloo-fp16,ringdp-int8,ringdp-int4", help="of step.py's; all: many")
    parser.add_argument("--steps", type=int, default=200, help="of training, in each mode (default 200)")
    parser.add_argument("--width", type=int, help="of the GPT (128, 0.8 M parameters) or the ResNet (64)")
    parser.add_argument("--layers", type=int, default=4, help="of the GPT (default 4)")
    parser.add_argument("--batch-size", type=int, help="windows of 64 characters (4) or images (8) per rank")
    parser.add_argument("--pixels", type=int, default=16, help="rows and columns of the ResNet's images (default 16)")
    parser.add_argument("--lr", type=float, help="highest learning rate (that of the example; resnet: 0.05)")
    parser.add_argument("--window", type=int, default=WINDOW, help=f"steps that a loss is averaged over ({WINDOW})")
    parser.add_argument("--loss", type=float, help="the loss to reach")
    parser.add_argument("--add-to", metavar="FILE", help="as --json, keeping what other modes measured there")
    parser.add_argument("--json", metavar="FILE", help="write everything measured there, too")
    session.add_place_options(parser)
    args = parser.parse_args(argv)
    args.mode_names = list(RESNET_MODES) if args.modes == "all" else args.modes.split(",")
    known = [name for name in models.MODES if not name.startswith("bare")]  # which does not train together
    if unknown := [name for name in args.mode_names if name not in known]:
        parser.error(f"{unknown[0]!r} is not known: choose from {', '.join(known)}, or all")
    if args.model == "gpt" and any(models.MODES[name].momentum_on_ranks for name in args.mode_names):
        parser.error("the GPT is trained by AdamW: momentum on the ranks is for --model resnet")
    if not 0 < args.window <= args.steps:
        parser.error(f"at least {args.window} steps are needed, and one")
    args.place = session.place_of(parser, args)
    return args


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Train in every mode. Raises Unavailable, HostsError, RanksFailed."""
    if reason := session.why_no_ringdp():
        raise session.Unavailable(reason)
    settings = {
        "modes": args.mode_names,
        "steps": args.steps,
        "model": args.model,
        "lr": args.lr,
        "window": args.window,
        "options": trainees.options(args),
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
        "loss": args.loss if args.loss is not None else max(smooth(row["losses"], args.window)[-1] for row in rows),
    }


def smooth(losses: Sequence[float], window: int = WINDOW) -> list[float]:
    """The mean of each loss and those before it, `window` in all."""
    return [statistics.fmean(losses[max(0, end - window) : end]) for end in range(1, len(losses) + 1)]


def seconds_until(row: dict[str, Any], loss: float, window: int = WINDOW) -> float | None:
    """When the smoothed loss first was so low, in seconds of training; None: never."""
    for place, value in enumerate(smooth(row["losses"], window)):
        if place + 1 >= window and value <= loss:
            return float(row["seconds"][place])
    return None


def report(result: dict[str, Any]) -> str:
    rows = []
    window = result["settings"]["window"]
    reached = {row["mode"]: seconds_until(row, result["loss"], window) for row in result["rows"]}
    base = reached.get(BASE)
    for row in result["rows"]:
        steps, took = row["seconds"], reached[row["mode"]]
        cells = [row["mode"], format_time(steps[-1] / len(steps)), f"{smooth(row['losses'], window)[-1]:.4f}"]
        cells += ["never" if took is None else format_time(took)]
        rows.append([*cells, f"{base / took:.2f}" if base and took else ""])
    about = result["machine"]
    columns = ["mode", "step", "loss at the end", f"until {result['loss']:.4f}", f"faster than {BASE}"]
    numel = result["rows"][0]["numel"]
    lines = [
        f"time to a loss, {result['settings']['model']}, {numel:,} parameters, {result['place']['words']}",
        f"{about['processor']}, {about['cores']} cores, Linux {about['kernel']}, torch {about['torch']}",
        "",
        table(columns, rows),
        "",
        result["quiet"]["words"],
    ]
    return "\n".join([*lines, *(f"WARNING: {it}" for it in result["quiet"]["warnings"])])


def run_rank(path: str) -> None:
    joined = session.join(path)
    from benchmarks.training.step_rank import make_groups

    groups = make_groups(joined.settings["modes"])
    joined.deliver([_train(joined, name, groups[models.MODES[name].backend]) for name in joined.settings["modes"]])


def _train(joined: session.Joined, name: str, group: Any) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from benchmarks.training.step_rank import wrap

    mode, settings = models.MODES[name], joined.settings
    trainee = trainees.make(settings["model"], settings["options"], joined.rank, settings["lr"])
    model = wrap(mode, trainee.module, group)
    optimizer = trainee.optimizer(model, momentum_on_ranks=mode.momentum_on_ranks)
    highest = [group_of["lr"] * trainees.LR_FACTORS.get(name, 1.0) for group_of in optimizer.param_groups]
    losses, seconds = [], []
    for _ in range(2):  # buckets are shaped, connections warm; the weights stay
        trainee.loss(model).backward()
    dist.barrier()
    start = perf_counter()
    for done in range(settings["steps"]):
        for group_of, lr in zip(optimizer.param_groups, highest, strict=True):
            group_of["lr"] = lr * min(1.0, (done + 1) / settings["window"])
        optimizer.zero_grad()
        loss = trainee.loss(model)
        loss.backward()
        if trainee.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), trainee.clip)
        optimizer.step()
        losses.append(loss.item())
        seconds.append(perf_counter() - start)
    everyone = torch.tensor([losses, seconds], dtype=torch.float64)
    dist.all_reduce(everyone)
    losses, seconds = (everyone / joined.world_size).tolist()
    numel = sum(it.numel() for it in trainee.module.parameters())
    return {"mode": name, "numel": numel, "losses": losses, "seconds": seconds}


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.as_rank:
        run_rank(args.as_rank)
        return 0
    return session.command_line(args, measure, report, json_path=args.json or args.add_to)


if __name__ == "__main__":
    sys.exit(main())
