"""A small training with RingDP(compression=…), the same on every rank count, for the tests of compression."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringdp.ddp.wrapper import RingDP
from ringdp.job.placement import Placement


def wide(seed: int = 0) -> nn.Module:
    """Weights that are compressed (3,072 to 9,216 elements), biases and a norm that are not."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(48, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 144), nn.Tanh(), nn.Linear(144, 7)
    )


WEIGHTS = ("0.weight", "3.weight")  # those of at least 1,024 elements; "5.weight" has 1,008


@contextlib.contextmanager
def codes_exchanged(exchange: bool = True) -> Iterator[None]:
    """Codes of a RingDP on the CPU go by the group's own collectives, as those of GPUs do."""
    if not exchange:
        yield
        return
    with (
        mock.patch.object(Placement, "core_reduces_codes", False),
        mock.patch.object(Placement, "exchanges_codes", True),
    ):
        yield


def batch(step: int, rank: int, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(size, 48, generator=generator)
    return x, (x[:, :7].abs().argmax(1)).long()


def loss_of(model: nn.Module, step: int) -> Tensor:
    x, y = batch(step, dist.get_rank())
    return nn.functional.cross_entropy(model(x), y)


def digest(tensors: Any) -> str:
    """Of the bits of tensors; None counts."""
    text = hashlib.sha256()
    for one in tensors:
        text.update(b"none" if one is None else one.detach().contiguous().numpy().tobytes())
    return text.hexdigest()


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def train(model: RingDP, steps: range, optimizer: torch.optim.Optimizer | None = None) -> list[str]:
    """A digest of all gradients and parameters after each step."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen = []
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        seen.append(digest([*gradients(model), *model.parameters()]))
    return seen
