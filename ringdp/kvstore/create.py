"""`create`: the kinds of stores by their names."""

from __future__ import annotations

from typing import Literal, overload

import torch.distributed as dist

from ringdp import values
from ringdp.config.environments import launched_with_servers
from ringdp.errors import InvalidArgumentError
from ringdp.job import process_group
from ringdp.job.byte_collectives import alone, require_member
from ringdp.kvstore.async_store import AsyncStore
from ringdp.kvstore.service import Members
from ringdp.kvstore.store import KVStore

_ALONE = ("local", "device")
_OF_ALL_RANKS = ("dist_sync", "dist_device_sync", "dist", "dist_sync_device", "nccl", "ring")
_ASYNCHRONOUS = ("dist_async", "dist_device_async")


@overload
def create(
    name: Literal["dist_async", "dist_device_async"],
    *,
    reduce: str = ...,
    staleness: int | None = ...,
    servers: int = ...,
    compensation: bool = ...,
    group: dist.ProcessGroup | None = ...,
) -> AsyncStore: ...


@overload
def create(
    name: str = ...,
    *,
    reduce: str = ...,
    staleness: int | None = ...,
    servers: int = ...,
    compensation: bool = ...,
    group: dist.ProcessGroup | None = ...,
) -> KVStore: ...


def create(
    name: str = "dist_sync",
    *,
    reduce: str = "sum",
    staleness: int | None = None,
    servers: int = 0,
    compensation: bool = False,
    group: dist.ProcessGroup | None = None,
) -> KVStore:
    """A key-value store; all ranks of the group make theirs alike.

    Args:
        name: ``local`` or ``device``: of this process alone. ``dist_sync``, ``dist_device_sync`` or ``nccl``: of all
            ranks of the job, over any backend. ``dist_async``: of all ranks, each at its own pace, over ring: an
            `AsyncStore`.
        reduce: ``sum`` adds the ranks' pushes, as MXNet does; ``mean`` averages them, as DDP does, so that in
            ``dist_async`` each push counts 1 over the number of workers.
        staleness: of ``dist_async``: by how many calls of `step` a worker may be ahead of the slowest one; None: by any
            number, and no worker waits.
        servers: of ``dist_async``: so many ranks, the last ones, own all values and do nothing else; 0: all own a part.
            Before `ringdp.init`, in a process that MXNet's scripts started, those of ``DMLC_NUM_SERVER``, which join.
        compensation: of ``dist_async``: an update's rate is divided by 1 + the number of updates of other workers since
            its worker pulled (Zhang et al., Staleness-aware Async-SGD for Distributed Deep Learning, IJCAI 2016).
        group: whose ranks; the default group if None.

    Raises:
        InvalidArgumentError: a name that is not known, or another value that cannot be used.
        InvalidStateError: before `ringdp.init` in a job of several ranks, or this process is not in ``group``, or
            ``dist_async`` over another backend.
    """
    if name not in (*_ALONE, *_OF_ALL_RANKS, *_ASYNCHRONOUS):
        raise InvalidArgumentError(
            f"unknown store {name!r}: the stores are {', '.join((*_ALONE, *_OF_ALL_RANKS, *_ASYNCHRONOUS))}"
        )
    if reduce not in ("sum", "mean"):
        raise InvalidArgumentError(f'reduce must be "sum" or "mean", not {reduce!r}')
    if name in _ASYNCHRONOUS:
        return _create_asynchronous(reduce, staleness, servers, compensation, group)
    if staleness is not None or servers or compensation:
        raise InvalidArgumentError(f"staleness, servers and compensation are of dist_async, not of {name}")
    if name in _ALONE or (group is None and alone("ringdp.kvstore.create")):
        return KVStore(name, None, reduce)
    return KVStore(name, require_member(group, "ringdp.kvstore.create"), reduce)


def _create_asynchronous(
    reduce: str, staleness: int | None, servers: int, compensation: bool, group: dist.ProcessGroup | None
) -> AsyncStore:
    started = _join_servers() if group is None else 0
    alike = None if group is None and alone("ringdp.kvstore.create") else require_member(group, "ringdp.kvstore.create")
    if staleness is not None:
        values.whole("create", "staleness", staleness, 0)
    values.whole("create", "servers", servers, 0, (1 if alike is None else alike.size()) - 1)
    values.flag("create", "compensation", compensation)
    if compensation and staleness == 0:
        raise InvalidArgumentError("compensation is for late updates, and with staleness=0 there are none")
    if started and servers not in (0, started):
        raise InvalidArgumentError(f"create: servers={servers}, and DMLC_NUM_SERVER={started}: leave out one of them")
    members = Members.of(alike, started or servers, lets_end=started > 0)
    return AsyncStore(members, reduce, staleness, compensation)


def _join_servers() -> int:
    """Of a process that MXNet's scripts started and that has not joined: join with the servers. Returns how many."""
    if dist.is_initialized() or (launched := launched_with_servers()) is None:
        return 0
    place, servers = launched
    if place.rank < place.world_size - servers:
        process_group.init(rank=place.rank, world_size=place.world_size, init_method=place.init_method)
    else:
        process_group.join_behind(place)
    return servers
