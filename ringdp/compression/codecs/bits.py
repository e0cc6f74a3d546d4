"""Small whole numbers, several in a byte: the first ones in its lowest bits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def packed_bytes(count: int, bits: int) -> int:
    """How many bytes `count` numbers of 1, 2, 4 or 8 bits take."""
    return -(-count * bits // 8)


def packed_slice(numbers: slice, bits: int) -> slice:
    """The bytes of these numbers, the first of which begins a byte."""
    return slice(packed_bytes(numbers.start, bits), packed_bytes(numbers.stop, bits))


def pack(numbers: Tensor, bits: int) -> Tensor:
    """uint8 ``[packed_bytes(count, bits)]`` of uint8 ``[count]``, whose upper bits are clear."""
    each = 8 // bits
    if each == 1:
        return numbers
    rows = pad(numbers, (0, -numbers.numel() % each)).view(-1, each)
    packed = rows[:, 0].clone()
    for place in range(1, each):
        packed |= rows[:, place] << bits * place
    return packed


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """uint8 ``[count]`` of a result of `pack`."""
    each = 8 // bits
    if each == 1:
        return packed[:count]
    rows = torch.stack([packed >> bits * place & (1 << bits) - 1 for place in range(each)], dim=1)
    return rows.view(-1)[:count]
