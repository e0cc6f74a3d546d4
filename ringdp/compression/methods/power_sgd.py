"""PowerSGD: a gradient's matrix as the product of two thin ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ringdp import values
from ringdp.compression.feedback import Feedback
from ringdp.compression.methods import low_rank
from ringdp.compression.protocol import Aggregate, Info, Rounds
from ringdp.compression.registry import register


@register("powersgd")
@dataclasses.dataclass(frozen=True)
class PowerSGD:
    """Low rank: one step of power iteration on the mean of all ranks' matrices, from where the last step ended.

    Of a matrix of m rows and n columns r·(m + n) numbers are sent and added twice. Vogels, Karimireddy, Jaggi,
    "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019, arXiv 1905.13727,
    algorithms 1 and 2. A parameter's matrix has its first dimension as rows; a matrix that would not get smaller is
    sent as it is. The right factor of the last step is kept by the parameter's name.

    Args:
        rank: r, columns of both factors.
        warm_start: begin with the last step's right factor instead of a random one.
        error_feedback: True, False, or an object with the methods of `ErrorFeedback`.

    Raises:
        InvalidArgumentError: a rank that is not a whole number from 1 on, a warm_start that is not a bool.
    """

    rank: int = 4
    warm_start: bool = True
    error_feedback: Feedback | bool | None = True
    aggregate: ClassVar[Aggregate] = "rounds"
    per_parameter: ClassVar[bool] = True
    carries_nan: ClassVar[bool] = True

    def __post_init__(self) -> None:
        values.whole("PowerSGD", "rank", self.rank, least=1)
        values.flag("PowerSGD", "warm_start", self.warm_start)

    def average(self, xs: Sequence[Tensor], infos: Sequence[Info]) -> Rounds:
        nothing: list[Tensor | None] = [None] * len(xs)
        return (yield from self._average(xs, xs, nothing, infos, [torch.empty_like(x) for x in xs], nothing))

    def average_with_residual(
        self,
        xs: Sequence[Tensor],
        residuals: Sequence[Tensor | None],
        infos: Sequence[Info],
        means: Sequence[Tensor],
        left: Sequence[Tensor],
    ) -> Rounds:
        """As `average`, of `xs` and the `residuals` of earlier ones (without the loss scale; None: zero).

        Args:
            means: where to put the means; may be `xs`.
            left: memory for the new residuals; neither of the others.
        """
        return (yield from self._average(xs, left, residuals, infos, means, left))

    def _average(
        self,
        xs: Sequence[Tensor],
        vs: Sequence[Tensor],
        residuals: Sequence[Tensor | None],
        infos: Sequence[Info],
        means: Sequence[Tensor],
        kept: Sequence[Tensor | None],
    ) -> Rounds:
        """`vs`: where to put the sum of `xs` and `residuals`; `kept`: those of them that are to hold what is left."""
        factor = infos[0].loss_scale
        low = [i for i, info in enumerate(infos) if self._pays(info)]
        exact = [i for i in range(len(xs)) if i not in low]
        shapes = [matrix_of(info) for info in infos]
        ends = [self._right(infos[i]) for i in low]
        low_rank.orthonormalise(ends)

        first, lefts = _room(xs[0], [(self.rank, shapes[i][0]) for i in low] + [(infos[i].numel,) for i in exact])
        lefts, sums = lefts[: len(low)], lefts[len(low) :]
        fed = [vs[i] for i in low]
        low_rank.project(lefts, fed, [xs[i] for i in low], [residuals[i] for i in low], factor, ends)
        for i, total in zip(exact, sums, strict=True):
            low_rank.feed(vs[i], xs[i], residuals[i], factor)
            total.copy_(vs[i])
        yield [first]

        low_rank.orthonormalise(lefts)
        second, rights = _room(xs[0], [(self.rank, shapes[i][1]) for i in low])
        low_rank.project_back(rights, fed, lefts)
        yield [second]

        low_rank.expand([means[i] for i in low], [kept[i] for i in low], factor, lefts, rights)
        for i, total in zip(exact, sums, strict=True):
            means[i].copy_(total)
            rest = kept[i]
            if rest is not None:
                rest.sub_(total).mul_(1.0 / factor)
        if self.warm_start:
            for i, right in zip(low, rights, strict=True):
                infos[i].state["right"] = right.clone()
        return means

    def _pays(self, info: Info) -> bool:
        rows, columns = matrix_of(info)
        return self.rank * (rows + columns) < rows * columns

    def _right(self, info: Info) -> Tensor:
        """``[rank, columns]``, the same on all ranks. A vector that is zero is drawn anew."""
        columns = matrix_of(info)[1]
        shape = (self.rank, columns)
        known = info.state.get("right")
        if known is not None and known.shape == shape:
            known = known.to(info.device)
            alive = known.any(1, keepdim=True)
            if bool(alive.all()):
                return torch.clone(known)
        drawn = torch.randn((columns, self.rank), generator=info.generator, device=info.device, dtype=torch.float32).mT
        return drawn.contiguous() if known is None or known.shape != shape else torch.where(alive, known, drawn)


def matrix_of(info: Info) -> tuple[int, int]:
    """Rows and columns of a parameter's matrix."""
    rows = info.shape[0] if info.shape else 1
    return rows, info.numel // max(rows, 1)


def _room(like: Tensor, shapes: Sequence[tuple[int, ...]]) -> tuple[Tensor, list[Tensor]]:
    """One flat tensor, to be exchanged, and views of these shapes that fill it."""
    sizes = [math.prod(shape) for shape in shapes]
    flat = torch.empty(sum(sizes), device=like.device, dtype=torch.float32)
    return flat, [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)] if sizes else []
