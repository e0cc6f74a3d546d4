"""Small models and batches for the training tests; every rank builds the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 5))


def convolutional() -> nn.Module:
    """Batch statistics, a channels_last weight, a grouped convolution."""
    model = nn.Sequential(
        nn.Unflatten(1, (3, 2, 2)),
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 1, groups=2),
        nn.Flatten(),
        nn.Linear(32, 5),
    )
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


class Tied(nn.Module):
    """One matrix used twice, a transposed (strided) parameter, a scalar and an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 12, bias=False)
        self.again = nn.Linear(12, 12, bias=False)
        self.again.weight = self.inner.weight
        self.transposed = nn.Parameter(torch.randn(5, 12).t() * 0.3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = torch.tanh(self.again(torch.relu(self.inner(x))))
        return hidden @ self.transposed * self.scale + self.empty.sum()


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(12, 20)
        self.middle = nn.Sequential(nn.Linear(20, 20), nn.Tanh())
        self.last = nn.Linear(20, 5)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden: Any = checkpoint(self.middle, torch.relu(self.first(x)), use_reentrant=self.reentrant)
        output: Tensor = self.last(hidden)
        return output


class MixedTypes(nn.Module):
    """Parameters of several dtypes, which go to buckets of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(12, 8)
        self.wide = nn.Linear(8, 8, dtype=torch.float64)
        self.phase = nn.Parameter(torch.randn(8, dtype=torch.complex64))
        self.brain = nn.Linear(8, 5, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.wide(self.narrow(x).double()).float()
        hidden = torch.view_as_real(hidden * self.phase).sum(-1)
        output: Tensor = self.brain(hidden.bfloat16()).float()
        return output


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "convolutional": convolutional,
    "tied": Tied,
    "reentrant": lambda: Checkpointed(reentrant=True),
    "non_reentrant": lambda: Checkpointed(reentrant=False),
    "mixed_types": MixedTypes,
}


def build(name: str, *, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]()


def batch(step: int, rank: int, *, size: int = 6) -> tuple[Tensor, Tensor]:
    """Inputs [size, 12] and classes [size], the same for a step and rank whoever asks."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(size, 12, generator=generator), torch.randint(0, 5, (size,), generator=generator)


def joined_batch(step: int, ranks: int, *, size: int = 6) -> tuple[Tensor, Tensor]:
    batches = [batch(step, rank, size=size) for rank in range(ranks)]
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
}
