"""Block codes in torch operations: the bits of csrc/codec on any device, and with other block sizes.

A block of elements shares a scale; code = element · (1 / scale) to nearest, ties to even. An element that is not finite
gives its block a NaN scale. A block whose absmax is below 2^-100 is scaled up by a power of two first, so that the
reciprocal is finite. Divisors are tensors: where one is a Python number, a GPU multiplies by its rounded reciprocal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

PIECE = 1 << 17  # elements: operations on so many stay in the cache, and their calls cost little beside it
TINY = 2.0**-100
TINY_FACTOR = 2.0**60


def pieces(numel: int, block: int, device: torch.device) -> Iterator[slice]:
    """Whole blocks of some `PIECE` elements, to be coded one after the other; begins are multiples of 8. On a GPU: all.

    A temporary tensor of many megabytes is fresh memory, which costs more than the operations on it.
    """
    least = block * 8 // math.gcd(block, 8)
    step = max(numel, 1) if device.type != "cpu" else max(PIECE // least, 1) * least
    for begin in range(0, numel, step):
        yield slice(begin, min(begin + step, numel))


def rows_of(piece: slice, block: int) -> slice:
    """The blocks of a piece."""
    return slice(piece.start // block, -(-piece.stop // block))


def in_blocks(x: Tensor, block: int) -> Tensor:
    """``[blocks, block]`` of the flat `x`; zeros fill the last one. Not a copy where `x` ends with a block."""
    rest = x.numel() % block
    if rest:
        x = torch.nn.functional.pad(x, (0, block - rest))
    return x.view(-1, block)


def lengths(numel: int, block: int, device: torch.device) -> Tensor:
    """How many of `numel` elements are in each block, float32 ``[blocks]``."""
    counts = torch.full((-(-numel // block),), float(block), device=device, dtype=torch.float32)
    if numel % block:
        counts[-1] = numel % block
    return counts


def absmax(blocks: Tensor) -> Tensor:
    """``[blocks]``; NaN where something in the block is NaN. Reads twice, and is half the time of ``abs().amax()``."""
    return torch.maximum(blocks.amax(1), -blocks.amin(1)).abs_()


def divide(numerator: float, denominator: Tensor) -> Tensor:
    return torch.full_like(denominator, numerator).div_(denominator)


def quantise(blocks: Tensor, largest: Tensor, inverse: Tensor, lowest: int, highest: int) -> Tensor:
    """Whole numbers in float32, ``[blocks, block]``, from lowest to highest; zeros in blocks that are not finite.

    Args:
        largest: each block's absmax, ``[blocks]``.
        inverse: the factor of each element, which is times 2^60 in tiny blocks, ``[blocks]``.
    """
    if on_gpu(blocks) or bool((largest < TINY).any()):
        blocks = blocks * before(largest).unsqueeze(1)
    whole = torch.mul(blocks, inverse.unsqueeze(1)).round_().clamp_(lowest, highest)
    bad = largest.isfinite().logical_not_()
    if on_gpu(blocks) or bool(bad.any()):
        whole.masked_fill_(bad.unsqueeze(1), 0.0)
    return whole


def before(largest: Tensor) -> Tensor:
    """The factor of a block before its scale's reciprocal: 1, but for tiny blocks."""
    return torch.where(largest < TINY, TINY_FACTOR, 1.0)


def on_gpu(tensor: Tensor) -> bool:
    """Whether to read a value from `x` would wait for the device, which costs more than one more operation."""
    return tensor.device.type != "cpu"


def as_bytes(*tensors: Tensor) -> Tensor:
    """The tensors' bytes one after the other, uint8."""
    return torch.cat([tensor.contiguous().view(torch.uint8).view(-1) for tensor in tensors])
