"""The models whose training step is timed; `make` gives one with a batch that differs between ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Task:
    """A model and what one training step of it does; `loss(module, batch)` is a scalar."""

    module: nn.Module
    batch: tuple[Tensor, Tensor]
    loss: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor]
    learning_rate: float

    @property
    def numel(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())


class Block(nn.Module):
    """A transformer block, normalised first (Radford et al. 2019, GPT-2, section 2.3)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        split = (rows, length, self.heads, width // self.heads)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """A character-level GPT; tokens [rows, length] to logits [rows, length, characters]."""

    def __init__(self, characters: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(characters, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def classify(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    logits = module(batch[0])
    return functional.cross_entropy(logits.flatten(0, -2), batch[1].flatten())


def _regress(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.mse_loss(module(batch[0]), batch[1])


def _mlp(own: torch.Generator) -> Task:
    widths = [1024, *[2048] * 6, 10]
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    batch = torch.randn(32, 1024, generator=own), torch.randint(10, (32,), generator=own)
    return Task(nn.Sequential(*layers[:-1]), batch, classify, 0.01)


def _gpt(own: torch.Generator) -> Task:
    tokens = torch.randint(65, (2, 65), generator=own)
    module = Gpt(characters=65, width=384, layers=6, heads=6, length=256)
    return Task(module, (tokens[:, :-1], tokens[:, 1:].contiguous()), classify, 0.01)


def _small(own: torch.Generator) -> Task:
    layers = [nn.Linear(32, 32) for _ in range(300)]
    for layer in layers:  # orthogonal, or 300 layers would turn every gradient into slow subnormal numbers
        nn.init.orthogonal_(layer.weight)
        nn.init.zeros_(layer.bias)
    batch = torch.randn(8, 32, generator=own), torch.randn(8, 32, generator=own)
    return Task(nn.Sequential(*layers), batch, _regress, 0.001)


_TASKS: dict[str, Callable[[torch.Generator], Task]] = {"mlp": _mlp, "gpt": _gpt, "small": _small}
NAMES = tuple(_TASKS)


def make(name: str, *, rank: int) -> Task:
    """The task called `name`: the same parameters on every rank and every call, a batch of this rank's own."""
    torch.manual_seed(0)
    return _TASKS[name](torch.Generator().manual_seed(1 + rank))
