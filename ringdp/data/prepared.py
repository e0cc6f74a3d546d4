"""A DataLoader of a script for one process, with this rank's part of its samples: what `ringdp.prepare` makes of it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from ringdp.data.follow import SETTINGS, divide_again
from ringdp.data.sampler import BalancedSampler
from ringdp.errors import InvalidArgumentError, InvalidStateError
from ringdp.job.agreement import Difference, checked_alike
from ringdp.job.byte_collectives import alone, require_member

_WHO = "ringdp.prepare"
Sample = TypeVar("Sample", covariant=True)


class PreparedLoader(DataLoader[Sample]):
    """The DataLoader that `ringdp.prepare` returns: the workers, collate function and all else of the given one, and a
    sampler for this rank.

    Each pass has another epoch: 0, 1, 2, …, or the one that `set_epoch`, or the script by the sampler's own, has set
    since the last pass. All ranks have the same number of batches where the sampler is torch's DistributedSampler.
    """

    def __init__(self, loader: DataLoader[Sample], part: Sampler[Any] | None) -> None:
        """`part`: a sampler in place of the loader's; None keeps that one, which is distributed itself."""
        given = copy.copy(loader)
        if part is not None:
            # A DataLoader refuses new samplers; making one anew would lose the arguments of a subclass.
            given.__dict__["sampler"] = part
            given.__dict__["batch_sampler"] = _batches(loader, part)
        given.__dict__["_iterator"] = None  # of persistent workers
        self.__dict__.update(given.__dict__)
        self._given = given
        self._divided = _divided(given)
        self._last_epoch: int | None = None
        self._taken = 0  # batches of this pass, or of the last one

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        if isinstance(self._divided, _Part):
            self._divided.follow_the_group()
        self._begin_epoch()
        self._taken = 0
        for batch in self._given:
            self._taken += 1
            yield batch

    def __len__(self) -> int:
        """Batches of this rank in a pass."""
        return len(self._given)

    def __getattr__(self, name: str) -> Any:
        if name == "_given":  # before __init__ has set it
            raise AttributeError(name)
        return getattr(self._given, name)

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next pass, for a job that goes on from a checkpoint."""
        self._last_epoch = None
        self._divided.set_epoch(epoch)

    def _begin_epoch(self) -> None:
        """Another epoch than that of the last pass, unless the script has set one. BalancedSampler counts by itself."""
        epoch = getattr(self._divided, "epoch", None)
        if isinstance(self._divided, BalancedSampler) or not isinstance(epoch, int):
            return
        if epoch == self._last_epoch:
            epoch += 1
            self._divided.set_epoch(epoch)
        self._last_epoch = epoch

    def described(self) -> list[str]:
        """What all ranks have to have alike, "name: value"."""
        part = self._divided
        if not isinstance(part, _Part):
            return [f"sampler: {type(part).__name__}"]
        size = getattr(self._given.batch_sampler, "batch_size", None)
        return [f"samples: {len(part.dataset)}", f"batch_size: {size}", *part.described()]  # type: ignore[arg-type]

    def rows_in_order(self, parts: Sequence[Tensor]) -> Tensor:
        """The ranks' rows, one for each sample of the batch or of all batches of this pass, in the order in which one
        process would have had the samples; those that were repeated to make the ranks even are left out.

        Args:
            parts: by rank, ``[samples, …]``.

        Raises:
            InvalidArgumentError: they have not as many rows as that; or nothing is known about the loader's sampler.
            InvalidStateError: no batch was taken yet, or a rank was lost since the pass began.
        """
        sampler, count = self._divided, len(parts)
        if isinstance(sampler, BalancedSampler):
            return torch.cat(list(parts))
        size = getattr(self._given.batch_sampler, "batch_size", None)
        if not isinstance(sampler, DistributedSampler) or not isinstance(size, int):
            raise InvalidArgumentError(
                f"ringdp.gather: what {type(sampler).__name__} repeats is not known: give no loader, and all ranks'"
                " values come in the order of the ranks"
            )
        if self._taken == 0 or sampler.num_replicas != count:
            raise InvalidStateError(
                "ringdp.gather: the loader has not given a batch yet"
                if self._taken == 0
                else f"ringdp.gather: the loader's pass began on {sampler.num_replicas} ranks, and {count} are left:"
                " begin the pass again"
            )
        first, end = (self._taken - 1) * size, min(self._taken * size, sampler.num_samples)
        rows = [len(part) for part in parts]
        if set(rows) == {end}:  # of all batches
            first = 0
        elif set(rows) != {end - first}:
            raise InvalidArgumentError(
                f"ringdp.gather: the ranks give {'/'.join(map(str, rows))} rows, and the batch has {end - first}"
                f" samples on each rank (the pass until now {end}): give a row for each sample, or no loader"
            )
        samples = sampler.total_size if sampler.drop_last else len(sampler.dataset)  # type: ignore[arg-type]
        return torch.stack(list(parts), dim=1).flatten(0, 1)[: max(samples - first * count, 0)]


class _Part(DistributedSampler[Any]):
    """torch's sampler for this rank of the group as it is when a pass begins: an elastic job may have lost ranks."""

    def __init__(self, loader: DataLoader[Any], shuffle: bool, seed: int) -> None:
        rank, ranks = _place()
        super().__init__(loader.dataset, ranks, rank, shuffle=shuffle, seed=seed, drop_last=_drops_last(loader))

    def described(self) -> list[str]:
        return [f"{name}: {getattr(self, name)}" for name in SETTINGS]

    def follow_the_group(self) -> None:
        if dist.is_available() and dist.is_initialized():
            divide_again(self, require_member(None, _WHO))


