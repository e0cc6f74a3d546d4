"""The models of the table. `feed(step, rank)` gives a model's own arguments and target, `objective` its own loss."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.train import models

Feed = tuple[tuple[Any, ...], dict[str, Any], Any]


def layers(*, out: int = 5, dtype: torch.dtype | None = None) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(12, 16, dtype=dtype), nn.Tanh(),
        nn.Linear(16, 16, dtype=dtype), nn.Tanh(),
        nn.Linear(16, out, dtype=dtype),
    )  # fmt: skip


def world() -> int:
    return int(os.environ["WORLD_SIZE"])


# Parameters without gradient.


class Branches(nn.Module):
    """`first` and `second` are used as `uses` says of a step and a rank, `never` by nobody, `always` by all."""

    def __init__(self, uses: Any) -> None:
        super().__init__()
        self.always = nn.Linear(12, 12)
        self.first = nn.Linear(12, 5)
        self.second = nn.Linear(12, 5)
        self.never = nn.Linear(12, 5)
        self.uses = uses

    def feed(self, step: int, rank: int) -> Feed:
        x, y = models.batch(step, rank)
        return (x,), {"chosen": self.uses(step, rank)}, y

    def forward(self, x: Tensor, *, chosen: str) -> Tensor:
        hidden = self.always(x)
        output: Tensor = hidden[:, :5]
        if "1" in chosen:
            output = output + self.first(hidden)
        if "2" in chosen:
            output = output + self.second(hidden)
        return output


class Passing(nn.Module):
    """On rank 0 no parameter is in the graph, only the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12))

    def feed(self, step: int, rank: int) -> Feed:
        x, y = models.batch(step, rank)
        return (x.requires_grad_(),), {"use": rank > 0}, y

    def forward(self, x: Tensor, *, use: bool) -> Tensor:
        return (x * self.weight if use else x * 2)[:, :5]


class Ignored(nn.Module):
    """The loss looks at one of two outputs, another one from step to step and from rank to rank."""

    def __init__(self, *, alternating: bool = True) -> None:
        super().__init__()
        self.body = nn.Linear(12, 12)
        self.left = nn.Linear(12, 5)
        self.right = nn.Linear(12, 5)
        self.alternating = alternating

    def feed(self, step: int, rank: int) -> Feed:
        x, y = models.batch(step, rank)
        return (x,), {}, (y, "right" if self.alternating and (step + rank) % 2 else "left")

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = torch.tanh(self.body(x))
        return {"left": self.left(hidden), "right": self.right(hidden)}

    def objective(self, output: dict[str, Tensor], target: tuple[Tensor, str]) -> Tensor:
        return nn.functional.cross_entropy(output[target[1]], target[0])


# Parameters used several times.


class Twice(nn.Module):
    """A layer used twice, a weight tied to another layer's transpose, a parameter in the loss besides."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(12, 12)
        self.into = nn.Linear(12, 5)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.again(torch.tanh(self.again(x) * self.scale)))
        back: Tensor = nn.functional.linear(self.into(hidden), self.into.weight.t())
        return back[:, :5] * self.scale

    def objective(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target) + 0.01 * self.again.weight.pow(2).sum()


class Checkpointed(nn.Module):
    """Layers under activation checkpointing, `times` times each."""

    def __init__(self, *, reentrant: bool, times: int = 1, unused: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.middle = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12))
        self.last = nn.Linear(12, 5)
        self.spare = nn.Linear(12, 5) if unused else None
        self.reentrant = reentrant
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        hidden: Any = torch.relu(self.first(x))
        for _ in range(self.times):
            hidden = checkpoint(self.middle, hidden, use_reentrant=self.reentrant)
        output: Tensor = self.last(hidden)
        return output


def frozen() -> nn.Module:
    """A frozen layer, and a frozen bias elsewhere."""
    model = layers()
    for parameter in (*model[0].parameters(), model[4].bias):
        parameter.requires_grad_(False)
    return model


def ignoring() -> nn.Module:
    """Two parameters are none of the wrapper's business."""
    model = layers()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight", "4.bias"])
    return model


