"""The models whose training step is timed; `make` gives one with a batch that differs between ranks."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

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


DGC, RAMP_STEPS = "topk-dgc", 15  # top-k with momentum on the ranks, and over how many steps it falls to 1 %


@dataclass(frozen=True)
class Mode:
    """How gradients are averaged: by which wrapper, over which backend. Without a wrapper they are not."""

    wrapper: str = ""  # DDP or RingDP
    backend: str = ""
    gradient_as_bucket_view: bool = False
    compression: str = ""  # RingDP's: a compressor's name, or `DGC`
    weights: str = ""  # RingDP's: equal or unequal ones
    hook: str = ""  # DDP's: fp16 and powersgd, torch's hooks; int8 and int4, ringdp.hooks.ddp_hook
    gradient_pool: bool = True  # RingDP's
    buckets: str = ""  # RingDP's bucket_cap_mb: a number, or `ends`; empty: its default
    barrier: bool = False  # without a wrapper: the ranks wait for each other at the end of backward
    largest_error: float = 1e-2  # of a parameter's change in three steps, relative

    @property
    def compressor(self) -> Any:
        """What RingDP is given."""
        if self.compression != DGC:
            return self.compression
        from ringdp import compression

        return compression.TopK(0.01, ramp_steps=RAMP_STEPS, error_feedback=compression.DGC(0.9))

    def bucket_cap_mb(self, module: nn.Module) -> float | list[float] | None:
        """RingDP's argument. `ends`: 1, 2, 4, … MiB for the first half of the gradients, then down again to 1 MiB."""
        if self.buckets != "ends":
            return float(self.buckets) if self.buckets else None
        half_mb = sum(it.numel() * it.element_size() for it in module.parameters()) / 2 / (1 << 20)
        rising = [1.0]
        while sum(rising) + 2 * rising[-1] <= half_mb:
            rising.append(2 * rising[-1])
        return [*rising, max(rising[-1], 2 * (half_mb - sum(rising))), *reversed(rising)]

    @property
    def momentum_on_ranks(self) -> bool:
        """The optimizer has none then."""
        return self.compression == DGC


MODES = {
    "bare": Mode(),
    "bare-barrier": Mode(backend="ring", barrier=True),
    "ddp-gloo": Mode("DDP", "gloo"),
    "ringdp": Mode("RingDP", "ring"),
    "ringdp-nopool": Mode("RingDP", "ring", gradient_pool=False),
    "ddp-ring": Mode("DDP", "ring"),
    "ddp-ring-view": Mode("DDP", "ring", gradient_as_bucket_view=True),
    "ddp-gloo-view": Mode("DDP", "gloo", gradient_as_bucket_view=True),
    "ringdp-gloo": Mode("RingDP", "gloo"),
    "ringdp-buckets-half": Mode("RingDP", "ring", buckets="0.5"),
    "ringdp-buckets-1": Mode("RingDP", "ring", buckets="1"),
    "ringdp-buckets-4": Mode("RingDP", "ring", buckets="4"),
    "ringdp-buckets-25": Mode("RingDP", "ring", buckets="25"),
    "ringdp-buckets-100": Mode("RingDP", "ring", buckets="100"),
    "ringdp-buckets-ends": Mode("RingDP", "ring", buckets="ends"),
    "ringdp-weights": Mode("RingDP", "ring", weights="equal"),
    "ringdp-unequal": Mode("RingDP", "ring", weights="unequal"),
    "ringdp-int8": Mode("RingDP", "ring", compression="int8", largest_error=0.05),
    "ringdp-int4": Mode("RingDP", "ring", compression="int4", largest_error=0.5),
    "ringdp-int6": Mode("RingDP", "ring", compression="int6", largest_error=0.1),
    "ringdp-int5": Mode("RingDP", "ring", compression="int5", largest_error=0.3),
    "ringdp-nf4": Mode("RingDP", "ring", compression="nf4", largest_error=0.5),
    "ringdp-topk": Mode("RingDP", "ring", compression="topk", largest_error=1.0),
    "ringdp-topk-dgc": Mode("RingDP", "ring", compression=DGC, largest_error=3.0),
    "ringdp-powersgd": Mode("RingDP", "ring", compression="powersgd", largest_error=1.0),
    "ringdp-randomk": Mode("RingDP", "ring", compression="randomk", largest_error=1.0),
    "ringdp-sign": Mode("RingDP", "ring", compression="sign", largest_error=1.0),
    "ringdp-signsgd": Mode("RingDP", "ring", compression="signsgd", largest_error=math.inf),
    "ringdp-qsgd": Mode("RingDP", "ring", compression="qsgd", largest_error=3.0),
    "ringdp-terngrad": Mode("RingDP", "ring", compression="terngrad", largest_error=3.0),
    "ringdp-auto": Mode("RingDP", "ring", compression="auto", largest_error=0.05),
    "ringdp-fp16": Mode("RingDP", "ring", compression="fp16"),
    "ringdp-bf16": Mode("RingDP", "ring", compression="bf16", largest_error=0.02),
    "ddp-gloo-fp16": Mode("DDP", "gloo", hook="fp16"),
    "ddp-ring-fp16": Mode("DDP", "ring", hook="fp16"),
    "ddp-ring-powersgd": Mode("DDP", "ring", hook="powersgd", largest_error=1.0),
    "ddp-ring-int8": Mode("DDP", "ring", hook="int8", largest_error=0.05),
    "ddp-ring-int4": Mode("DDP", "ring", hook="int4", largest_error=0.5),
}
DEFAULT_MODES = ("bare", "ddp-gloo", "ringdp", "ddp-ring")


def make(name: str, *, rank: int) -> Task:
    """The task called `name`: the same parameters on every rank and every call, a batch of this rank's own."""
    torch.manual_seed(0)
    return _TASKS[name](torch.Generator().manual_seed(1 + rank))


def check_names(parser: argparse.ArgumentParser, names: str) -> None:
    """End the program with a message where one of the comma's list is not a model."""
    if unknown := [name for name in names.split(",") if name not in NAMES]:
        parser.error(f"{unknown[0]!r} is not known: choose from {', '.join(NAMES)}")
