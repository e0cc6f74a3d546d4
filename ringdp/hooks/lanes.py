"""Threads that average buckets while backward goes on, each over a process group of its own.

Bucket k goes to lane k modulo their number, and a lane takes one at a time: every group sees the same operations in the
same order on all ranks, whatever the threads' timing. (Operations issued by callbacks on the caller's group would not
keep an order on gloo.) While one lane waits for the wire, the other encodes.
"""

from __future__ import annotations

import queue
import secrets
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringdp.backend import backend_of, timeout_of
from ringdp.exchange import all_gather_bytes
from ringdp.hooks.promise import Promise

Job = Callable[[dist.ProcessGroup], Tensor]
_NAME_BYTES = 32


class Lanes:
    """As many threads as there are lanes; made by all ranks of the group together.

    Args:
        group: whose ranks, backend and timeout the lanes' groups get.
        device: of the buckets.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, count: int = 2) -> None:
        self._queues: list[queue.SimpleQueue[Callable[[], object] | None]] = []
        self._device = device
        self._groups = _groups_like(group, device, count)
        for number in range(count):
            jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
            threading.Thread(target=_work, args=(jobs,), name=f"ringdp lane {number}", daemon=True).start()
            self._queues.append(jobs)
            weakref.finalize(self, jobs.put, None)

    def submit(self, number: int, job: Job) -> torch.futures.Future[Tensor]:
        """Complete with what `job` returns, or fail with what it raises."""
        lane = number % len(self._queues)
        promise = Promise(self._device)
        future = promise.future
        group = self._groups[lane]
        self._queues[lane].put(lambda: promise.keep(lambda: job(group)))
        return future


def _work(jobs: queue.SimpleQueue[Callable[[], object] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # holds the bucket


def _groups_like(group: dist.ProcessGroup, device: torch.device, count: int) -> list[dist.ProcessGroup]:
    """New groups of the same ranks, in the same order, for tensors on this kind of device.

    Their name is made by rank 0. ``torch.distributed.new_group`` would take it from how many groups this process is in,
    which is another number on a rank that is in a group without the others.
    """
    name = all_gather_bytes(secrets.token_hex(_NAME_BYTES // 2).encode(), group, room=_NAME_BYTES, device=device)[0]
    return [_group_like(group, device, f"ringdp compression {name.decode()} {lane}") for lane in range(count)]


def _group_like(group: dist.ProcessGroup, device: torch.device, name: str) -> dist.ProcessGroup:
    torchs: Any = dist.distributed_c10d  # only its own functions take a name
    ranks = dist.get_process_group_ranks(group)
    backend = backend_of(group, device.type)
    made, _ = torchs._new_process_group_helper(
        len(ranks),
        group.rank(),
        ranks,
        dist.Backend(f"{device.type}:{backend}"),
        torchs._get_default_store(),
        name,
        timeout=timeout_of(group, device.type) or torchs._get_default_timeout(backend),
        group_desc="ringdp compression",
    )
    torchs._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(ranks)}
    assert isinstance(made, dist.ProcessGroup)
    return made
