"""4 bits an element: a bfloat16 scale for each block, absmax / 7, and error feedback."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ringdp.compression import blocks
from ringdp.compression.checks import check_block
from ringdp.compression.core_codec import CoreCodec
from ringdp.compression.feedback import Feedback
from ringdp.compression.registry import register

_NATIVE_BLOCK = 64


@register("int4")
@dataclasses.dataclass(frozen=True)
class Int4(CoreCodec):
    """Linear quantisation to 4 bits, one scale for `block` elements: 4.25 bits an element.

    The mean of real gradients is off by about 1.7e-2 of its squared norm, so what is lost is added to the next gradient
    unless told otherwise. The payload is one uint8 tensor: the scales (bfloat16), then the codes plus 8, those of
    elements i and i + block / 2 in one byte. Any device; at block 64 on the CPU by the core's codec.

    Args:
        block: elements that share a scale, an even number.
        error_feedback: False, True, or an object with the methods of `ErrorFeedback`.

    Raises:
        InvalidArgumentError: a block that is odd or below 2.
    """

    block: int = _NATIVE_BLOCK
    error_feedback: Feedback | bool | None = True
    codec = "int4"

    def __post_init__(self) -> None:
        check_block("Int4", self.block, multiple_of=2)

    @property
    def in_core(self) -> bool:
        return self.block == _NATIVE_BLOCK

    def code_bytes(self, numel: int) -> int:
        return 2 * -(-numel // self.block) + self._nibble_bytes(numel)

    def _nibble_bytes(self, numel: int) -> int:
        half = self.block // 2
        return numel // self.block * half + min(numel % self.block, half)

    def encode(self, x: Tensor) -> Tensor:
        rows = blocks.in_blocks(x, self.block)
        largest = blocks.absmax(rows)
        stored = (largest / torch.full_like(largest, 7.0)).to(torch.bfloat16)
        scale = stored.to(torch.float32)
        inverse = blocks.divide(1.0, scale * blocks.before(largest))
        inverse.masked_fill_(scale == 0, 0.0)
        codes = blocks.quantise(rows, largest, inverse, 7).add_(8).to(torch.uint8)
        half = self.block // 2
        nibbles = codes[:, :half] | codes[:, half:] << 4
        bits = stored.view(torch.int16).masked_fill(largest.isfinite().logical_not_(), 0x7FC0)
        return blocks.as_bytes(bits, nibbles.view(-1)[: self._nibble_bytes(x.numel())])

    def decode(self, code: Tensor, numel: int) -> Tensor:
        scale_bytes = self.code_bytes(numel) - self._nibble_bytes(numel)
        scale = code[:scale_bytes].clone().view(torch.bfloat16).to(torch.float32)
        nibbles = blocks.in_blocks(code[scale_bytes:], self.block // 2)
        codes = torch.cat((nibbles & 15, nibbles >> 4), dim=1).to(torch.float32).sub_(8)
        return codes.mul_(scale.unsqueeze(1)).view(-1)[:numel]