def prepared(loader: DataLoader[Any], seed: int) -> PreparedLoader[Any]:
    """See `ringdp.prepare`."""
    if isinstance(loader, PreparedLoader):
        return loader
    group = None if alone(_WHO) else require_member(None, _WHO)
    return checked_alike(
        lambda: _checked(loader, seed),
        PreparedLoader.described,
        group,
        operation=_WHO,
        what="loader",
        doing="prepare its DataLoader",
        words=_words,
    )


def _checked(loader: DataLoader[Any], seed: int) -> PreparedLoader[Any]:
    if isinstance(loader.dataset, IterableDataset):
        raise InvalidArgumentError(
            f"{_WHO}: {type(loader.dataset).__name__} is an IterableDataset, which alone can divide its samples among"
            " the ranks. Let its __iter__ give sample number i where i % ringdp.world_size() == ringdp.rank(), the"
            " same number of samples on all ranks, and use the DataLoader as it is"
        )
    if (divided := _divided(loader)) is not None:
        rank, ranks = _place()
        place = getattr(divided, "rank", rank), getattr(divided, "num_replicas", ranks)
        if place != (rank, ranks):
            raise InvalidArgumentError(
                f"{_WHO}: the loader's {type(divided).__name__} is for rank {place[0]} of {place[1]}, and this is rank"
                f" {rank} of {ranks}: make it after ringdp.init(), or leave it out"
            )
        return PreparedLoader(loader, None)
    batches, order = loader.batch_sampler, loader.sampler
    if batches is not None and type(batches) is BatchSampler:
        order = batches.sampler
    own_batches = batches is not None and type(batches) is not BatchSampler
    drawn = isinstance(order, RandomSampler) and (order.replacement or order._num_samples is not None)
    if own_batches or drawn or type(order) not in (RandomSampler, SequentialSampler):
        name = type(batches if own_batches else order).__name__
        raise InvalidArgumentError(
            f"{_WHO}: how the samples of {name} are to be divided among the ranks is not known. Give the DataLoader one"
            " for this rank (with the attributes rank and num_replicas, as DistributedSampler has them), a"
            " ringdp.data.BalancedSampler, or shuffle=True"
        )
    generator = getattr(order, "generator", None) or loader.generator
    if generator is not None:
        seed = generator.initial_seed()
    return PreparedLoader(loader, _Part(loader, isinstance(order, RandomSampler), seed))


def _divided(loader: DataLoader[Any]) -> Any:
    """The loader's sampler, or sampler of batches, that gives this rank's part alone; None where there is none."""
    candidates = loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None), loader.sampler
    for one in candidates:
        if isinstance(one, DistributedSampler | BalancedSampler) or (
            hasattr(one, "num_replicas") and hasattr(one, "rank")
        ):
            return one
    return None


def _drops_last(loader: DataLoader[Any]) -> bool:
    return bool(loader.drop_last or getattr(loader.batch_sampler, "drop_last", False))


def _batches(loader: DataLoader[Any], part: Sampler[Any]) -> BatchSampler | None:
    if loader.batch_sampler is None:  # batch_size=None: samples one by one
        return None
    return BatchSampler(part, loader.batch_sampler.batch_size, _drops_last(loader))  # type: ignore[attr-defined]


def _place() -> tuple[int, int]:
    """This rank and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def _words(difference: Difference, mine: str, theirs: str) -> str:
    return (
        f"{_WHO}: rank {difference.rank} has {mine} and rank {difference.peer} {theirs}. All ranks give the whole"
        " dataset with the same settings, and each gets its part of it"
    )