class WithoutGraph(nn.Module):
    """A trainable layer that runs under no_grad: it wants a gradient and never gets one."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(12, 12)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = self.features(x)
        output: Tensor = self.head(hidden)
        return output


# Kinds of gradients and of memory.


class Sparse(nn.Module):
    """Embeddings with sparse gradients; rank 0 looks nothing up in every second step."""

    def __init__(
        self, *, dense_too: bool = True, sometimes_empty: bool = True, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 6, sparse=True, dtype=dtype)
        self.bags = nn.EmbeddingBag(30, 6, mode="sum", sparse=True, dtype=dtype)
        self.dense = nn.Embedding(20, 6, dtype=dtype) if dense_too else None
        self.head = nn.Linear(6, 5, dtype=dtype)

    def feed(self, step: int, rank: int) -> Feed:
        generator = torch.Generator().manual_seed(100 * step + rank)
        empty = rank == 0 and step % 2 == 1
        words = torch.randint(0, 20, (0 if empty else 7 + rank,), generator=generator)
        bags = torch.randint(0, 30, (0 if empty else 15,), generator=generator)
        offsets = torch.arange(5) * (0 if empty else 3)
        return (words, bags, offsets), {}, torch.randint(0, 5, (5,), generator=generator)

    def forward(self, words: Tensor, bags: Tensor, offsets: Tensor) -> Tensor:
        found = self.table(words).sum(0) + self.bags(bags, offsets)
        if self.dense is not None:
            found = found + self.dense(words).sum(0)
        output: Tensor = self.head(torch.tanh(found))
        return output

    def objective(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output, target)


class ComplexNumbers(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.into = nn.Linear(12, 8, dtype=dtype)
        self.phase = nn.Parameter(torch.randn(8, dtype=dtype))
        self.scale = nn.Parameter(torch.tensor(0.5 - 0.25j, dtype=dtype))
        self.out = nn.Linear(8, 5, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.out(torch.tanh(self.into(x.to(self.phase.dtype)) * self.phase.conj()) * self.scale)
        return torch.view_as_real(hidden).sum(-1)


class Cast(nn.Module):
    """All parameters of one dtype; the loss of 16-bit ones in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.body = layers(dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.body(x.to(next(self.parameters()).dtype))
        return output.float() if output.dtype in (torch.half, torch.bfloat16) else output


class ManyTypes(nn.Module):
    """float32, float64, bfloat16, half, complex64 and complex128 in one model, taking turns."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(12, 8)
        self.b = nn.Linear(8, 8, dtype=torch.float64)
        self.c = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.d = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.e = nn.Parameter(torch.randn(8, dtype=torch.complex128))
        self.f = nn.Linear(8, 8, dtype=torch.half)
        self.g = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.b(torch.tanh(self.a(x)).double())
        hidden = torch.tanh(torch.view_as_real(hidden.float() * self.c).sum(-1))
        hidden = torch.view_as_real(self.d(hidden.bfloat16()).double() * self.e).sum(-1)
        output: Tensor = self.g(torch.tanh(self.f(torch.tanh(hidden).half())).float())
        return output


class Strided(nn.Module):
    """Parameters that are no plain rows: transposed, permuted, with gaps, a part of a larger one, empty, scalars."""

    def __init__(self) -> None:
        super().__init__()
        self.transposed = nn.Parameter(torch.randn(16, 12).t())
        self.permuted = nn.Parameter(torch.randn(2, 16, 3).permute(1, 2, 0))
        self.gaps = nn.Parameter(torch.randn(16, 20)[:, ::2])
        self.part = nn.Parameter(torch.randn(9, 7)[2:7, 1:6])
        self.window = nn.Parameter(torch.randn(10)[3:8])
        self.expanded = nn.Parameter(torch.randn(1, 5).expand(10, 5).clone(memory_format=torch.preserve_format))
        self.empty = nn.Parameter(torch.zeros(0, 5))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.one = nn.Parameter(torch.ones(1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x @ self.transposed) @ (self.gaps * self.one[0])
        hidden = hidden * self.permuted.sum() / 10
        return hidden @ self.expanded @ self.part * self.scalar + self.window + self.empty.sum(0)


def channels_last() -> nn.Module:
    model = nn.Sequential(
        nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(),
        nn.Conv2d(8, 8, 1, groups=2), nn.Conv2d(8, 4, 2), nn.Flatten(), nn.Linear(4, 5),
    )  # fmt: skip
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def wide() -> nn.Module:
    """A weight of more than 4 MiB, which is reduced where autograd left it."""
    return nn.Sequential(nn.Linear(12, 1100), nn.ReLU(), nn.Linear(1100, 1100), nn.ReLU(), nn.Linear(1100, 5))
