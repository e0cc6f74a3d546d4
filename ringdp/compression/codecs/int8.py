"""8 bits an element: a float32 scale for each block, absmax / 127."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ringdp import values
from ringdp.compression.codecs import blocks
from ringdp.compression.codecs.arguments import check_block
from ringdp.compression.codecs.core_codec import CoreCodec
from ringdp.compression.feedback import Feedback
from ringdp.compression.registry import register

_NATIVE_BLOCK = 256


@register("int8")
@dataclasses.dataclass(frozen=True)
class Int8(CoreCodec):
    """Linear quantisation to 8 bits, one scale for `block` elements: 8.125 bits an element.

    The mean of real gradients over 8 ranks is off by about 1e-4 of its squared norm. The payload is one uint8 tensor:
    the scales (float32), then the codes. Any device; at block 256 on the CPU by the core's codec, elsewhere by torch
    operations that give the same bits.

    Args:
        block: elements that share a scale.
        error_feedback: True, or an object with the methods of `ErrorFeedback`: add the error to the next gradient.
        rotate: turn blocks of 256 elements by a random rotation first, and back: see `rotation`.

    Raises:
        InvalidArgumentError: a block out of 1 to 2^20.
    """

    block: int = _NATIVE_BLOCK
    error_feedback: Feedback | bool | None = False
    rotate: bool = False
    codec = "int8"

    def __post_init__(self) -> None:
        check_block("Int8", self.block, multiple_of=1)
        values.flag("Int8", "rotate", self.rotate)

    @property
    def in_core(self) -> bool:
        return self.block == _NATIVE_BLOCK

    def code_bytes(self, numel: int) -> int:
        return 4 * -(-numel // self.block) + numel

    def encode(self, x: Tensor) -> Tensor:
        rows = blocks.in_blocks(x, self.block)
        largest = blocks.absmax(rows)
        scale = largest / torch.full_like(largest, 127.0)
        inverse = blocks.divide(127.0, largest * blocks.before(largest))
        inverse.masked_fill_(largest == 0, 0.0)
        codes = blocks.quantise(rows, largest, inverse, -127, 127).to(torch.int8)
        scale.masked_fill_(largest.isfinite().logical_not_(), torch.nan)
        return blocks.as_bytes(scale, codes.view(-1)[: x.numel()])

    def decode(self, code: Tensor, numel: int) -> Tensor:
        scale_bytes = self.code_bytes(numel) - numel
        scale = code[:scale_bytes].clone().view(torch.float32)
        rows = blocks.in_blocks(code[scale_bytes:].view(torch.int8), self.block)
        return rows.to(torch.float32).mul_(scale.unsqueeze(1)).view(-1)[:numel]
