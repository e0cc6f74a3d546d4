"""The training that every library is asked to do, and the same by one process alone. Needs torch only."""

from __future__ import annotations

import torch
from torch import Tensor, nn

RANKS = 2
BATCH = 4
FEATURES = 6
CLASSES = 3


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Not Adam: that does not notice whether gradients are averaged or summed."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(index: int, rank: int) -> tuple[Tensor, Tensor]:
    """Inputs [BATCH, FEATURES] and classes [BATCH]: the rank's share of the batch ``index``."""
    generator = torch.Generator().manual_seed(1000 * index + rank)
    inputs = torch.randn(BATCH, FEATURES, generator=generator)
    return inputs, torch.randint(0, CLASSES, (BATCH,), generator=generator)


def loss_of(model: nn.Module, inputs: Tensor, classes: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(inputs), classes)


def weights(model: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def by_one_process(
    *, steps: int, accumulate: int = 1, clip: float | None = None, ranks: int = RANKS, autocast: bool = False
) -> list[Tensor]:
    """The weights after ``steps`` steps over the batches of all ranks, ``accumulate`` of each rank's in one step."""
    model = build()
    optimizer = optimizer_of(model)
    for step in range(steps):
        for micro in range(accumulate):
            for rank in range(ranks):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = loss_of(model, *batch(step * accumulate + micro, rank))
                (loss / (ranks * accumulate)).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def assert_weights(found: list[Tensor], expected: list[Tensor]) -> None:
    """Equal but for the order in which float32 gradients were added."""
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
