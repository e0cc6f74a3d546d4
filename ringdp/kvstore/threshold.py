"""MXNet's gradient compression: an element is sent as plus or minus a threshold, or as 0; the rest is the residual."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor

from ringdp.compression import ErrorFeedback, Feedback, Info, Payload
from ringdp.compression.codecs.bits import pack, packed_bytes, unpack
from ringdp.compression.protocol import Aggregate
from ringdp.errors import InvalidArgumentError


@dataclasses.dataclass(frozen=True)
class Threshold:
    """MXNet's ``{"type": "2bit", "threshold": t}``: elements from t on count t, those up to -t count -t, others 0.

    As in MXNet the sum of the ranks' codes is not encoded again: every rank gets the codes of all, so that the bytes
    that arrive grow with the number of ranks. Error feedback carries what an element lost into the next step.

    Args:
        threshold: above 0.
        bits: 2, or 1 for MXNet's "1bit": what is above the threshold counts 1, everything else -1.

    Raises:
        InvalidArgumentError: other bits, or a threshold that cannot be used.
    """

    threshold: float = 0.5
    bits: int = 2
    error_feedback: Feedback | bool | None = dataclasses.field(default_factory=ErrorFeedback)
    aggregate: ClassVar[Aggregate] = "gather"

    def __post_init__(self) -> None:
        if self.bits not in (1, 2):
            raise InvalidArgumentError(f"bits must be 1 or 2, not {self.bits!r}")
        number = isinstance(self.threshold, int | float) and math.isfinite(self.threshold)
        if not number or not (self.threshold > 0 or self.bits == 1):
            raise InvalidArgumentError(f"threshold must be a finite number above 0, not {self.threshold!r}")

    def compress(self, x: Tensor, info: Info) -> Payload:
        del info
        if self.bits == 1:
            return (pack((x > self.threshold).to(torch.uint8), 1),)
        return (pack((x >= self.threshold).to(torch.uint8) + 2 * (x <= -self.threshold).to(torch.uint8), 2),)

    def decompress(self, payload: Payload, info: Info) -> Tensor:
        (code,) = payload
        if code.numel() != packed_bytes(info.numel, self.bits):
            raise InvalidArgumentError(f"a code of {code.numel()} bytes is not one of {info.numel} elements")
        numbers = unpack(code, self.bits, info.numel).to(torch.float32)
        if self.bits == 1:
            return numbers.mul_(2.0).sub_(1.0)
        return torch.where(numbers == 2.0, -1.0, numbers).mul_(self.threshold)
