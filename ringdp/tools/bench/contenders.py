"""The contenders for a collective: a backend of torch.distributed, or ring with a compressor."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ringdp.compression import Auto, Compressor
from ringdp.compression.exchange import BucketSlice, Coder, Layout, States
from ringdp.errors import InvalidArgumentError, RingError
from ringdp.hooks.exchange_runner import CodecSections, run_exchange
from ringdp.tools.bench.collectives import Collective, Place, Task

NAME = "bench"
SEED = 2_024


class NotSupported(Exception):
    """A contender cannot do that; the same on all ranks."""


@dataclasses.dataclass(frozen=True)
class Verified:
    """The result of a checked call.

    Attributes:
        wrong: elements of this rank that are not as they have to be.
        error: of a lossy contender, relative: ‖result − mean‖ / ‖mean‖; None for an exact one.
    """

    wrong: int
    error: float | None = None


class Work(Protocol):
    """One collective of one size by one contender. All ranks call the same methods in the same order."""

    @property
    def task(self) -> Task: ...

    def verify(self) -> Verified:
        """Do it once on known data and compare. Raises NotSupported."""

    def reset(self) -> None:
        """Before timed calls."""

    def call(self) -> None:
        """The timed call; `before` is called first, and is not timed."""

    def before(self) -> None: ...


class Contender(Protocol):
    """A column of the comparison."""

    name: str

    def work(self, collective: Collective, size_bytes: int, place: Place) -> Work:
        """Raises NotSupported where it cannot do that at all."""


class Plain:
    """A backend as it is."""

    def __init__(self, name: str, group: dist.ProcessGroup) -> None:
        self.name, self._group = name, group

    def work(self, collective: Collective, size_bytes: int, place: Place) -> Work:
        return PlainWork(collective.task(size_bytes, place), self._group, place.device)


class PlainWork:
    def __init__(self, task: Task, group: dist.ProcessGroup, device: torch.device) -> None:
        self.task, self._group, self._device = task, group, device

    def verify(self) -> Verified:
        self.task.fill()
        try:
            self.task.call(self._group)
        except RingError:
            raise
        except (RuntimeError, NotImplementedError, ValueError) as error:
            raise NotSupported(str(error).splitlines()[0]) from None
        _synchronise(self._device)
        return Verified(self.task.wrong())

    def reset(self) -> None:
        self.task.rest()

    def before(self) -> None:
        pass

    def call(self) -> None:
        self.task.call(self._group)
        _synchronise(self._device)


class Compressed:
    """The mean over all ranks by ring with a compressor: as RingDP averages one parameter of that size, once."""

    def __init__(self, name: str, compressor: Compressor, group: dist.ProcessGroup) -> None:
        self.name, self._compressor, self._group = f"ring+{name}", compressor, group

    def work(self, collective: Collective, size_bytes: int, place: Place) -> Work:
        if type(collective).__name__ != "AllReduce" or place.dtype != torch.float32:
            raise NotSupported("compressors average float32, by an all-reduce")
        return _CompressedWork(collective.task(size_bytes, place), self._compressor, self._group, place)


class _CompressedWork:
    """Normal numbers of another seed on each rank, new before each call: the mean of sparse codes would be sparse."""

    def __init__(self, task: Task, compressor: Compressor, group: dist.ProcessGroup, place: Place) -> None:
        self.task, self._group, self._place = task, group, place
        count = task.count
        columns = 1 << max(0, int(math.log2(max(1, math.isqrt(count)))))
        shape = (count // columns, columns) if count % columns == 0 else (count,)
        slice_ = BucketSlice(NAME, shape, 0, count, compressor)
        section = slice_.section(place.ranks, place.device)
        assert section is not None
        self._native = CodecSections([section], group, torch.float32) if CodecSections.serve(section) else None
        self._layout = Layout([slice_], place.ranks, place.device)
        self._input = _normal(place.rank, count, place.device)
        self._x = torch.empty_like(self._input)
        self._step = 0

    def verify(self) -> Verified:
        self.before()
        self.call()
        mean = sum(_normal(rank, self.task.count, self._place.device).double() for rank in range(self._place.ranks))
        assert isinstance(mean, Tensor)
        mean /= self._place.ranks
        error = float((self._x.double() - mean).norm() / mean.norm())
        wrong = 0 if _same_on_all_ranks(self._x, self._group) and math.isfinite(error) else self.task.count
        return Verified(wrong, error)

    def reset(self) -> None:
        pass

    def before(self) -> None:
        self._x.copy_(self._input)

    @torch.no_grad()
    def call(self) -> None:
        states, ranks = States(), self._place.ranks
        if ranks == 1:
            return
        if self._native is not None:
            self._native.average(self._x, self._group, states, 1.0, float(ranks))
        else:
            coder = Coder(states, self._place.rank, ranks, self._step, device=self._place.device)
            run_exchange(self._layout.average(self._x, coder, float(ranks)), self._group)
        self._step += 1
        _synchronise(self._place.device)


def _normal(rank: int, count: int, device: torch.device) -> Tensor:
    return torch.randn(
        count, generator=torch.Generator(device="cpu").manual_seed(SEED + rank), dtype=torch.float32, device="cpu"
    ).to(device)


def _same_on_all_ranks(x: Tensor, group: dist.ProcessGroup) -> bool:
    """By the bits: the largest and the smallest of two sums of them agree on all ranks."""
    bits = x.view(torch.int32).long()
    sums = torch.stack(
        [bits.sum(), (bits * torch.arange(1, bits.numel() + 1, device=x.device, dtype=torch.int64)).sum()]
    )
    least, most = sums.clone(), sums.clone()
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    return bool((least == most).all())


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def make(
    backends: Sequence[str], codecs: Sequence[str], *, resolve: Callable[[str], Compressor | None]
) -> list[Contender]:
    """All of them, in that order; every rank makes the same. ring is the default group. Raises InvalidArgumentError."""
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup)
    found: list[Contender] = []
    for name in backends:
        group = world if name == "ring" else dist.new_group(backend=name)
        assert isinstance(group, dist.ProcessGroup)
        found.append(Plain(name, group))
    for name in codecs:
        compressor = resolve(name)
        if compressor is None or isinstance(compressor, Auto):
            raise InvalidArgumentError(f"--codec {name}: it chooses among compressors; name those")
        found.append(Compressed(name, compressor, world))
    return found
