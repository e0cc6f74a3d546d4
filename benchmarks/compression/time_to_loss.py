"""How long a model trains until its loss is what was asked for: RingDP with and without compression, and DDP.

    sudo python -m benchmarks time_to_loss --hosts 4 --rate 100mbit --modes ddp-gloo-fp16,ringdp-int8,ringdp-int4
    sudo python -m benchmarks time_to_loss … --modes ringdp-int4 --add-to loss.json    adds one mode to the file
    sudo python -m benchmarks time_to_loss --model resnet --steps 40 --hosts 4 --rate 100mbit --modes all

`gpt`: the character GPT of examples/char_lm.py on its text, 0.8 M parameters, by AdamW. `resnet`: the ResNet-18 of
examples/resnet.py on its digits, 11.2 M parameters, by SGD with momentum; the images are made smaller (`--pixels`), for
the sake of the time that is not communication. The same weights and batches in each mode (step.py has their names), one
after the other. The loss is the training loss in nats, the mean over ranks and the last steps (`--window`); the loss to
reach is the highest of those that the modes end with, unless `--loss` says otherwise.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.lib import session
from benchmarks.lib.measure import format_time
from benchmarks.training.modes import MODES, make_groups, wrap

MODELS = ("gpt", "resnet")
LR_FACTORS = {"ringdp-signsgd": 0.01}  # a sign is as large as a large gradient
WINDOW = 20  # steps
BASE = "ddp-gloo-fp16"  # what the others are compared with
_COMPRESSED = ("int8", "int6", "int5", "int4", "nf4", "qsgd", "terngrad", "sign", "signsgd", "topk", "topk-dgc")
RESNET_MODES = (
    *("ddp-gloo", BASE, "ddp-ring-powersgd", "ringdp"),
    *(f"ringdp-{name}" for name in (*_COMPRESSED, "randomk", "powersgd")),
)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=MODELS, default="gpt", help="what is trained (default gpt)")
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


def check(args: argparse.Namespace) -> None:
    known = [name for name in MODES if not name.startswith("bare")]  # which does not train together
    args.modes = list(RESNET_MODES) if args.modes == "all" else session.chosen(args.modes, known)
    if args.model == "gpt" and any(MODES[name].momentum_on_ranks for name in args.modes):
        raise ValueError("the GPT is trained by AdamW: momentum on the ranks is for --model resnet")
    if not 0 < args.window <= args.steps:
        raise ValueError(f"at least {args.window} steps are needed, and one")
    args.json = args.json or args.add_to


def settings(args: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(args, name) for name in ("modes", "steps", "model", "lr", "window")}
    return given | {"options": trainee_options(args)}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Train in every mode. Raises Unavailable, HostsError, RanksFailed."""
    before = Path(args.add_to) if args.add_to else None
    kept = json.loads(before.read_text(encoding="utf-8"))["rows"] if before is not None and before.exists() else []
    result = session.measured(sys.modules[__name__], "time_to_loss", args)
    result["rows"] = [row for row in kept if row["mode"] not in args.modes] + result["rows"]
    ends = [smooth(row["losses"], args.window)[-1] for row in result["rows"]]
    return result | {"loss": args.loss if args.loss is not None else max(ends)}


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
    columns = ["mode", "step", "loss at the end", f"until {result['loss']:.4f}", f"faster than {BASE}"]
    title = f"time to a loss, {result['settings']['model']}, {result['rows'][0]['numel']:,} parameters"
    return session.report_table(result, title, columns, rows)


# What is trained.


@dataclasses.dataclass(frozen=True)
class Trainee:
    """A model with the same weights on all ranks.

    Attributes:
        module: the model.
        loss: of a wrapped model on this rank's next batch.
        optimizer: for a wrapped model.
        clip: the largest norm of the averaged gradient; None: any.
    """

    module: nn.Module
    loss: Callable[[nn.Module], Tensor]
    optimizer: Callable[..., torch.optim.Optimizer]
    clip: float | None


def trainee_options(args: argparse.Namespace) -> dict[str, Any]:
    """What `make` needs, of the options."""
    if args.model == "gpt":
        batch_size = args.batch_size or 4
        return {"width": args.width or 128, "layers": args.layers, "batch_size": batch_size, "steps": args.steps}
    return {"width": args.width or 64, "batch_size": args.batch_size or 8, "pixels": args.pixels}


def make(model: str, chosen: dict[str, Any], rank: int, lr: float | None) -> Trainee:
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(rank)
    return _gpt(chosen, draw, lr) if model == "gpt" else _resnet(draw=draw, lr=lr, **chosen)


def _gpt(chosen: dict[str, Any], draw: torch.Generator, lr: float | None) -> Trainee:
    from benchmarks.compression.quality_runs import gpt_loss, gpt_options, text, windows_of
    from examples.char_lm import GPT

    of_example = gpt_options(**chosen)
    training, _, alphabet = text()

    def optimizer(model: nn.Module, *, momentum_on_ranks: bool) -> torch.optim.Optimizer:
        assert not momentum_on_ranks
        return torch.optim.AdamW(model.parameters(), lr=lr or of_example.lr, betas=(0.9, 0.95))

    def loss(model: nn.Module) -> Tensor:
        return gpt_loss(model, windows_of(training, of_example, draw))

    return Trainee(GPT(alphabet, of_example), loss, optimizer, 1.0)


def _resnet(*, draw: torch.Generator, lr: float | None, width: int, batch_size: int, pixels: int) -> Trainee:
    from examples.resnet import ResNet18, load_digits, prepared, shifted

    images, labels = load_digits(0)[0].tensors

    def optimizer(model: nn.Module, *, momentum_on_ranks: bool) -> torch.optim.Optimizer:
        from benchmarks.compression.quality_runs import exact_names, sgd_groups

        bare = getattr(model, "module", model)
        return torch.optim.SGD(sgd_groups(bare, momentum_on_ranks, exact_names(bare)), lr=lr or 0.05)

    def loss(model: nn.Module) -> Tensor:
        rows = torch.randint(len(labels), (batch_size,), generator=draw)
        x = nn.functional.adaptive_avg_pool2d(prepared(shifted(images[rows], draw)), pixels)
        return nn.functional.cross_entropy(model(x), labels[rows])

    return Trainee(ResNet18(width), loss, optimizer, None)


# What each rank does.


def run_rank(joined: session.Joined) -> None:
    groups = make_groups(joined.settings["modes"])
    joined.deliver([_train(joined, name, groups[MODES[name].backend]) for name in joined.settings["modes"]])


def _train(joined: session.Joined, name: str, group: Any) -> dict[str, Any]:

    mode, settings = MODES[name], joined.settings
    trainee = make(settings["model"], settings["options"], joined.rank, settings["lr"])
    model = wrap(mode, trainee.module, group)
    optimizer = trainee.optimizer(model, momentum_on_ranks=mode.momentum_on_ranks)
    highest = [group_of["lr"] * LR_FACTORS.get(name, 1.0) for group_of in optimizer.param_groups]
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
