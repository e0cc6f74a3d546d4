"""A bucket's way through its compressors: one exchange for each kind of aggregate, the same steps on all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ringdp.compression.exchange.agreement import agree
from ringdp.compression.exchange.gather import gather_exchange
from ringdp.compression.exchange.owner import owner_exchange
from ringdp.compression.exchange.plan import Plan
from ringdp.compression.exchange.requests import AllReduce, Exchange
from ringdp.compression.exchange.section import Coder, Section
from ringdp.compression.exchange.summed import sum_exchange
from ringdp.compression.protocol import Compressor

_EXCHANGES: dict[str, Callable[[Plan, Tensor, Coder, Tensor], Exchange]] = {
    "owner": owner_exchange,
    "gather": gather_exchange,
    "sum": sum_exchange,
}


@dataclasses.dataclass(frozen=True)
class Place:
    """A parameter in a bucket: elements ``begin`` to ``begin + count``; no compressor is exact."""

    name: str
    shape: tuple[int, ...]
    begin: int
    count: int
    compressor: Compressor | None


class Layout:
    """What a bucket holds and how each part of it is averaged. Made once for a bucket, used in every step."""

    def __init__(self, places: Sequence[Place], ranks: int, device: torch.device) -> None:
        by_aggregate: dict[str, list[Section]] = {}
        self.exact: list[tuple[int, int]] = []
        for place in places:
            if place.compressor is None:
                self.exact.append((place.begin, place.begin + place.count))
                continue
            aggregate = getattr(place.compressor, "aggregate", "owner")
            parts = ranks if aggregate == "owner" else 1
            fields: dict[str, Any] = {field: getattr(place, field) for field in ("name", "shape", "begin", "count")}
            section = Section(**fields, compressor=place.compressor, parts=parts, device=device)
            by_aggregate.setdefault(aggregate, []).append(section)
        self.plans = {kind: Plan(tuple(it), ranks, device) for kind, it in by_aggregate.items()}
        self._agreed = False

    def average(self, bucket: Tensor, coder: Coder, divisor: float) -> Exchange:
        """Replace the flat `bucket` (any floating dtype) by its mean over the ranks.

        Raises:
            MismatchError: on all ranks: they do not hold the same, or one tells lengths that cannot be.
            InvalidArgumentError, or whatever a compressor raises: on its rank; RingError on the others, which say so.
        """
        if not self._agreed:
            for plan in self.plans.values():
                yield from agree(plan, coder.rank)
            self._agreed = True
        whole = bucket.float()  # not a copy of float32
        by = torch.full((), divisor, dtype=torch.float32, device=bucket.device)
        for kind, plan in self.plans.items():
            yield from _EXCHANGES[kind](plan, whole, coder, by)
        if whole is not bucket:
            for plan in self.plans.values():
                for section in plan.sections:
                    there = slice(section.begin, section.begin + section.count)
                    bucket[there] = whole[there]
        if self.exact:
            yield from _average_exactly(bucket, self.exact, divisor)


def _average_exactly(bucket: Tensor, ranges: list[tuple[int, int]], divisor: float) -> Exchange:
    parts = [bucket[begin:end] for begin, end in ranges]
    flat = torch.cat(parts)
    yield AllReduce([flat])
    for part, mean in zip(parts, (flat / divisor).split([it.numel() for it in parts]), strict=True):
        part.copy_(mean)
