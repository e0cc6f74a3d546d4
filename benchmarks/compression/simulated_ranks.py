"""n ranks in one process, the whole model at once: the bits of the exchange by owners, without its messages.

Blocks of the core's codecs are counted from a parameter's start and parts begin at multiples of 256 elements
(docs/reference/wire_format.md), so parameters padded to such multiples can be encoded as one flat tensor, all ranks' in
one call. `ringdp.testing.simulate` runs the real exchange, parameter by parameter; the tests hold this against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ringdp.compression import Compressor, Info
from ringdp.compression.codecs.core_codec import CoreCodec
from ringdp.compression.feedback import ErrorFeedback, feedback_of
from ringdp.compression.partition import UNIT, bounds, owner_offset_of


class SimulatedRanks:
    """Averages gradients as `ranks` ranks with one compressor do; keeps their residuals.

    Args:
        counts: elements of each parameter by name, in the order of the gradients.
        compressor: one of the core's kinds (blocks that divide 256, standard error feedback or none).
        exact: names of parameters that are averaged without it.
    """

    def __init__(
        self, counts: Mapping[str, int], compressor: Compressor, ranks: int, *, exact: Sequence[str] = ()
    ) -> None:
        self.ranks, self.compressor = ranks, compressor
        self.feedback = feedback_of(getattr(compressor, "error_feedback", None)) is not None
        self.places: list[slice | None] = []
        begin, owners = 0, list[Tensor]()
        for name, count in counts.items():
            if name in exact:
                self.places.append(None)
                continue
            self.places.append(slice(begin, begin + count))
            padded = -(-count // UNIT) * UNIT
            begin += padded
            edges = bounds(count, ranks, owner_offset_of(name))
            owner = torch.zeros(padded, dtype=torch.int64)
            for rank in range(ranks):
                owner[edges[rank] : edges[rank + 1]] = rank
            owners.append(owner)
        self.numel = begin
        owner = torch.cat(owners) if owners else torch.empty(0, dtype=torch.int64)
        self.owned = owner == torch.arange(ranks).unsqueeze(1)  # [ranks, numel]
        self.owner = owner.unsqueeze(0)
        self.residual = torch.zeros(ranks, begin)

    @staticmethod
    def serves(compressor: Compressor) -> bool:
        """Whether it can stand in for `ranks` ranks with this compressor."""
        if getattr(compressor, "native", None) is None and not isinstance(compressor, CoreCodec):
            return False
        if getattr(compressor, "rotate", False):  # by numbers of each parameter's own
            return False
        feedback = feedback_of(getattr(compressor, "error_feedback", None))
        return UNIT % getattr(compressor, "block", 1) == 0 and (feedback is None or type(feedback) is ErrorFeedback)

    def average(self, gradients: Sequence[Sequence[Tensor]], factor: float = 1.0) -> list[Tensor]:
        """The mean, by parameter, of each rank's gradients, which carry the loss scale `factor`.

        Where anything is not finite the means are not either, and residuals stay as they were.
        """
        x = torch.zeros(self.ranks, self.numel)
        divisor = torch.tensor(float(self.ranks))
        for rank, of_rank in enumerate(gradients):
            for place, gradient in zip(self.places, of_rank, strict=True):
                if place is not None:
                    x[rank, place] = gradient.flatten()
        sent = x + factor * self.residual if self.feedback else x
        decoded = self._code(sent)
        mean = _in_rank_order(torch.where(self.owned, x, decoded)) / divisor
        again = mean + factor * self.residual.gather(0, self.owner)[0] if self.feedback else mean
        result = self._code(again)
        averages, finite = [], bool(result.isfinite().all())
        for index, place in enumerate(self.places):
            shape = gradients[0][index].shape
            if place is not None:
                averages.append(result[place].view(shape))
                continue
            averages.append(_in_rank_order(torch.stack([of_rank[index] for of_rank in gradients])) / divisor)
            finite = finite and bool(averages[-1].isfinite().all())
        if self.feedback and finite:
            self.residual = torch.where(self.owned, again - result, sent - decoded) / factor
        return averages

    def _code(self, x: Tensor) -> Tensor:
        info = Info(name="all", shape=tuple(x.shape), numel=x.numel(), world_size=self.ranks)
        return self.compressor.decompress(self.compressor.compress(x.flatten(), info), info).view(x.shape)


def _in_rank_order(terms: Tensor) -> Tensor:
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total
