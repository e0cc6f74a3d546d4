"""PowerSGD: a gradient's matrix as the product of two thin ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ringdp.compression.feedback import Feedback
from ringdp.compression.protocol import Aggregate, Info, Rounds
from ringdp.compression.registry import register
from ringdp.errors import InvalidArgumentError

_STACKED = 1 << 18  # matrices of up to so many elements are multiplied together with others of their shape


@register("powersgd")
@dataclasses.dataclass(frozen=True)
class PowerSGD:
    """Low rank: one step of power iteration on the mean of all ranks' matrices, from where the last step ended.

    Of a matrix of m rows and n columns r·(m + n) numbers are sent and added twice. Vogels, Karimireddy, Jaggi,
    "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019, arXiv 1905.13727,
    algorithms 1 and 2. A parameter's matrix has its first dimension as rows; what would not get smaller is sent as it
    is. What a step needs of the one before is kept by the parameter's name.

    Args:
        rank: r, columns of both factors.
        warm_start: begin with the last step's right factor instead of a random one.
        error_feedback: True, False, or an object with the methods of `ErrorFeedback`.

    Raises:
        InvalidArgumentError: a rank below 1.
    """

    rank: int = 4
    warm_start: bool = True
    error_feedback: Feedback | bool | None = True
    aggregate: ClassVar[Aggregate] = "rounds"

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or isinstance(self.rank, bool) or self.rank < 1:
            raise InvalidArgumentError(f"PowerSGD: rank must be a whole number from 1 on, not {self.rank!r}")

    def average(self, xs: Sequence[Tensor], infos: Sequence[Info]) -> Rounds:
        low = [i for i, info in enumerate(infos) if self._pays(info)]
        exact = {i: xs[i].clone() for i in range(len(xs)) if i not in low}
        stacks = [_Stack([infos[i] for i in members], [xs[i] for i in members]) for members in _by_shape(low, infos)]
        rights = [orthonormal(self._right(stack)) for stack in stacks]
        lefts = [torch.bmm(stack.matrices, right) for stack, right in zip(stacks, rights, strict=True)]
        yield [*lefts, *exact.values()]
        lefts = [orthonormal(left) for left in lefts]
        # By rows, as the matrix lies in memory: its transpose times the left factor takes six times as long.
        rights = [torch.bmm(left.mT, stack.matrices) for stack, left in zip(stacks, lefts, strict=True)]
        yield list(rights)
        means: dict[int, Tensor] = dict(exact)
        for stack, left, right in zip(stacks, lefts, rights, strict=True):
            for info, u, v in zip(stack.infos, left, right, strict=True):
                means[infos.index(info)] = product(u, v).view(-1)
                if self.warm_start:
                    info.state["right"] = v.mT.contiguous()
        return [means[i] for i in range(len(xs))]

    def _pays(self, info: Info) -> bool:
        rows, columns = matrix_of(info)
        return self.rank * (rows + columns) < rows * columns

    def _right(self, stack: _Stack) -> Tensor:
        """``[matrices, columns, rank]``, the same on all ranks. A column that is zero is drawn anew."""
        each = []
        for info in stack.infos:
            _, columns = matrix_of(info)
            drawn = torch.randn((columns, min(self.rank, columns)), generator=info.generator, device=info.device)
            known = info.state.get("right")
            if known is not None and known.shape == drawn.shape:
                known = known.to(info.device)
                drawn = torch.where(known.any(0), known, drawn)
            each.append(drawn)
        return torch.stack(each)


class _Stack:
    """Matrices of one shape: ``matrices`` is ``[len(infos), rows, columns]``, a view where there is one."""

    def __init__(self, infos: list[Info], xs: list[Tensor]) -> None:
        self.infos = infos
        shape = matrix_of(infos[0])
        self.matrices = xs[0].view(1, *shape) if len(xs) == 1 else torch.stack([x.view(shape) for x in xs])


def matrix_of(info: Info) -> tuple[int, int]:
    """Rows and columns of a parameter's matrix."""
    rows = info.shape[0] if info.shape else 1
    return rows, info.numel // max(rows, 1)


def _by_shape(members: Sequence[int], infos: Sequence[Info]) -> list[list[int]]:
    """Those that are multiplied together."""
    found: dict[tuple[int, ...], list[int]] = {}
    for i in members:
        shape = matrix_of(infos[i])
        alone = shape[0] * shape[1] > _STACKED
        found.setdefault((*shape, i if alone else -1), []).append(i)
    return list(found.values())


def orthonormal(matrices: Tensor) -> Tensor:
    """The columns of each of ``[..., rows, columns]``, made orthonormal from left to right in float64.

    Modified Gram-Schmidt, by operations whose order is fixed: ranks that have the same bits keep the same bits, which a
    library's QR does not promise. What is left of a column by rounding alone becomes zero.
    """
    columns = list(matrices.double().unbind(-1))
    for k, column in enumerate(columns):
        before = _norm(column)
        for other in columns[:k]:
            column = column - other * _dot(other, column)
        for other in columns[:k]:  # twice is enough (Giraud, Langou, Rozložník, 2005)
            column = column - other * _dot(other, column)
        norm = _norm(column)
        alive = norm > before * 1e-7
        columns[k] = torch.where(alive, column / torch.where(alive, norm, 1.0), 0.0)
    return torch.stack(columns, -1).to(matrices.dtype)


def _norm(vectors: Tensor) -> Tensor:
    return _dot(vectors, vectors).sqrt()


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """``[..., 1]``: added up in halves, element by element, so in the same order wherever it runs."""
    terms = a * b
    while terms.shape[-1] > 1:
        if terms.shape[-1] % 2:
            terms = torch.nn.functional.pad(terms, (0, 1))
        half = terms.shape[-1] // 2
        terms = terms[..., :half] + terms[..., half:]
    return terms


def product(left: Tensor, right: Tensor) -> Tensor:
    """``[rows, columns]`` of ``[rows, rank]`` and ``[rank, columns]``; each product is rounded, then added in order."""
    out = left[:, 0, None] * right[0]
    term = torch.empty_like(out)
    for k in range(1, left.shape[1]):
        out += torch.mul(left[:, k, None], right[k], out=term)
    return out
