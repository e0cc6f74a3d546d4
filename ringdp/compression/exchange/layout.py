"""A bucket's way through its compressors: one exchange for each kind of aggregate, the same steps on all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ringdp.compression.exchange.agreement import agree
from ringdp.compression.exchange.owner import merge_exchange, owner_exchange
from ringdp.compression.exchange.plan import Plan
from ringdp.compression.exchange.requests import AllReduce, Exchange
from ringdp.compression.exchange.rounds import learn, rounds_exchange
from ringdp.compression.exchange.section import Coder, Section, parts_of
from ringdp.compression.exchange.whole import gather_exchange, sum_exchange
from ringdp.compression.protocol import Compressor
from ringdp.errors import MismatchError

_EXCHANGES: dict[str, Callable[[Plan, Tensor, Coder, Tensor], Exchange]] = {
    "owner": owner_exchange,
    "gather": gather_exchange,
    "sum": sum_exchange,
    "rounds": rounds_exchange,
    "merge": merge_exchange,
}


@dataclasses.dataclass(frozen=True)
class BucketSlice:
    """A parameter in a bucket: elements ``begin`` to ``begin + count``; no compressor is exact."""

    name: str
    shape: tuple[int, ...]
    begin: int
    count: int
    compressor: Compressor | None

    def section(self, ranks: int, device: torch.device) -> Section | None:
        """As the exchanges know it; None for exact."""
        if self.compressor is None:
            return None
        parts = parts_of(self.compressor, ranks)
        return Section(self.name, self.shape, self.begin, self.count, self.compressor, parts, device)


class Layout:
    """The parameters of a bucket and how each is averaged. Made once for a bucket, used in every step."""

    def __init__(self, places: Sequence[BucketSlice], ranks: int, device: torch.device) -> None:
        by_aggregate: dict[str, list[Section]] = {}
        self.exact: list[tuple[int, int]] = []
        for place in places:
            section = place.section(ranks, device)
            if section is None:
                self.exact.append((place.begin, place.begin + place.count))
            else:
                by_aggregate.setdefault(getattr(place.compressor, "aggregate", "owner"), []).append(section)
        self.plans: dict[str, Plan] = {kind: Plan(tuple(it), ranks, device) for kind, it in by_aggregate.items()}
        self._agreed = False

    def average(self, bucket: Tensor, coder: Coder, divisor: float) -> Exchange:
        """Replace the flat `bucket` (any floating dtype) by its mean over the ranks.

        Raises:
            MismatchError: on all ranks: their buckets differ, or one sends impossible lengths.
            InvalidArgumentError, or any error of a compressor: on its rank; RingError on the others, with its text.
        """
        if not self._agreed:
            for kind, plan in self.plans.items():
                yield from _agree(kind, plan, coder.rank)
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
            flat = self.exact_of(bucket)
            yield AllReduce([flat])
            self.put_exact(bucket, flat, divisor)

    def exact_of(self, bucket: Tensor) -> Tensor:
        """The exact parameters' elements, one after the other: a copy."""
        return torch.cat([bucket[begin:end] for begin, end in self.exact])

    def put_exact(self, bucket: Tensor, summed: Tensor, divisor: float) -> None:
        """Divide `summed`, in place, and put it where `exact_of` took it from."""
        sizes = [end - begin for begin, end in self.exact]
        for (begin, end), mean in zip(self.exact, summed.div_(divisor).split(sizes), strict=True):
            bucket[begin:end] = mean


def _agree(kind: str, plan: Plan, rank: int) -> Exchange:
    """Check that all ranks have the same plan. A rank whose compressors fail on zeros raises that error, and the others
    a MismatchError with its text."""
    error: BaseException | None = None
    try:
        lines = plan.lines
        if kind == "rounds":
            learn(plan)
    except BaseException as caught:  # sent to all ranks, which then raise together
        error = caught
        lines = [f"no code: {type(caught).__name__}: {caught}"]
    try:
        yield from agree(lines, plan.device, rank)
    except MismatchError:
        if error is None:
            raise
    if error is not None:
        raise error
