"""The collectives that are measured, each with its expected result and the meaning of its bandwidth.

A new one is a class here and its name in `COLLECTIVES`. Sizes and bus bandwidth are those of nccl-tests
(https://github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md): the size is that of the larger of input and output of a
rank, and busbw is algbw times a factor, so that it is the rate of a link at best, for any number of ranks.

The element i of rank r is (i + r) mod 3 before a check, so that a sum of 80 ranks is exact in every type.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ringdp.errors import SystemResourceError
from ringdp.job.byte_collectives import all_gather_single
from ringdp.text import format_size

# torch 2.13 gave it another name, and warns of the old one.
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

OPERATIONS = ("sum", "avg", "max", "min")
SENTINEL = 77
"""Fill outputs with this before a check, to detect elements that were not written."""


@dataclasses.dataclass(frozen=True)
class Place:
    """The ranks, tensors and arguments of a collective.

    Attributes:
        rank, ranks: this process and how many there are.
        dtype: of the elements.
        device: of the tensors.
        operation: the reduction, one of `OPERATIONS`.
        root: of rooted collectives.
    """

    rank: int
    ranks: int
    dtype: torch.dtype
    device: torch.device
    operation: str = "sum"
    root: int = 0

    def pattern(self, rank: int, begin: int, count: int) -> Tensor:
        """Elements `begin` to ``begin + count`` of a rank's input."""
        return ((torch.arange(begin, begin + count, device=self.device, dtype=torch.int64) + rank) % 3).to(self.dtype)

    def reduced(self, begin: int, count: int) -> Tensor:
        """The same of the reduction of all ranks' inputs; exact, but for an average."""
        index = torch.arange(begin, begin + count, device=self.device, dtype=torch.int64)
        every = torch.stack([(index + residue) % 3 for residue in range(3)])
        times = torch.tensor(
            [len(range(r, self.ranks, 3)) for r in range(3)], device=self.device, dtype=torch.int64
        ).unsqueeze(1)
        if self.operation in ("sum", "avg"):
            total = (every * times).sum(0)
            return (total.double() / self.ranks if self.operation == "avg" else total).to(self.dtype)
        there = every[: min(3, self.ranks)]
        return (there.amax(0) if self.operation == "max" else there.amin(0)).to(self.dtype)

    @property
    def reduce_op(self) -> Any:
        return getattr(dist.ReduceOp, self.operation.upper())

    def empty(self, count: int) -> Tensor:
        try:
            return torch.empty(count, dtype=self.dtype, device=self.device)
        except RuntimeError as error:
            size = format_size(count * self.dtype.itemsize)
            raise SystemResourceError(f"rank {self.rank} cannot get {size} of memory: leave such sizes out") from error


@dataclasses.dataclass
class Task:
    """One collective of one size on this rank.

    Attributes:
        count: elements, as nccl-tests counts them.
        size_bytes: of the larger of input and output.
        call: does it on a group.
        inputs: tensors that a call reads, each with the function that fills it for a check.
        expected: tensors that a call writes, each with the function that gives its right values; may be among `inputs`.
    """

    count: int
    size_bytes: int
    call: Callable[[dist.ProcessGroup], None]
    inputs: list[tuple[Tensor, Callable[[], Tensor]]]
    expected: list[tuple[Tensor, Callable[[], Tensor]]]

    def fill(self) -> None:
        """Fill inputs and outputs before a call whose result is checked."""
        for tensor, _ in self.expected:
            tensor.fill_(SENTINEL)
        for tensor, content in self.inputs:
            tensor.copy_(content())

    def rest(self) -> None:
        """Fill inputs before timed calls: zeros stay zeros, however often they are reduced."""
        for tensor, _ in (*self.inputs, *self.expected):
            tensor.zero_()

    def wrong(self) -> int:
        """Elements of this rank that are not what they have to be; an average may be one rounding off."""
        total = 0
        for tensor, content in self.expected:
            right = content()
            if tensor.is_floating_point():
                slack = torch.finfo(tensor.dtype).eps * right.double().abs()
                total += int(((tensor.double() - right.double()).abs() > slack).sum())
            else:
                total += int((tensor != right).sum())
        return total


