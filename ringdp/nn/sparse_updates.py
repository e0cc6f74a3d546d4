"""Optimizers that change only the rows with a gradient; the owner of the rows runs them on the sums."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

from ringdp import _C
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
        limit = float("inf")
        if not (0 <= self.lr < limit and 0 <= self.eps < limit and all(0 <= beta < 1 for beta in self.betas)):
            raise InvalidArgumentError(f"lr and eps must be finite and at least 0, betas from 0 to below 1, not {self}")

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
