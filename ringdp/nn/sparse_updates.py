"""Optimizers that touch the rows with a gradient only: what the owner of the rows does with their sums."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from ringdp.errors import InvalidArgumentError

NAMES = ("sgd", "adagrad", "rowwise_adagrad", "adam")


@dataclasses.dataclass
class SparseUpdate:
    """One of `NAMES`, with its settings and its state of this rank's rows.

    ``sgd`` and ``adagrad`` are torch's for sparse gradients, ``adam`` is torch.optim.SparseAdam (moments move in the
    steps in which a row has a gradient). ``rowwise_adagrad`` keeps one number for each row, the sum of the mean squares
    of its gradients.

    Raises:
        InvalidArgumentError: another name, or numbers that cannot be used.
    """

    name: str
    lr: float
    eps: float = 1e-10
    betas: tuple[float, float] = (0.9, 0.999)
    step: int = 0

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise InvalidArgumentError(f"optimizer must be one of {', '.join(NAMES)}, not {self.name!r}")
        if not (self.lr >= 0 and self.eps >= 0 and all(0 <= beta < 1 for beta in self.betas)):
            raise InvalidArgumentError(f"lr and eps must be at least 0, betas from 0 to below 1, not {self}")

    def words(self) -> str:
        return f"{self.name}(lr={self.lr}, eps={self.eps}, betas={self.betas})"

    def new_state(self, rows: int, dim: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """Zeros."""
        widths: Mapping[str, Mapping[str, int]] = {
            "sgd": {},
            "adagrad": {"sum": dim},
            "rowwise_adagrad": {"sum": 1},
            "adam": {"exp_avg": dim, "exp_avg_sq": dim},
        }
        return {name: torch.zeros(rows, width, dtype=dtype) for name, width in widths[self.name].items()}

    def apply(self, table: Tensor, state: Mapping[str, Tensor], rows: Tensor, sums: Tensor) -> None:
        """Change the `rows` of the table, each given once, by their gradients ``[rows, dim]``."""
        self.step += 1
        if not rows.numel():
            return
        if self.name == "sgd":
            table.index_add_(0, rows, sums, alpha=-self.lr)
            return
        if self.name == "adam":
            self._adam(table, state, rows, sums)
            return
        squares = sums.square() if self.name == "adagrad" else sums.square().mean(1, keepdim=True)
        total = state["sum"].index_select(0, rows).add_(squares)
        state["sum"].index_copy_(0, rows, total)
        table.index_add_(0, rows, sums / total.sqrt().add_(self.eps), alpha=-self.lr)

    def _adam(self, table: Tensor, state: Mapping[str, Tensor], rows: Tensor, sums: Tensor) -> None:
        beta1, beta2 = self.betas
        first = state["exp_avg"].index_select(0, rows).lerp_(sums, 1 - beta1)
        second = state["exp_avg_sq"].index_select(0, rows).mul_(beta2).addcmul_(sums, sums, value=1 - beta2)
        state["exp_avg"].index_copy_(0, rows, first)
        state["exp_avg_sq"].index_copy_(0, rows, second)
        rate = self.lr * (1 - beta2**self.step) ** 0.5 / (1 - beta1**self.step)
        table.index_add_(0, rows, first / second.sqrt().add_(self.eps), alpha=-rate)
