"""What `time_to_loss.py` trains: the models, data and optimizers of two examples."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

MODELS = ("gpt", "resnet")
LR_FACTORS = {"ringdp-signsgd": 0.01}  # a sign is as large as a large gradient


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


def options(args: argparse.Namespace) -> dict[str, Any]:
    """What `make` needs, of the options of time_to_loss.py."""
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
