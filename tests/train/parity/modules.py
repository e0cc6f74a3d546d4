"""More models of the table: what forward hands out, buffers, layers and ways to build them."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.train import models
from tests.train.parity.models import Feed, layers

# Outputs.


@dataclass
class Result:
    logits: Tensor
    extra: list[Tensor]
    step: int = 0


Pair = namedtuple("Pair", ["logits", "hidden"])


class Opaque:
    """Nothing that finds tensors looks inside."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


OUTPUTS = ("tuple", "list", "dict", "dataclass", "namedtuple", "nested", "opaque", "detached", "in place", "view")
FOUND_OUTPUTS = tuple(kind for kind in OUTPUTS if kind != "opaque")  # DDP needs to see the tensors there


class Returning(nn.Module):
    """The same computation, handed out in different ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.into = nn.Linear(12, 12)
        self.head = nn.Linear(12, 5)
        self.kind = kind

    def forward(self, x: Tensor, target: Tensor | None = None) -> Any:
        hidden = torch.tanh(self.into(x))
        logits = self.head(hidden)
        return {
            "tuple": lambda: (logits, hidden),
            "list": lambda: [logits, None, hidden],
            "dict": lambda: {"logits": logits, "step": 3},
            "dataclass": lambda: Result(logits, [hidden]),
            "namedtuple": lambda: Pair(logits, hidden),
            "nested": lambda: {"a": [(logits, {"b": hidden})], "c": "text"},
            "opaque": lambda: Opaque(logits),
            "detached": lambda: (logits, hidden.detach(), x),
            "in place": lambda: logits.mul_(2.0),
            "view": lambda: logits.view(-1)[:].view(-1, 5),
        }[self.kind]()

    def objective(self, output: Any, target: Tensor) -> Tensor:
        logits: Tensor = {
            "tuple": lambda: output[0] + output[1][:, :5],
            "list": lambda: output[0] + output[2][:, :5],
            "dict": lambda: output["logits"],
            "dataclass": lambda: output.logits + output.extra[0][:, :5],
            "namedtuple": lambda: output.logits + output.hidden[:, :5],
            "nested": lambda: output["a"][0][0] + output["a"][0][1]["b"][:, :5],
            "opaque": lambda: output.logits,
            "detached": lambda: output[0] + output[1][:, :5] + output[2][:, :5],
            "in place": lambda: output.add_(1.0),
            "view": lambda: output,
        }[self.kind]()
        return nn.functional.cross_entropy(logits, target)


class LossInside(nn.Module):
    """forward gives the loss, a tensor without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.body = layers()

    def feed(self, step: int, rank: int) -> Feed:
        return (), dict(zip(("x", "y"), models.batch(step, rank), strict=True)), None

    def forward(self, *, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.body(x), y)

    def objective(self, output: Tensor, target: None) -> Tensor:
        return output


# Buffers.


class Buffers(nn.Module):
    """Several dtypes; reassigned in forward, changed in place, not saved, empty."""

    mean: Tensor
    steps: Tensor
    seen: Tensor
    phase: Tensor
    hidden: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body = layers()
        self.register_buffer("mean", torch.zeros(12))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("seen", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("phase", torch.zeros(3, dtype=torch.complex64))
        self.register_buffer("hidden", torch.ones(12), persistent=False)
        self.register_buffer("empty", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.steps += 1
        self.seen[int(self.steps) % 5] = True
        self.phase = self.phase * 1j + complex(float(x[0, 0]))
        output: Tensor = self.body((x - self.mean) * self.hidden)
        self.hidden = self.hidden * 0.99 + 0.01 * x.detach().abs().mean()
        return output


class NeedsBuffer(nn.Module):
    """Autograd saves the buffer, which the next forward's broadcast writes again."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(12, 5)
        self.register_buffer("gain", torch.linspace(0.5, 1.5, 5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.into(x) * self.gain)


def batch_norm() -> nn.Module:
    return nn.Sequential(
        nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.BatchNorm1d(16, momentum=None), nn.Linear(16, 5)
    )


# Layers and ways to build them.


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(4, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        self.cells.flatten_parameters()
        output: Tensor = self.head(self.cells(x.view(-1, 3, 4))[0][:, -1])
        return output


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.block = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.view(-1, 3, 4)
        hidden = self.block(self.attention(tokens, tokens, tokens, need_weights=False)[0] + tokens)
        output: Tensor = self.head(hidden.flatten(1))
        return output


def parametrized(kind: str) -> nn.Module:
    model = layers()
    getattr(parametrizations, kind)(model[2])
    return model


class Containers(nn.Module):
    """ParameterList, ParameterDict, nested modules, names with dots in the way."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([torch.randn(12, 6), torch.randn(6, 5)])
        self.named = nn.ParameterDict({"gain": torch.ones(6), "shift": torch.zeros(5)})
        self.inner = nn.ModuleDict({"module": nn.Sequential(nn.Linear(12, 12))})

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner["module"](x)) @ self.rows[0] * self.named["gain"]
        return hidden @ self.rows[1] + self.named["shift"]


class Cubed(torch.autograd.Function):
    """A function with a backward of its own, which can be differentiated again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x**3 * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return 3 * x**2 * weight * grad, (grad * x**3).sum(0)


class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = layers()
        self.weight = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = Cubed.apply(torch.tanh(self.body(x)), self.weight)
        return output


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.Dropout(0.3), nn.Tanh(), nn.AlphaDropout(0.1), nn.Linear(16, 5))
