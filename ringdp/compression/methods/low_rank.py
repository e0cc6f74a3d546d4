"""Products with thin matrices: by the core on the CPU, by torch operations elsewhere.

A factor is float32 ``[rank, length]``, a vector in each row; a matrix is flat, row by row. The functions of exchanged
tensors, `orthonormalise` and `expand`, give the same bits on every device. `project` and `project_back` are of a rank's
own elements: these are added in the order that suits the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ringdp.compression.codecs import native

_STACKED = 1 << 18  # matrices of up to so many elements are multiplied together with others of their shape


def project(
    lefts: Sequence[Tensor],
    vs: Sequence[Tensor],
    xs: Sequence[Tensor],
    residuals: Sequence[Tensor | None],
    factor: float,
    rights: Sequence[Tensor],
) -> None:
    """Each v = x + factor * residual, where they are not one tensor, and left = right vᵀ."""
    if _in_core(lefts):
        from ringdp import _C

        _C.low_rank_project(lefts, vs, xs, residuals, factor, rights)
        return
    for v, x, residual in zip(vs, xs, residuals, strict=True):
        feed(v, x, residual, factor)
    for batch in _batches(lefts, rights):
        right = _together([rights[i] for i in batch])
        products = torch.bmm(_matrices(vs, lefts, batch), right.mT).mT
        for i, product in zip(batch, products, strict=True):
            lefts[i].copy_(product)


def feed(v: Tensor, x: Tensor, residual: Tensor | None, factor: float) -> None:
    """v = x + factor * residual, where they are not one tensor; None is zero."""
    if residual is not None:
        torch.add(x, residual * factor, out=v)
    elif v is not x:
        v.copy_(x)


def project_back(rights: Sequence[Tensor], vs: Sequence[Tensor], lefts: Sequence[Tensor]) -> None:
    """Each right = left v."""
    if _in_core(lefts):
        from ringdp import _C

        _C.low_rank_project_back(rights, vs, lefts)
        return
    for batch in _batches(lefts, rights):
        products = torch.bmm(_together([lefts[i] for i in batch]), _matrices(vs, lefts, batch))
        for i, product in zip(batch, products, strict=True):
            rights[i].copy_(product)


def expand(
    matrices: Sequence[Tensor],
    kept: Sequence[Tensor | None],
    factor: float,
    lefts: Sequence[Tensor],
    rights: Sequence[Tensor],
) -> None:
    """Each matrix = leftᵀ right, products rounded and then added in order; kept = (kept - matrix) / factor."""
    if _in_core(lefts):
        from ringdp import _C

        _C.low_rank_expand(matrices, kept, factor, lefts, rights)
        return
    for matrix, rest, left, right in zip(matrices, kept, lefts, rights, strict=True):
        out = torch.mul(left[0, :, None], right[0], out=matrix.view(left.shape[1], -1))
        for k in range(1, left.shape[0]):
            out += left[k, :, None] * right[k]
        if rest is not None:
            rest.sub_(matrix).mul_(1.0 / factor)


def orthonormalise(factors: Sequence[Tensor]) -> None:
    """Make the vectors of each orthogonal and of length 1, in place, from the first to the last, in float64.

    Modified Gram-Schmidt, by operations whose order is fixed: ranks that have the same bits keep the same bits, which a
    library's QR does not promise. A vector of rounding errors alone becomes zero; one that is not finite, NaN.
    """
    if _in_core(factors):
        from ringdp import _C

        _C.low_rank_orthonormalise(factors)
        return
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for factor in factors:
        by_shape.setdefault(factor.shape, []).append(factor)
    for several in by_shape.values():
        for factor, result in zip(several, _orthonormal(_together(several)), strict=True):
            factor.copy_(result)


def _in_core(factors: Sequence[Tensor]) -> bool:
    return all(native.serves(factor) for factor in factors)


def _together(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(list(tensors))


def _matrices(vs: Sequence[Tensor], lefts: Sequence[Tensor], batch: Sequence[int]) -> Tensor:
    return _together([vs[i].view(lefts[i].shape[1], -1) for i in batch])


def _batches(lefts: Sequence[Tensor], rights: Sequence[Tensor]) -> list[list[int]]:
    """Those that are multiplied together."""
    found: dict[tuple[int, ...], list[int]] = {}
    for i, (left, right) in enumerate(zip(lefts, rights, strict=True)):
        rank, rows = left.shape
        columns = right.shape[1]
        found.setdefault((rank, rows, columns, i if rows * columns > _STACKED else -1), []).append(i)
    return list(found.values())


def _orthonormal(factors: Tensor) -> Tensor:
    """Of each of ``[..., rank, length]``."""
    vectors = list(factors.double().unbind(-2))
    for k, vector in enumerate(vectors):
        before = _norm(vector)
        for _ in range(2):  # twice is enough (Giraud, Langou, Rozložník, 2005)
            for other in vectors[:k]:
                vector = vector - other * _dot(other, vector)
        norm = _norm(vector)
        rounding_alone = (norm <= before * 1e-7) & (norm < torch.inf)
        vectors[k] = torch.where(rounding_alone, 0.0, vector / norm)
    return torch.stack(vectors, -2).to(factors.dtype)


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
