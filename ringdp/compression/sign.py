"""1 bit an element: signs, and a magnitude for each block."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from ringdp.compression import blocks
from ringdp.compression.arguments import check_block
from ringdp.compression.bits import pack, packed_bytes, unpack
from ringdp.compression.checks import check_code
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
        InvalidArgumentError: a block that is no multiple of 8 up to 2^20.
    """

    block: int = 256
    error_feedback: Feedback | bool | None = True
    aggregate: ClassVar[Aggregate] = "owner"
    carries_nan: ClassVar[bool] = True  # a magnitude that is not finite

    def __post_init__(self) -> None:
        check_block("Sign", self.block, multiple_of=8)

    def compress(self, x: Tensor, info: Info) -> Payload:
        magnitudes = blocks.in_blocks(x.abs(), self.block)
        counts = blocks.lengths(x.numel(), self.block, x.device)
        mean = magnitudes.div_(counts.unsqueeze(1)).sum(1)  # divided first: the sum of large ones is no infinity
        return (blocks.as_bytes(mean, pack((x >= 0).to(torch.uint8), 1)),)

    def decompress(self, payload: Payload, info: Info) -> Tensor:
        scale_bytes = 4 * -(-info.numel // self.block)
        code = check_code("Sign", payload, scale_bytes + packed_bytes(info.numel, 1), info)
        signs = unpack(code[scale_bytes:], 1, info.numel).to(torch.float32).mul_(2).sub_(1)
        mean = code[:scale_bytes].clone().view(torch.float32)
        return blocks.in_blocks(signs, self.block).mul(mean.unsqueeze(1)).view(-1)[: info.numel]
