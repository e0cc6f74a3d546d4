"""Optimizers that change only the rows with a gradient; the owner of the rows runs them on the sums."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ringdp import _C, values

NAMES = ("sgd", "adagrad", "rowwise_adagrad", "adam")


@dataclasses.dataclass(frozen=True)
class Adagrad:
    """``ShardedEmbedding(…, optimizer=Adagrad(eps=1e-8))``: torch's for sparse gradients; by its name "adagrad".

    Args:
        eps: added to the root of the sum of squares.
        rowwise: keep one number for each row, the sum of the mean squares of its gradients; by its name
            "rowwise_adagrad".

    Raises:
        InvalidArgumentError: another value.
    """

    eps: float = 1e-10
    rowwise: bool = False

    def __post_init__(self) -> None:
        values.number("Adagrad", "eps", self.eps, "from 0 on", lambda it: it >= 0)
        values.flag("Adagrad", "rowwise", self.rowwise)


@dataclasses.dataclass(frozen=True)
class Adam:
    """``ShardedEmbedding(…, optimizer=Adam(eps=1e-8))``: torch.optim.SparseAdam, whose moments move in the steps in
    which a row has a gradient; by its name "adam".

    Args:
        betas: of both moments.
        eps: added to the root of the second moment.

    Raises:
        InvalidArgumentError: another value.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-10

    def __post_init__(self) -> None:
        if not isinstance(self.betas, Sequence) or len(self.betas) != 2:
            values.refuse("Adam", "betas", self.betas, "two numbers")
        for beta in self.betas:
            values.number("Adam", "betas", beta, "from 0 to below 1", lambda it: 0 <= it < 1)
        values.number("Adam", "eps", self.eps, "from 0 on", lambda it: it >= 0)


@dataclasses.dataclass
class SparseUpdate:
    """One of `NAMES`, with its settings and its state of this rank's rows."""

    name: str
    lr: float
    eps: float = 1e-10
    betas: tuple[float, float] = (0.9, 0.999)
    step: int = 0

    @classmethod
    def of(cls, optimizer: str | Adagrad | Adam, lr: float) -> SparseUpdate:
        """Raises InvalidArgumentError where `optimizer` is another name or thing, or `lr` cannot be used."""
        values.number("ShardedEmbedding", "lr", lr, "from 0 on", lambda it: it >= 0)
        if isinstance(optimizer, Adagrad):
            return cls("rowwise_adagrad" if optimizer.rowwise else "adagrad", lr, optimizer.eps)
        if isinstance(optimizer, Adam):
            return cls("adam", lr, optimizer.eps, (optimizer.betas[0], optimizer.betas[1]))
        return cls(values.choice("ShardedEmbedding", "optimizer", optimizer, NAMES), lr)

    def describe(self) -> str:
        return f"{self.name}(lr={self.lr}, eps={self.eps}, betas={self.betas})"

    def new_state(self, rows: int, dim: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """Zeros."""
        widths: Mapping[str, Mapping[str, int]] = {
            "sgd": {},
            "adagrad": {"sum": dim},
            "rowwise_adagrad": {"sum": 1},
            "adam": {"exp_avg": dim, "exp_avg_sq": dim},
        }
        return {name: torch.zeros(rows, width, dtype=dtype, device="cpu") for name, width in widths[self.name].items()}

    def apply(self, table: Tensor, state: Mapping[str, Tensor], rows: Tensor, sums: Tensor) -> None:
        """Change the `rows` (int32) of the table, each given once, by their gradients ``[rows, dim]``."""
        self.step += 1
        rate = self.lr
        if self.name == "adam":
            beta1, beta2 = self.betas
            rate *= (1 - beta2**self.step) ** 0.5 / (1 - beta1**self.step)
        if len(rows):
            _C.update_rows(self.name, table, list(state.values()), rows, sums, rate, self.eps, self.betas)
