"""Sparse codes: the bytes of csrc/codec/sparse.h, by the core on the CPU and by torch operations elsewhere; on
GPUs a kernel selects.

A header of 16 bytes (kind, entries, float32 scale, zero); then a byte for each block of 256 elements, how many entries
it has, a byte for each entry, its place in the block, and its value / scale as float16; or, where that is shorter, a
float16 for each element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ringdp.compression.codecs import native
from ringdp.errors import InvalidArgumentError

BLOCK = 256
HEADER_BYTES = 16
LEAST_THRESHOLD = 2.0**-100
_SPARSE, _DENSE = 0, 1
_LARGEST_FINITE = 0x7F7FFFFF  # bits


def select(
    x: Tensor,
    residual: Tensor | None,
    factor: float,
    threshold: float,
    most: int,
    left: Tensor | None = None,
    equals: int | None = None,
) -> tuple[Tensor, Tensor | None, int]:
    """Code, new residual and number of the large elements of v = x + factor * residual.

    The code holds the first `most` elements of magnitude `threshold` or more, of those that equal it only the first
    `equals` where that is given; the new residual is the rest of v, by factor, None where `residual` is;
    in `left` where that can be.
    """
    if native.serves(x):
        from ringdp import _C

        return _C.sparse_select(x, residual, factor, threshold, most, left, equals)
    v = x if residual is None else x + factor * residual
    index, values, found, finite = _large(v, max(threshold, LEAST_THRESHOLD), most, equals)
    code, sent = _code(index, values, x.numel(), finite=finite)
    left = None
    if residual is not None:
        left = v * (1.0 / factor)
        left[index] = (values - sent) * (1.0 / factor)
    return code, left, found


def _large(v: Tensor, least: float, most: int, equals: int | None) -> tuple[Tensor, Tensor, int, bool]:
    """Places and values of the elements that `select` encodes; the number of large ones in all, and whether these are
    finite."""
    if equals is None and native.has_kernels(v):
        from ringdp import _C

        index, values, selected = _C.cuda_select(v, least, min(most, v.numel()))
        found = int(selected)
        index, values = index[:found].long(), values[:found]
        # Where not all of them fit, an infinity or a NaN may be among the others; it is large in any case.
        finite = bool((values if found <= most else v).isfinite().all())
        return index, values, found, finite
    large = (v.abs() < least).logical_not_()
    index = large.nonzero().view(-1)
    found = index.numel()
    if equals is not None:
        equal = v[index].abs() == least
        index = index[equal.logical_not() | (equal.cumsum(0) <= equals)]
    index = index[:most]
    return index, v[index], found, bool(v[large].isfinite().all())


def threshold_for(x: Tensor, residual: Tensor | None, factor: float, wanted: int) -> float:
    """A magnitude that about `wanted` elements of x + factor * residual reach; 0 where none is above zero.

    By a histogram of a sample; by the sample's own order where magnitudes are so close together that a bin of the
    histogram says too little.
    """
    if native.serves(x):
        from ringdp import _C

        return _C.sparse_threshold(x, residual, factor, wanted)
    step = 16 if x.numel() > 1 << 18 else 1
    seen = x[::step] if residual is None else x[::step] + factor * residual[::step]
    bits = seen.abs().view(torch.int32)
    counts = torch.bincount(bits >> 19, minlength=1 << 12).flip(0).cumsum(0)
    aim = wanted * seen.numel() / max(x.numel(), 1)
    reached = (counts >= aim).nonzero()
    if not reached.numel():
        return 0.0
    at = int(reached[0])
    above, upto = (0 if at == 0 else int(counts[at - 1])), int(counts[at])
    bin_ = (1 << 12) - 1 - at
    if bin_ == 0:
        return 0.0
    if above < aim / 2 or upto > 2 * aim:
        return _magnitude(int(bits.topk(math.ceil(aim), sorted=False).values.min()))
    return _magnitude(int((bin_ + 1 - (aim - above) / (upto - above)) * (1 << 19)))


def exact_cut(x: Tensor, residual: Tensor | None, factor: float, wanted: int) -> tuple[float, int]:
    """A threshold and a number: the `wanted` largest of x + factor * residual are those above it, and so many equals.

    `wanted`: 1 to all of them. Infinities and NaNs count as the largest.
    """
    if native.serves(x):
        from ringdp import _C

        return _C.sparse_cut(x, residual, factor, wanted)
    bits = (x if residual is None else x + factor * residual).abs().view(torch.int32)
    threshold = bits.topk(wanted, sorted=False).values.min()
    if int(threshold) > _LARGEST_FINITE:
        return _magnitude(_LARGEST_FINITE), 0
    return _magnitude(int(threshold)), wanted - int((bits > threshold).sum())


def _magnitude(bits: int) -> float:
    return float(torch.tensor(min(bits, _LARGEST_FINITE), dtype=torch.int32, device="cpu").view(torch.float32))


def decode(code: Tensor, numel: int, out: Tensor | None = None) -> Tensor:
    """float32 ``[numel]``, in `out` (flat, float32) where that is given and can be used.

    Raises ValueError where `code` is not one of so many elements, or an index is out of range.
    """
    if native.serves(code):
        from ringdp import _C

        return _C.sparse_decode(code, numel, out if out is not None and native.serves(out) else None)
    x = torch.zeros(numel, device=code.device, dtype=torch.float32)
    index, values = _entries(code, numel)
    if values is None:
        return x.fill_(torch.nan)
    return x.index_put_((index,), values)


def merge(codes: Sequence[Tensor], numel: int, divisor: float, lost: Tensor | None, back: float) -> Tensor:
    """The code of the sum of `codes`, added in their order, by `divisor`.

    The error of its rounding, times `back`, is added to `lost`, float32 ``[numel]``, in place. Raises as `decode`.
    """
    if all(native.serves(code) for code in codes):
        from ringdp import _C

        return _C.sparse_merge(list(codes), numel, divisor, lost, back)
    device = codes[0].device
    total, there = (
        torch.zeros(numel, device=device, dtype=torch.float32),
        torch.zeros(numel, dtype=torch.bool, device=device),
    )
    finite = True
    for code in codes:
        index, values = _entries(code, numel)
        finite = finite and values is not None
        if values is not None:
            total[index] += values
            there[index] = True
    index = there.nonzero().view(-1)
    mean = total[index] / torch.full((), divisor, device=device, dtype=torch.float32)
    code, sent = _code(index, mean, numel, finite=finite and bool(mean.isfinite().all()))
    if lost is not None and finite:
        lost[index] += (mean - sent) * back
    return code


def entries(code: Tensor) -> int:
    """How many elements a code holds."""
    return int(code[4:8].view(torch.int32))


def _code(index: Tensor, values: Tensor, numel: int, *, finite: bool) -> tuple[Tensor, Tensor]:
    """The code of the values at ascending places, and what they decode to."""
    largest = float(values.abs().max()) if values.numel() and finite else 0.0
    scale = math.ldexp(1.0, max(math.frexp(largest)[1] - 15, -126)) if largest else 1.0
    halves = (values * (1.0 / scale)).to(torch.float16)
    blocks = -(-numel // BLOCK)
    counts = torch.bincount(index // BLOCK, minlength=blocks)
    dense = blocks + 3 * index.numel() > 2 * numel or bool((counts > BLOCK - 1).any())
    kind = torch.tensor([_DENSE if dense else _SPARSE, index.numel(), 0, 0], dtype=torch.int32, device="cpu")
    kind[2:3] = torch.tensor([scale if finite else torch.nan], dtype=torch.float32, device="cpu").view(torch.int32)
    parts = [kind.to(values.device).view(torch.uint8)]
    if dense:
        whole = torch.zeros(numel, dtype=torch.float16, device=values.device)
        parts.append(whole.index_put_((index,), halves).view(torch.uint8))
    else:
        parts += [counts.to(torch.uint8), (index % BLOCK).to(torch.uint8), halves.view(torch.uint8)]
    return torch.cat(parts), halves.to(torch.float32) * scale


def _entries(code: Tensor, numel: int) -> tuple[Tensor, Tensor | None]:
    """Places and values; None for the values where something was not finite."""
    if code.numel() < HEADER_BYTES:
        raise InvalidArgumentError(f"a sparse code: {code.numel()} bytes are too few for its header of {HEADER_BYTES}")
    kind, count, _, zero = code[:HEADER_BYTES].clone().view(torch.int32).tolist()
    scale = float(code[8:12].clone().view(torch.float32))
    blocks = -(-numel // BLOCK)
    wanted = HEADER_BYTES + (2 * numel if kind == _DENSE else blocks + 3 * count)
    if kind not in (_SPARSE, _DENSE) or zero or not 0 <= count <= numel or code.numel() != wanted:
        raise InvalidArgumentError(
            f"a sparse code: {code.numel()} bytes for {count} of {numel} elements, which take {wanted}"
        )
    body = code[HEADER_BYTES:]
    if kind == _DENSE:
        index = torch.arange(numel, device=code.device, dtype=torch.int64)
        halves = body.clone().view(torch.float16)
    else:
        counts = body[:blocks].to(torch.int64)
        if int(counts.sum()) != count:
            raise InvalidArgumentError(f"a sparse code: its blocks do not have its {count} entries")
        begins = torch.arange(blocks, device=code.device, dtype=torch.int64).repeat_interleave(counts) * BLOCK
        index = begins + body[blocks : blocks + count]
        if count and (bool((index[1:] <= index[:-1]).any()) or int(index[-1]) >= numel):
            raise InvalidArgumentError(f"a sparse code: an index of {numel} elements is out of range or order")
        halves = body[blocks + count :].clone().view(torch.float16)
    return index, halves.to(torch.float32) * scale if math.isfinite(scale) else None
