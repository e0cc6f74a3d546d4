"""n ranks in one process, the whole model as one bucket, through the very exchange: for every kind of compressor.

The tests hold it against `ringdp.testing.simulate`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ringdp.compression import Compressor
from ringdp.compression.exchange import BucketSlice, Coder, Layout, States
from ringdp.testing.simulation import together

_CPU = torch.device("cpu")


class ExchangedRanks:
    """Averages gradients as `ranks` ranks do, and keeps what each of them remembers.

    Args:
        shapes: of each parameter by name, in the order of the gradients.
        compressor: any; None is exact.
        exact: names of parameters that are averaged without it.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        compressor: Compressor | None,
        ranks: int,
        *,
        exact: Sequence[str] = (),
    ) -> None:
        self.ranks, self.shapes = ranks, shapes
        self.states = [States() for _ in range(ranks)]
        self.step = 0
        places, begin = [], 0
        for name, shape in shapes.items():
            count = math.prod(shape)
            places.append(BucketSlice(name, tuple(shape), begin, count, None if name in exact else compressor))
            begin += count
        self.counts = [place.count for place in places]
        self.layouts = [Layout(places, ranks, _CPU) for _ in range(ranks)]

    def average(self, gradients: Sequence[Sequence[Tensor]], factor: float = 1.0) -> list[Tensor]:
        """The mean, by parameter, of each rank's gradients, which carry the loss scale `factor`.

        Where anything is not finite the means are not either, and nothing is remembered of the step.
        """
        buckets = [torch.cat([it.detach().reshape(-1) for it in of_rank]) for of_rank in gradients]
        coders = [Coder(self.states[rank], rank, self.ranks, self.step, factor) for rank in range(self.ranks)]
        together(
            [
                layout.average(bucket, coder, self.ranks)
                for layout, bucket, coder in zip(self.layouts, buckets, coders, strict=True)
            ]
        )
        if any(not torch.equal(it.view(torch.uint8), buckets[0].view(torch.uint8)) for it in buckets[1:]):
            raise AssertionError(f"the ranks ended step {self.step} with different bits")
        finite = bool(buckets[0].isfinite().all())
        for state in self.states:
            state.commit(finite)
        self.step += 1
        parts = buckets[0].split(self.counts)
        return [part.view(shape) for part, shape in zip(parts, self.shapes.values(), strict=True)]
