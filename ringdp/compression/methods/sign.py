"""1 bit an element: signs, and a magnitude for each block."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from ringdp.compression.codecs import blocks
from ringdp.compression.codecs.arguments import check_block
from ringdp.compression.codecs.bits import pack, packed_bytes, packed_slice, unpack
from ringdp.compression.codecs.checks import check_code
from ringdp.compression.feedback import Feedback
from ringdp.compression.protocol import Aggregate, Info, Payload
from ringdp.compression.registry import register


@register("sign")
@dataclasses.dataclass(frozen=True)
class Sign:
    """Signs times the mean magnitude of their block, with error feedback: 1.125 bits an element at block 256.

    Half of a gradient's squared norm is lost each time, so without error feedback it does not converge. Karimireddy et
    al., "Error Feedback Fixes SignSGD", ICML 2019, arXiv 1901.09847, where all elements share one scale. The payload
    is one uint8 tensor: the magnitudes (float32), then the bits, 1 for what is not negative.

    Args:
        block: elements that share a magnitude, a multiple of 8.
        error_feedback: False, True, or an object with the methods of `ErrorFeedback`.

    Raises:
        InvalidArgumentError: a block that is not a multiple of 8 up to 2^20.
    """

    block: int = 256
    error_feedback: Feedback | bool | None = True
    aggregate: ClassVar[Aggregate] = "owner"
    carries_nan: ClassVar[bool] = True  # a magnitude that is not finite

    def __post_init__(self) -> None:
        check_block("Sign", self.block, multiple_of=8)

    def compress(self, x: Tensor, info: Info) -> Payload:
        scale_bytes, size = self._sizes(x.numel())
        code = torch.empty(size, dtype=torch.uint8, device=x.device)
        means, bits = code[:scale_bytes].view(torch.float32), code[scale_bytes:]
        for piece in blocks.pieces(x.numel(), self.block, x.device):
            part = x[piece]
            magnitudes = blocks.in_blocks(part.abs(), self.block)
            counts = blocks.lengths(part.numel(), self.block, x.device)
            # Divided first: the sum of large ones does not overflow.
            means[blocks.rows_of(piece, self.block)] = magnitudes.div_(counts.unsqueeze(1)).sum(1)
            bits[packed_slice(piece, 1)] = pack((part >= 0).view(torch.uint8), 1)
        return (code,)

    def decompress(self, payload: Payload, info: Info) -> Tensor:
        scale_bytes, size = self._sizes(info.numel)
        code = check_code("Sign", payload, size, info)
        means, bits = code[:scale_bytes].clone().view(torch.float32), code[scale_bytes:]
        x = torch.empty(info.numel, device=code.device, dtype=torch.float32)
        for piece in blocks.pieces(info.numel, self.block, code.device):
            count = piece.stop - piece.start
            signs = unpack(bits[packed_slice(piece, 1)], 1, count).to(torch.float32).mul_(2).sub_(1)
            rows = blocks.in_blocks(signs, self.block).mul_(means[blocks.rows_of(piece, self.block)].unsqueeze(1))
            x[piece] = rows.view(-1)[:count]
        return x

    def _sizes(self, numel: int) -> tuple[int, int]:
        """Bytes of the magnitudes, and of all."""
        scale_bytes = 4 * -(-numel // self.block)
        return scale_bytes, scale_bytes + packed_bytes(numel, 1)
