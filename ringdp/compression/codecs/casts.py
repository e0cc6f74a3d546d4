"""16 bits an element: float16 and bfloat16, rounded to nearest, ties to even."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ringdp.compression.codecs.core_codec import CoreCodec
from ringdp.compression.feedback import Feedback
from ringdp.compression.registry import register


@register("fp16", "float16")
@dataclasses.dataclass(frozen=True)
class Float16(CoreCodec):
    """A cast to float16, summed in float32: NMSE of 1e-7 while gradients lie in its range, 6e-8 to 65504.

    Larger elements become infinite, so that loss scaling sees them. A NaN keeps its sign and upper bits and becomes
    quiet, as the hardware's instruction does it.
    """

    error_feedback: Feedback | bool | None = False
    codec = "float16"

    def code_bytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, x: Tensor) -> Tensor:
        bits = x.view(torch.int32)
        quiet = (bits >> 16 & 0x8000 | 0x7E00 | bits >> 13 & 0x3FF).to(torch.int16)
        return torch.where(x.isnan(), quiet, x.to(torch.float16).view(torch.int16)).view(torch.uint8)

    def decode(self, code: Tensor, numel: int) -> Tensor:
        halves = code.view(torch.float16)
        bits = halves.view(torch.int16).to(torch.int32)
        quiet = ((bits & 0x8000) << 16 | 0x7FC00000 | (bits & 0x3FF) << 13).view(torch.float32)
        return torch.where(halves.isnan(), quiet, halves.to(torch.float32))


@register("bf16", "bfloat16")
@dataclasses.dataclass(frozen=True)
class Bfloat16(CoreCodec):
    """A cast to bfloat16, summed in float32: NMSE of 1e-5 over float32's whole range. Every NaN becomes 0x7fc0."""

    error_feedback: Feedback | bool | None = False
    codec = "bfloat16"

    def code_bytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).view(torch.int16).masked_fill_(x.isnan(), 0x7FC0).view(torch.uint8)

    def decode(self, code: Tensor, numel: int) -> Tensor:
        return code.view(torch.bfloat16).to(torch.float32)
