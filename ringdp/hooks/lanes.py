"""Threads that average buckets while backward goes on, each over a process group of its own.

Bucket k goes to lane k modulo their number, and a lane takes one at a time: every group sees the same operations in the
same order on all ranks, whatever the threads' timing. (Operations issued by callbacks on the caller's group would not
keep an order on gloo.) While one lane waits for the wire, the other encodes.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ringdp.backend import timeout_of

Job = Callable[[dist.ProcessGroup], Tensor]


class Lanes:
    """As many threads as there are lanes; made by all ranks of the group together.

    Args:
        group: whose ranks, backend and timeout the lanes' groups get.
        device: of the buckets.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, count: int = 2) -> None:
        self._queues: list[queue.SimpleQueue[Callable[[], None] | None]] = []
        self._groups = [_group_like(group, device) for _ in range(count)]
        for number in range(count):
            jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
            threading.Thread(target=_work, args=(jobs,), name=f"ringdp lane {number}", daemon=True).start()
            self._queues.append(jobs)
            weakref.finalize(self, jobs.put, None)

    def submit(self, number: int, job: Job) -> torch.futures.Future[Tensor]:
        """Complete with what `job` returns, or fail with what it raises."""
        lane = number % len(self._queues)
        promise = Promise()
        group = self._groups[lane]
        self._queues[lane].put(lambda: promise.keep(lambda: job(group)))
        return promise.future


class Promise:
    """A future that can also fail: torch's ``set_exception`` does not reach C++."""

    def __init__(self, devices: list[torch.device] | None = None) -> None:
        self._result: torch.futures.Future[Tensor | None] = torch.futures.Future(devices=devices)  # type: ignore[arg-type]
        self._error: Exception | None = None
        self.future: torch.futures.Future[Tensor] = self._result.then(self._unwrap)

    def keep(self, make: Callable[[], Tensor]) -> None:
        result = None
        try:
            result = make()
        except Exception as error:
            self._error = error
        self._result.set_result(result)

    def _unwrap(self, future: torch.futures.Future[Tensor | None]) -> Tensor:
        if self._error is not None:
            raise self._error
        result = future.value()
        assert result is not None
        return result


def _work(jobs: queue.SimpleQueue[Callable[[], None] | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job  # holds the bucket


def _group_like(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    made = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=timeout_of(group, device.type),
        backend=dist.get_backend_config(group),
        use_local_synchronization=True,
        group_desc="ringdp compression",
    )
    assert isinstance(made, dist.ProcessGroup)
    return made
