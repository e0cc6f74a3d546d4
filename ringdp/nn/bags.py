"""Rows added up in bags, with their gradient."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ringdp import _C


class _Bags(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, which: Tensor, begins: Tensor | None, mean: bool) -> Tensor:
        ctx.which, ctx.begins, ctx.mean, ctx.count = which, begins, mean, len(rows)
        return _C.sum_bags(rows, which, begins, mean)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        spread = _C.spread_bags(gradient.contiguous(), ctx.which, ctx.begins, ctx.mean, ctx.count)
        return spread, None, None, None


def sum_bags(rows: Tensor, which: Tensor, begins: Tensor | None, mean: bool) -> Tensor:
    """``[bags, dim]``: of each bag the sum, or the mean, of its rows.

    Args:
        rows: ``[n, dim]``, float32 or float64, contiguous.
        which: int32, the row of each element; -1: none, which counts as zeros.
        begins: int64, where each bag begins; None: each element is a bag.
    """
    return _Bags.apply(rows, which, begins, mean)