class Collective(Protocol):
    """The methods of a class in this file."""

    reduces: bool
    rooted: bool

    def bus_factor(self, ranks: int) -> float:
        """busbw over algbw."""

    def task(self, size_bytes: int, place: Place) -> Task:
        """For about that size: a multiple of what it is cut into, at least one element each."""


def _share(ranks: int) -> float:
    return (ranks - 1) / ranks


def _count(size_bytes: int, place: Place, parts: int = 1) -> int:
    return max(1, size_bytes // place.dtype.itemsize // parts)


class AllReduce:
    """Each rank gets the sum."""

    reduces, rooted = True, False

    def bus_factor(self, ranks: int) -> float:
        return 2 * _share(ranks)

    def task(self, size_bytes: int, place: Place) -> Task:
        count = _count(size_bytes, place)
        x = place.empty(count)
        return Task(
            count,
            count * place.dtype.itemsize,
            lambda group: _done(dist.all_reduce(x, op=place.reduce_op, group=group)),
            [(x, lambda: place.pattern(place.rank, 0, count))],
            [(x, lambda: place.reduced(0, count))],
        )


class AllGather:
    """Each rank gets the inputs of all."""

    reduces, rooted = False, False

    def bus_factor(self, ranks: int) -> float:
        return _share(ranks)

    def task(self, size_bytes: int, place: Place) -> Task:
        count = _count(size_bytes, place, place.ranks)
        x, out = place.empty(count), place.empty(count * place.ranks)
        return Task(
            count,
            count * place.ranks * place.dtype.itemsize,
            lambda group: _done(all_gather_single(out, x, group=group)),
            [(x, lambda: place.pattern(place.rank, 0, count))],
            [(out, lambda: torch.cat([place.pattern(rank, 0, count) for rank in range(place.ranks)]))],
        )


class ReduceScatter:
    """Each rank gets a part of the sum."""

    reduces, rooted = True, False

    def bus_factor(self, ranks: int) -> float:
        return _share(ranks)

    def task(self, size_bytes: int, place: Place) -> Task:
        count = _count(size_bytes, place, place.ranks)
        x, out = place.empty(count * place.ranks), place.empty(count)
        return Task(
            count,
            count * place.ranks * place.dtype.itemsize,
            lambda group: _done(reduce_scatter_single(out, x, op=place.reduce_op, group=group)),
            [(x, lambda: place.pattern(place.rank, 0, count * place.ranks))],
            [(out, lambda: place.reduced(place.rank * count, count))],
        )


class Broadcast:
    """Each rank gets the root's input."""

    reduces, rooted = False, True

    def bus_factor(self, ranks: int) -> float:
        return 1.0

    def task(self, size_bytes: int, place: Place) -> Task:
        count = _count(size_bytes, place)
        x = place.empty(count)
        return Task(
            count,
            count * place.dtype.itemsize,
            lambda group: _done(dist.broadcast(x, place.root, group=group)),
            [(x, lambda: place.pattern(place.rank, 0, count))],
            [(x, lambda: place.pattern(place.root, 0, count))],
        )


class Reduce:
    """The root gets the sum."""

    reduces, rooted = True, True

    def bus_factor(self, ranks: int) -> float:
        return 1.0

    def task(self, size_bytes: int, place: Place) -> Task:
        count = _count(size_bytes, place)
        x = place.empty(count)
        return Task(
            count,
            count * place.dtype.itemsize,
            lambda group: _done(dist.reduce(x, place.root, op=place.reduce_op, group=group)),
            [(x, lambda: place.pattern(place.rank, 0, count))],
            [(x, lambda: place.reduced(0, count))] if place.rank == place.root else [],
        )


class Gather:
    """The root gets the inputs of all."""

    reduces, rooted = False, True

    def bus_factor(self, ranks: int) -> float:
        return _share(ranks)

    def task(self, size_bytes: int, place: Place) -> Task:
        count = _count(size_bytes, place, place.ranks)
        x = place.empty(count)
        outs = [place.empty(count) for _ in range(place.ranks)] if place.rank == place.root else None
        return Task(
            count,
            count * place.ranks * place.dtype.itemsize,
            lambda group: _done(dist.gather(x, outs, place.root, group=group)),
            [(x, lambda: place.pattern(place.rank, 0, count))],
            [(out, _later(place.pattern, rank, 0, count)) for rank, out in enumerate(outs or ())],
        )


class Scatter:
    """Each rank gets a part of the root's input."""

    reduces, rooted = False, True

    def bus_factor(self, ranks: int) -> float:
        return _share(ranks)

    def task(self, size_bytes: int, place: Place) -> Task:
        count = _count(size_bytes, place, place.ranks)
        out = place.empty(count)
        xs = [place.empty(count) for _ in range(place.ranks)] if place.rank == place.root else None
        return Task(
            count,
            count * place.ranks * place.dtype.itemsize,
            lambda group: _done(dist.scatter(out, xs, place.root, group=group)),
            [(x, _later(place.pattern, rank, 1, count)) for rank, x in enumerate(xs or ())],
            [(out, lambda: place.pattern(place.rank, 1, count))],
        )


class AllToAll:
    """Each rank gets a part of every rank's input."""

    reduces, rooted = False, False

    def bus_factor(self, ranks: int) -> float:
        return _share(ranks)

    def task(self, size_bytes: int, place: Place) -> Task:
        count, ranks = _count(size_bytes, place, place.ranks), place.ranks
        x, out = place.empty(count * ranks), place.empty(count * ranks)
        return Task(
            count,
            count * ranks * place.dtype.itemsize,
            lambda group: _done(dist.all_to_all_single(out, x, group=group)),
            [(x, lambda: place.pattern(place.rank, 0, count * ranks))],
            [(out, lambda: torch.cat([place.pattern(rank, place.rank * count, count) for rank in range(ranks)]))],
        )


class SendReceive:
    """Each rank sends to the next one and receives from the one before, at the same time."""

    reduces, rooted = False, False

    def bus_factor(self, ranks: int) -> float:
        return 1.0

    def task(self, size_bytes: int, place: Place) -> Task:
        count = _count(size_bytes, place)
        x, out = place.empty(count), place.empty(count)
        to, source = (place.rank + 1) % place.ranks, (place.rank - 1) % place.ranks

        def call(group: dist.ProcessGroup) -> None:
            if place.ranks == 1:
                out.copy_(x)
                return
            operations = [dist.P2POp(dist.isend, x, to, group), dist.P2POp(dist.irecv, out, source, group)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()

        return Task(
            count,
            count * place.dtype.itemsize,
            call,
            [(x, lambda: place.pattern(place.rank, 0, count))],
            [(out, lambda: place.pattern(source, 0, count))],
        )


class Barrier:
    """Each rank waits until all have come; it has no size."""

    reduces, rooted = False, False

    def bus_factor(self, ranks: int) -> float:
        return 0.0

    def task(self, size_bytes: int, place: Place) -> Task:
        return Task(0, 0, lambda group: _done(dist.barrier(group=group)), [], [])


def _later(function: Callable[..., Tensor], *arguments: int) -> Callable[[], Tensor]:
    return lambda: function(*arguments)


def _done(work: Any) -> None:
    """Collectives without async_op have ended when they return None."""
    if work is not None:
        work.wait()


COLLECTIVES: Mapping[str, Collective] = {
    "all_reduce": AllReduce(),
    "all_gather": AllGather(),
    "reduce_scatter": ReduceScatter(),
    "broadcast": Broadcast(),
    "reduce": Reduce(),
    "gather": Gather(),
    "scatter": Scatter(),
    "all_to_all": AllToAll(),
    "send_recv": SendReceive(),
    "barrier": Barrier(),
}
