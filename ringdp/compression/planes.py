"""Codes of 5 and 6 bits, and 4 bits that are not evenly spaced: a bfloat16 scale for each block, codes in planes.

The low 4 bits of a code lie as int4's: those of elements i and i + block/2 in one byte. Then, for all blocks, the upper
bits: two of elements i, i + block/4, i + 2 block/4, i + 3 block/4 in one byte, or one of eight such. So nothing has to
be shuffled, whoever codes. A last block that is not full has as many bytes of a plane as its first elements need.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from ringdp.compression import blocks
from ringdp.compression.checks import check_block, check_code
from ringdp.compression.feedback import Feedback
from ringdp.compression.protocol import Aggregate, Info, Payload
from ringdp.compression.registry import register


class _Planes(ABC):
    """Codes from 0 to 2^bits - 1, whatever they mean, with a scale for each block."""

    aggregate: ClassVar[Aggregate] = "owner"
    carries_nan: ClassVar[bool] = True  # as the scale
    bits: ClassVar[int]
    zero: ClassVar[int]  # the code of 0

    block: int

    @abstractmethod
    def scale_of(self, largest: Tensor) -> Tensor:
        """bfloat16 ``[blocks]`` of each block's absmax."""

    @abstractmethod
    def codes(self, rows: Tensor, largest: Tensor, scale: Tensor) -> Tensor:
        """uint8 ``[blocks, block]`` of float32; `scale` is float32 ``[blocks]``. Zeros where a block is not finite."""

    @abstractmethod
    def values(self, codes: Tensor) -> Tensor:
        """float32 of uint8, in units of the scale."""

    def __post_init__(self) -> None:
        check_block(type(self).__name__, self.block, multiple_of=8)

    @property
    def _planes(self) -> list[tuple[int, int]]:
        """Of each: the lowest bit of a code that is in it, and how many."""
        return [(0, 4)] + ([(4, self.bits - 4)] if self.bits > 4 else [])

    def _plane_bytes(self, numel: int, width: int) -> int:
        across = self.block * width // 8
        return numel // self.block * across + min(numel % self.block, across)

    def code_bytes(self, numel: int) -> int:
        return 2 * -(-numel // self.block) + sum(self._plane_bytes(numel, width) for _, width in self._planes)

    def compress(self, x: Tensor, info: Info) -> Payload:
        rows = blocks.in_blocks(x, self.block)
        largest = blocks.absmax(rows)
        stored = self.scale_of(largest)
        codes = self.codes(rows, largest, stored.to(torch.float32))
        bits = stored.view(torch.int16).masked_fill(largest.isfinite().logical_not_(), 0x7FC0)
        if x.numel() % self.block:
            codes[-1, x.numel() % self.block :] = self.zero
        parts = [bits]
        for lowest, width in self._planes:
            across = self.block * width // 8
            places = (codes >> lowest & (1 << width) - 1).view(-1, 8 // width, across)
            plane = places[:, 0].clone()
            for place in range(1, 8 // width):
                plane |= places[:, place] << width * place
            parts.append(plane.reshape(-1)[: self._plane_bytes(x.numel(), width)])
        return (blocks.as_bytes(*parts),)

    def decompress(self, payload: Payload, info: Info) -> Tensor:
        code = check_code(type(self).__name__, payload, self.code_bytes(info.numel), info)
        at = 2 * -(-info.numel // self.block)
        scale = code[:at].clone().view(torch.bfloat16).to(torch.float32)
        codes = torch.zeros((len(scale), self.block), dtype=torch.uint8, device=code.device)
        for lowest, width in self._planes:
            across, size = self.block * width // 8, self._plane_bytes(info.numel, width)
            plane = blocks.in_blocks(code[at : at + size], across)
            at += size
            for place in range(8 // width):
                codes[:, place * across : (place + 1) * across] |= (plane >> width * place & (1 << width) - 1) << lowest
        return self.values(codes).mul_(scale.unsqueeze(1)).view(-1)[: info.numel]


class _Linear(_Planes):
    @property
    def limit(self) -> int:
        return int(2 ** (self.bits - 1)) - 1

    def scale_of(self, largest: Tensor) -> Tensor:
        return (largest / torch.full_like(largest, float(self.limit))).to(torch.bfloat16)

    def codes(self, rows: Tensor, largest: Tensor, scale: Tensor) -> Tensor:
        inverse = blocks.divide(1.0, scale * blocks.before(largest))
        inverse.masked_fill_(scale == 0, 0.0)
        return blocks.quantise(rows, largest, inverse, self.limit).add_(self.zero).to(torch.uint8)

    def values(self, codes: Tensor) -> Tensor:
        return codes.to(torch.float32).sub_(self.zero)


@register("int6")
@dataclasses.dataclass(frozen=True)
class Int6(_Linear):
    """Linear quantisation to 6 bits, one scale for `block` elements: 6.25 bits an element at block 64.

    Args:
        block: elements that share a scale, a multiple of 8.
        error_feedback: True, False, or an object with the methods of `ErrorFeedback`.

    Raises:
        InvalidArgumentError: a block that is no multiple of 8.
    """

    block: int = 64
    error_feedback: Feedback | bool | None = False
    bits: ClassVar[int] = 6
    zero: ClassVar[int] = 32


@register("int5")
@dataclasses.dataclass(frozen=True)
class Int5(_Linear):
    """Linear quantisation to 5 bits, one scale for `block` elements: 5.25 bits an element at block 64.

    Args:
        block: elements that share a scale, a multiple of 8.
        error_feedback: True, False, or an object with the methods of `ErrorFeedback`.

    Raises:
        InvalidArgumentError: a block that is no multiple of 8.
    """

    block: int = 64
    error_feedback: Feedback | bool | None = True
    bits: ClassVar[int] = 5
    zero: ClassVar[int] = 16


# Quantiles of a Gaussian: Dettmers et al., "QLoRA", NeurIPS 2023, arXiv 2305.14314, appendix E.
_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@register("nf4")
@dataclasses.dataclass(frozen=True)
class NormalFloat4(_Planes):
    """4 bits with the 16 levels of NormalFloat, denser near zero: 4.25 bits an element, a quarter less error than int4.

    Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", NeurIPS 2023, arXiv 2305.14314, for gradients and
    with a bfloat16 scale. An element goes to the nearest level times its block's absmax.

    Args:
        block: elements that share a scale, a multiple of 8.
        error_feedback: True, False, or an object with the methods of `ErrorFeedback`.

    Raises:
        InvalidArgumentError: a block that is no multiple of 8.
    """

    block: int = 64
    error_feedback: Feedback | bool | None = True
    bits: ClassVar[int] = 4
    zero: ClassVar[int] = 7

    def scale_of(self, largest: Tensor) -> Tensor:
        return largest.to(torch.bfloat16)

    def codes(self, rows: Tensor, largest: Tensor, scale: Tensor) -> Tensor:
        levels = torch.tensor(_LEVELS, dtype=torch.float64)
        between = ((levels[1:] + levels[:-1]) / 2).to(torch.float32).to(rows.device)
        fine = (scale > 0) & largest.isfinite()
        # Tiny blocks are made larger first, so that the quotient is exact.
        before = blocks.before(largest)
        of_one = (rows * before.unsqueeze(1)) / torch.where(fine, scale * before, 1.0).unsqueeze(1)
        codes = torch.bucketize(of_one.nan_to_num(0.0), between).to(torch.uint8)
        return codes.masked_fill_(fine.logical_not().unsqueeze(1), self.zero)

    def values(self, codes: Tensor) -> Tensor:
        return torch.tensor(_LEVELS, device=codes.device)[codes.to(torch.int64)]
