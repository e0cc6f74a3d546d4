"""Buckets averaged as RingDP does it with a compressor that the core does not have: the hook's exchange, no backward.

The flat tensor is cut into parameters, and those into buckets, the last ones first, as RingDP fills them; all are given
to `ringdp.hooks.compressed` at once, whose threads average them. Before each call the tensor is this rank's gradient
again, so error feedback goes on as in training; that copy is not timed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.compression.exchanged_ranks import ExchangedRanks
from torch import Tensor

from ringdp import compression
from ringdp.hooks.compressed import CompressedHook

Shapes = Sequence[tuple[str, tuple[int, ...]]]
SIDE = 2048
FIRST_BYTES, MOST_BYTES = 1 << 20, 25 << 20  # of RingDP's buckets; each later one holds twice as much
CHECKED_NUMEL, LARGEST_ERROR = 300_000, 1e-9


class WrongMean(RuntimeError):
    """The exchange gave something else than its simulation; its times would mean nothing."""


def square_shapes(numel: int) -> Shapes:
    """Matrices of `SIDE` rows and columns, and one parameter with what is left."""
    whole, rest = divmod(numel, SIDE * SIDE)
    shapes: list[tuple[str, tuple[int, ...]]] = [(f"{k}.weight", (SIDE, SIDE)) for k in range(whole)]
    if rest:
        shapes.append(("rest.weight", (rest // SIDE, SIDE) if rest % SIDE == 0 else (1, rest)))
    return shapes


def model_shapes(name: str) -> Shapes:
    """The parameters of a model of models.py."""
    from benchmarks.lib import models

    return [(key, tuple(it.shape)) for key, it in models.make(name, rank=0).module.named_parameters()]


def model_gradient(name: str, rank: int) -> Tensor:
    """Of one batch, flat, float32 [numel]."""
    from benchmarks.lib import models

    task = models.make(name, rank=rank)
    task.loss(task.module, task.batch).backward()
    return torch.cat([it.grad.flatten() for it in task.module.parameters() if it.grad is not None])


def drawn_gradient(numel: int, rank: int) -> Tensor:
    """Half of the variance is the same on all ranks; rows of `SIDE` elements differ in size, as a model's do."""
    shared, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1 + rank)
    x = torch.randn(numel, generator=shared) + torch.randn(numel, generator=own)
    sizes = torch.randn(-(-numel // SIDE), generator=shared).exp()
    return x * sizes.repeat_interleave(SIDE)[:numel]


class Bucket:
    """What a hook asks of torch's GradBucket."""

    def __init__(self, index: int, parameters: list[Tensor], buffer: Tensor, last: bool) -> None:
        self._index, self._parameters, self._buffer, self._last = index, parameters, buffer, last

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last

    def buffer(self) -> Tensor:
        return self._buffer

    def parameters(self) -> list[Tensor]:
        return self._parameters

    def gradients(self) -> list[Tensor]:
        parts = self._buffer.split([it.numel() for it in self._parameters])
        return [part.view(it.shape) for part, it in zip(parts, self._parameters, strict=True)]


class Names:
    """What the hook asks of its `Parameters`."""

    def __init__(self, names: dict[int, str]) -> None:
        self._names = names

    def name(self, parameter: Tensor) -> str:
        return self._names[id(parameter)]


class Exchange:
    """Calls for one size: the parameters are meta tensors of `shapes`, in the order of the flat tensor."""

    def __init__(self, compressor: Any, shapes: Shapes, group: dist.ProcessGroup) -> None:
        self._parameters = [torch.empty(shape, device="meta") for _, shape in shapes]
        names = {id(it): name for it, (name, _) in zip(self._parameters, shapes, strict=True)}
        exact = exact_names(shapes)
        self._hook = CompressedHook(
            lambda name, _: None if name in exact else compressor,
            parameters=Names(names),  # type: ignore[arg-type]
            process_group=group,
        )
        self._members = buckets_of([4 * it.numel() for it in self._parameters])

    def __call__(self, x: Tensor) -> None:
        """Replace the flat `x` by the mean over the ranks."""
        parts = x.split([it.numel() for it in self._parameters])
        futures = []
        for index, members in enumerate(self._members):
            begin = parts[members[0]].storage_offset() - x.storage_offset()
            count = sum(parts[i].numel() for i in members)
            parameters = [self._parameters[i] for i in members]
            bucket = Bucket(index, parameters, x[begin : begin + count], index == len(self._members) - 1)
            futures.append(self._hook(bucket))  # type: ignore[arg-type]
        for future in futures:
            future.wait()


def buckets_of(sizes_bytes: Sequence[int]) -> list[list[int]]:
    """Which parameters leave together: from the last one on, each bucket's in their order."""
    buckets: list[list[int]] = []
    filled, cap = 0, 0
    for i in reversed(range(len(sizes_bytes))):
        if filled >= cap:
            cap = min(MOST_BYTES, max(FIRST_BYTES, 2 * cap))
            buckets.append([])
            filled = 0
        buckets[-1].insert(0, i)
        filled += sizes_bytes[i]
    return buckets


def exact_names(shapes: Shapes) -> set[str]:
    """What the rules leave exact: one dimension, or under 1,024 elements."""
    return {name for name, shape in shapes if len(shape) < 2 or math.prod(shape) < 1024}


def timed_exchange(exchange: Exchange, gradient: Tensor, x: Tensor, count: int) -> list[float]:
    """`count` calls on `x`, each beginning with `gradient`."""
    seconds = []
    for _ in range(count):
        x.copy_(gradient)
        dist.barrier()  # the copies do not end at the same moment
        start = perf_counter()
        exchange(x)
        seconds.append(perf_counter() - start)
    return seconds


def check_exchange(name: str, group: dist.ProcessGroup) -> None:
    """Raise WrongMean unless three steps of a small bucket give what the simulated exchange gives.

    To rounding: a ring adds exact parameters, and what travels as sums, in an order of its own.
    """
    one, rank, ranks = compression.get(name), group.rank(), group.size()
    shapes: Shapes = [("a", (300, 500)), ("b", (500,)), ("c", (CHECKED_NUMEL - 150_500, 1))]
    exchange = Exchange(one, shapes, group)
    simulated = ExchangedRanks(dict(shapes), one, ranks, exact=sorted(exact_names(shapes)))
    counts = [math.prod(shape) for _, shape in shapes]
    for step in range(3):
        gradients = [drawn_gradient(CHECKED_NUMEL, each + 100 * step) for each in range(ranks)]
        mine = gradients[rank].clone()
        exchange(mine)
        wanted = torch.cat([it.flatten() for it in simulated.average([it.split(counts) for it in gradients])])
        error = float((mine - wanted).square().sum() / wanted.square().sum())
        if not error <= LARGEST_ERROR:
            raise WrongMean(f"{name}: rank {rank} differs in step {step} from the simulation, NMSE {error:.2g}")
