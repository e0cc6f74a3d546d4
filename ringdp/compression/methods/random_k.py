"""Some elements, the same ones on all ranks: they add up as they are."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from ringdp.compression.codecs import blocks
from ringdp.compression.codecs.arguments import check_fraction
from ringdp.compression.feedback import Feedback
from ringdp.compression.protocol import Aggregate, Info, Payload
from ringdp.compression.registry import register

_LONGEST_RUN = 2.0**62  # one element of any tensor


@register("randomk")
@dataclasses.dataclass(frozen=True)
class RandomK:
    """One element of every 1/fraction, drawn anew in each step with a seed that all ranks share.

    No indices are sent, and the sum of payloads is the payload of the sum. Stich, Cordonnier, Jaggi, "Sparsified SGD
    with Memory", NeurIPS 2018, arXiv 1809.07599, with one draw for each run of neighbouring elements instead of one
    for all: a permutation of all elements would take longer than sending them. With error feedback elements that were
    not drawn are the residual; without it elements are multiplied by the length of their run, 1/fraction but for the
    last, so that they are right on average.

    Args:
        fraction: of elements that are sent, above 0, at most 1; 1/fraction is rounded to a whole number.
        error_feedback: False, True, or an object with the methods of `ErrorFeedback`.

    Raises:
        InvalidArgumentError: a fraction out of that range.
    """

    fraction: float = 0.01
    error_feedback: Feedback | bool | None = True
    aggregate: ClassVar[Aggregate] = "sum"

    def __post_init__(self) -> None:
        check_fraction("RandomK", self.fraction)

    @property
    def run(self) -> int:
        """Neighbours of which one is drawn."""
        return max(1, round(min(1 / self.fraction, _LONGEST_RUN)))

    def compress(self, x: Tensor, info: Info) -> Payload:
        chosen = x[self._drawn(info)]
        return (chosen if self.error_feedback else chosen.mul_(blocks.lengths(info.numel, self.run, x.device)),)

    def decompress(self, payload: Payload, info: Info) -> Tensor:
        x = torch.zeros(info.numel, device=payload[0].device, dtype=torch.float32)
        x[self._drawn(info)] = payload[0]
        return x

    def entries(self, payload: Payload) -> int:
        """How many elements it holds."""
        return payload[0].numel()

    def _drawn(self, info: Info) -> Tensor:
        """int64, ascending; all of them below `numel`."""
        begins = torch.arange(0, info.numel, self.run, device=info.device, dtype=torch.int64)
        chance = torch.rand(begins.numel(), generator=info.generator, device=info.device, dtype=torch.float32)
        lengths = (info.numel - begins).clamp_(max=self.run)
        return begins + torch.minimum((chance * lengths).to(torch.int64), lengths - 1)
