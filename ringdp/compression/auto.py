"""``"auto"``: RingDP chooses among compressors while it trains, bucket by bucket, or none at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from torch import Tensor

from ringdp import refusals, values
from ringdp.compression.protocol import CompressorLike, Info, Payload
from ringdp.compression.registry import register
from ringdp.errors import InvalidArgumentError

ALLOW: Mapping[str, tuple[str, ...]] = {
    "exact": (),
    "near": ("bf16", "int8"),
    "4bit": ("bf16", "int8", "int4"),
    "aggressive": ("bf16", "int8", "int4", "topk"),
}
"""The codes that each permission allows beside exact gradients, from mild to lossy."""


@register("auto")
@dataclasses.dataclass(frozen=True)
class Auto:
    """The fastest of the codes that `allow` permits, by measured speeds: ``RingDP(..., compression="auto")``.

    RingDP measures links and steps, and decides. It is not a compressor itself.

    Args:
        allow: ``"exact"`` nothing lossy; ``"near"`` bfloat16 and int8; ``"4bit"`` also int4 with error feedback;
            ``"aggressive"`` also the largest 1 % with error feedback.

    Raises:
        InvalidArgumentError: another `allow`.
    """

    allow: str = "near"

    def __post_init__(self) -> None:
        values.choice("Auto", "allow", self.allow, ALLOW)

    @property
    def levels(self) -> tuple[str, ...]:
        """Names of the compressors, from mild to lossy."""
        return ALLOW[self.allow]

    def compress(self, x: Tensor, info: Info) -> Payload:
        refusals.refuse("auto", "ddp_hook")

    def decompress(self, payload: Payload, info: Info) -> Tensor:
        refusals.refuse("auto", "ddp_hook")


def with_permission(compression: CompressorLike, allow: str | None) -> CompressorLike:
    """`compression`, where it is "auto" with `allow`.

    Raises:
        InvalidArgumentError: `allow` goes with another compression, or is unknown.
    """
    if allow is None:
        return compression
    if compression != "auto":
        raise InvalidArgumentError(f'allow={allow!r} goes with compression="auto", not with {compression!r}')
    return Auto(allow)
