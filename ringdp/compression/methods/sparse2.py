"""The largest elements of each chunk, in 2 bits each; every rank decodes the codes of all."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from ringdp import values
from ringdp.compression.codecs import native
from ringdp.compression.codecs.checks import check_payload
from ringdp.compression.feedback import Feedback
from ringdp.compression.protocol import Aggregate, Info, Payload
from ringdp.compression.registry import register

CHUNK = 4096


@register("sparse2")
@dataclasses.dataclass(frozen=True)
class Sparse2:
    """The largest of every 4,096 elements of a parameter: 1/195 of the bytes at the default density.

    An entry has a sign and one of two magnitudes of its chunk: the means of those below and above the mean of all.
    Its place takes 8 bits. A shorter parameter, or the rest of a long one, has as many entries as a whole chunk. Made
    for `ringdp.DiLoCo`, where the residual decays and takes the place of the outer optimizer's momentum: Sarfi et al.,
    "Communication Efficient LLM Pre-training with SparseLoCo", arXiv 2508.15706. Codes go to all ranks, so what a rank
    receives grows with their number. Codes are made on the CPU, also those of a GPU's gradients.

    Args:
        density: of elements that are sent, above 0, at most 1; times 4,096 it is rounded to a whole number from 1 on.
        error_feedback: True, False, or an object with the methods of `ErrorFeedback`.

    Raises:
        InvalidArgumentError: a density out of that range.
    """

    density: float = 1 / 64
    error_feedback: Feedback | bool | None = True
    aggregate: ClassVar[Aggregate] = "gather"
    carries_nan: ClassVar[bool] = True

    def __post_init__(self) -> None:
        values.number("Sparse2", "density", self.density, "above 0 and at most 1", lambda it: 0 < it <= 1)

    @property
    def kept(self) -> int:
        """Entries of a chunk."""
        return max(1, round(self.density * CHUNK))

    def compress(self, x: Tensor, info: Info) -> Payload:
        here = _on_host(x)
        code = self.room(info.numel)
        self.encode(code, here, None, None)
        return (code.to(x.device),)

    def compress_with_residual(
        self, x: Tensor, residual: Tensor, info: Info, room: Tensor | None = None
    ) -> tuple[Payload, Tensor]:
        """As `compress`, of `x` and the `residual` of earlier ones; and the new residual, in `room` where that can be.

        `room` is not the memory of `residual`, which may be read again.
        """
        code, before = self.room(info.numel), _on_host(residual)
        left = room if room is not None and native.serves(room) else torch.empty_like(before)
        self.encode(code, _on_host(x), before, left, factor=info.loss_scale)
        return (code.to(x.device),), left.to(x.device)

    def decompress(self, payload: Payload, info: Info) -> Tensor:
        return self.decompress_add(
            payload, info, torch.zeros(info.numel, dtype=torch.float32, device=payload[0].device)
        )

    def decompress_add(self, payload: Payload, info: Info, total: Tensor) -> Tensor:
        """`total`, flat, with the elements added in place: only those that were sent cost time. All of it is NaN where
        one of the encoded elements was not finite."""
        here = _on_host(total)
        if not self.add(here, check_payload("Sparse2", payload)):
            here.fill_(torch.nan)
        return total if here is total else total.copy_(here)

    def entries(self, payload: Payload) -> int:
        """How many elements it holds: about; a shorter chunk may have less."""
        return payload[0].numel() * self.kept // self.room(CHUNK).numel()

    # Over tensors on the CPU.

    def room(self, numel: int) -> Tensor:
        """uint8, for a code of so many elements."""
        from ringdp import _C

        return torch.empty(_C.sparse2_bytes(numel, self.kept), dtype=torch.uint8, device="cpu")

    def encode(
        self,
        code: Tensor,
        x: Tensor,
        residual: Tensor | None,
        left: Tensor | None,
        *,
        factor: float = 1.0,
        decay: float = 1.0,
    ) -> bool:
        """Write the code of ``x + factor * decay * residual``, and what it leaves out by `factor`; whether that is
        finite."""
        from ringdp import _C

        return _C.sparse2_encode(code, x, residual, left, factor, decay, self.kept)

    def add(self, total: Tensor, code: Tensor, weight: float = 1.0) -> bool:
        """Add the elements of a code, which may be a peer's, times `weight`; whether they were finite.

        Raises ValueError where `code` is not one of so many elements.
        """
        from ringdp import _C

        return _C.sparse2_add(total, _on_host(code), self.kept, weight)


def _on_host(x: Tensor) -> Tensor:
    return x if native.serves(x) else x.cpu()
