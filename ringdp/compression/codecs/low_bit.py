"""4, 5 and 6 bits an element: a bfloat16 scale for each block, whole numbers or levels as codes in planes.

The low 4 bits of elements i and i + block/2 are in one byte. Then, for all blocks, the upper bits: two of elements i,
i + block/4, i + 2 block/4, i + 3 block/4 in one byte, or one of eight such. So neither side has to shuffle anything. A
last block that is not full has as many bytes of a plane as its first elements need.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from ringdp import values
from ringdp.compression.codecs import blocks
from ringdp.compression.codecs.arguments import check_block
from ringdp.compression.codecs.core_codec import CoreCodec
from ringdp.compression.feedback import Feedback
from ringdp.compression.registry import register

_NATIVE_BLOCK = 64


class _Planes(CoreCodec):
    """An element is a whole number from `lowest` to `highest` times its block's scale; codes say which.

    The element of the greatest magnitude, of two such the negative one, becomes `lowest`: the scale has a sign.
    """

    bits: ClassVar[int]
    lowest: ClassVar[int]
    highest: ClassVar[int]
    multiple_of: ClassVar[int] = 8  # that a block can be

    block: int

    @abstractmethod
    def codes(self, whole: Tensor) -> Tensor:
        """uint8 of whole numbers in float32, which may be changed."""

    @abstractmethod
    def whole(self, codes: Tensor) -> Tensor:
        """float32 of uint8."""

    def __post_init__(self) -> None:
        check_block(type(self).__name__, self.block, multiple_of=self.multiple_of)
        values.flag(type(self).__name__, "rotate", self.rotate)

    @property
    def in_core(self) -> bool:
        return self.block == _NATIVE_BLOCK

    @property
    def _planes(self) -> list[tuple[int, int]]:
        """Of each: the lowest bit of a code that is in it, and how many."""
        return [(0, 4)] + ([(4, self.bits - 4)] if self.bits > 4 else [])

    def _plane_bytes(self, numel: int, width: int) -> int:
        across = self.block * width // 8
        return numel // self.block * across + min(numel % self.block, across)

    def code_bytes(self, numel: int) -> int:
        return 2 * -(-numel // self.block) + sum(self._plane_bytes(numel, width) for _, width in self._planes)

    def encode(self, x: Tensor) -> Tensor:
        rows = blocks.in_blocks(x, self.block)
        top, bottom = rows.amax(1), rows.amin(1)
        extreme = torch.where(top > -bottom, top, bottom)
        largest = extreme.abs()
        stored = (extreme / torch.full_like(extreme, float(self.lowest))).to(torch.bfloat16).add_(0.0)  # 0, not -0
        scale = stored.to(torch.float32)
        inverse = blocks.divide(1.0, scale * blocks.before(largest))
        inverse.masked_fill_(scale == 0, 0.0)
        codes = self.codes(blocks.quantise(rows, largest, inverse, self.lowest, self.highest))
        bits = stored.view(torch.int16).masked_fill(largest.isfinite().logical_not_(), 0x7FC0)
        parts = [bits]
        for lowest, width in self._planes:
            across = self.block * width // 8
            places = (codes >> lowest & (1 << width) - 1).view(-1, 8 // width, across)
            plane = places[:, 0].clone()
            for place in range(1, 8 // width):
                plane |= places[:, place] << width * place
            parts.append(plane.reshape(-1)[: self._plane_bytes(x.numel(), width)])
        return blocks.as_bytes(*parts)

    def decode(self, code: Tensor, numel: int) -> Tensor:
        at = 2 * -(-numel // self.block)
        scale = code[:at].clone().view(torch.bfloat16).to(torch.float32)
        codes = torch.zeros((len(scale), self.block), dtype=torch.uint8, device=code.device)
        for lowest, width in self._planes:
            across, size = self.block * width // 8, self._plane_bytes(numel, width)
            plane = blocks.in_blocks(code[at : at + size], across)
            at += size
            for place in range(8 // width):
                codes[:, place * across : (place + 1) * across] |= (plane >> width * place & (1 << width) - 1) << lowest
        return self.whole(codes).mul_(scale.unsqueeze(1)).view(-1)[:numel]


class _Linear(_Planes):
    def codes(self, whole: Tensor) -> Tensor:
        return whole.sub_(self.lowest).to(torch.uint8)

    def whole(self, codes: Tensor) -> Tensor:
        return codes.to(torch.float32).add_(self.lowest)


@register("int6")
@dataclasses.dataclass(frozen=True)
class Int6(_Linear):
    """Linear quantisation to 6 bits, one scale for `block` elements: 6.25 bits an element at block 64.

    Any device; at block 64 on the CPU by the core's codec.

    Args:
        block: elements that share a scale, a multiple of 8.
        error_feedback: True, False, or an object with the methods of `ErrorFeedback`.
        rotate: turn blocks of 256 elements by a random rotation first, and back: see `rotation`.

    Raises:
        InvalidArgumentError: a block that is not a multiple of 8 up to 2^20.
    """

    block: int = _NATIVE_BLOCK
    error_feedback: Feedback | bool | None = False
    rotate: bool = False
    codec = "int6"
    bits: ClassVar[int] = 6
    lowest: ClassVar[int] = -32
    highest: ClassVar[int] = 31


@register("int5")
@dataclasses.dataclass(frozen=True)
class Int5(_Linear):
    """Linear quantisation to 5 bits, one scale for `block` elements: 5.25 bits an element at block 64.

    Any device; at block 64 on the CPU by the core's codec.

    Args:
        block: elements that share a scale, a multiple of 8.
        error_feedback: True, False, or an object with the methods of `ErrorFeedback`.
        rotate: turn blocks of 256 elements by a random rotation first, and back: see `rotation`.

    Raises:
        InvalidArgumentError: a block that is not a multiple of 8 up to 2^20.
    """

    block: int = _NATIVE_BLOCK
    error_feedback: Feedback | bool | None = True
    rotate: bool = False
    codec = "int5"
    bits: ClassVar[int] = 5
    lowest: ClassVar[int] = -16
    highest: ClassVar[int] = 15


@register("int4")
@dataclasses.dataclass(frozen=True)
class Int4(_Linear):
    """Linear quantisation to 4 bits, one scale for `block` elements: 4.25 bits an element at block 64.

    The mean of real gradients is off by about 1.6e-2 of its squared norm, so error feedback is the default: the error
    is added to the next gradient. Any device; at block 64 on the CPU by the core's codec.

    Args:
        block: elements that share a scale, an even number.
        error_feedback: False, True, or an object with the methods of `ErrorFeedback`.
        rotate: turn blocks of 256 elements by a random rotation first, and back: see `rotation`.

    Raises:
        InvalidArgumentError: a block that is odd or out of 2 to 2^20.
    """

    block: int = _NATIVE_BLOCK
    error_feedback: Feedback | bool | None = True
    rotate: bool = False
    codec = "int4"
    bits: ClassVar[int] = 4
    lowest: ClassVar[int] = -8
    highest: ClassVar[int] = 7
    multiple_of = 2


# In 127ths: of least squared error (Lloyd, IEEE Trans. Information Theory 28, 1982) over blocks of Gaussian numbers and
# of such times exp(0.5 · another), with 0 kept.
_LEVELS = (-127, -92, -68, -49, -34, -21, -11, 0, 8, 17, 27, 38, 51, 66, 85, 109)


@register("nf4")
@dataclasses.dataclass(frozen=True)
class NormalFloat4(_Planes):
    """4 bits with 16 levels, denser near zero: 4.25 bits an element, a tenth less error than int4.

    As NormalFloat (Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", NeurIPS 2023, arXiv 2305.14314),
    for gradients: with levels that are 127ths and a bfloat16 scale that has the sign of the block's greatest element,
    which has a level to itself. An element is rounded to a 127th of that, and this to the nearest level. Any device; at
    block 64 on the CPU by the core's codec.

    Args:
        block: elements that share a scale, a multiple of 8.
        error_feedback: True, False, or an object with the methods of `ErrorFeedback`.

    Raises:
        InvalidArgumentError: a block that is not a multiple of 8 up to 2^20.
    """

    block: int = _NATIVE_BLOCK
    error_feedback: Feedback | bool | None = True
    codec = "nf4"
    bits: ClassVar[int] = 4
    lowest: ClassVar[int] = -127
    highest: ClassVar[int] = 127

    def codes(self, whole: Tensor) -> Tensor:
        levels = torch.tensor(_LEVELS, dtype=torch.float32, device=whole.device)
        return torch.bucketize(whole, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8)

    def whole(self, codes: Tensor) -> Tensor:
        return torch.tensor(_LEVELS, dtype=torch.float32, device=codes.device)[codes.to(torch.int64)]
