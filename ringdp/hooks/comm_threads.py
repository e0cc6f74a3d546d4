"""Threads that average buckets while backward goes on, each over a process group of its own.

Bucket k goes to thread k modulo the number of threads, and a thread takes one bucket at a time: every group sees the
same operations in the same order on all ranks, whatever the threads' timing. (Operations that callbacks issue on the
caller's group would not keep an order on gloo.) While one thread waits for the wire, the other encodes. Each thread has
a stream of its own on a GPU.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ringdp.errors import InvalidStateError
from ringdp.hooks.futures import Promise
from ringdp.job.backend import cut_off
from ringdp.job.sibling_group import sibling_groups
from ringdp.job.threads import end_before_groups, start_thread

Job = Callable[[dist.ProcessGroup], Tensor]
_MOMENT_S = 0.2  # for what a thread is doing when the process ends
_LONGEST_END_S = 1.0  # for a thread whose group has ended


class CommThreads:
    """As many threads as there are threads; made by all ranks of the group together.

    Args:
        group: whose ranks, backend and timeout those groups get.
        device: of the buckets.

    Raises:
        SystemResourceError: this process may not start another thread.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, count: int = 2) -> None:
        self._device = device
        self._threads: list[_CommThread] = []
        for number, own in enumerate(sibling_groups(group, device, count, purpose="compression")):
            thread = _CommThread(number, own, device)
            weakref.finalize(self, thread.end).atexit = False
            self._threads.append(thread)
        _alive.add(self)
        end_before_groups(_end_all)

    def submit(self, number: int, job: Job) -> torch.futures.Future[Tensor]:
        """Run `job` on a thread: the future completes with its result, or fails with its exception.

        On a GPU the job is ordered after what is queued on the caller's current stream.
        """
        thread = self._threads[number % len(self._threads)]
        promise = Promise(self._device)
        future = promise.future
        called = torch.cuda.current_stream(self._device).record_event() if self._device.type == "cuda" else None

        def run() -> Tensor:
            if called is not None:
                called.wait()  # the thread's stream does
            return job(thread.group)

        thread.do(promise, run)
        return future

    def close(self) -> None:
        """End the threads: queued jobs fail, running ones get a moment, and then their groups end."""
        for thread in self._threads:
            thread.fail_queued(InvalidStateError("this process ends before a bucket was averaged"))
            thread.end()
        busy = [thread for thread in self._threads if not thread.ends_within(_MOMENT_S)]
        for thread in busy:
            cut_off(thread.group)
        for thread in busy:
            thread.ends_within(_LONGEST_END_S)


class _CommThread:
    """A thread, its queue, and the group and stream that it alone uses."""

    def __init__(self, number: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group = group
        self._jobs = _Jobs()
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = threading.Thread(
            target=_work, args=(self._jobs, stream), name=f"ringdp hook {number}", daemon=True
        )
        start_thread(self._thread, "no thread can be started to average compressed gradients", rank=group.rank())

    def do(self, promise: Promise, make: Callable[[], Tensor]) -> None:
        self._jobs.put(promise, make)

    def end(self) -> None:
        """Wait until the queued jobs are done."""
        self._jobs.end()

    def fail_queued(self, error: BaseException) -> None:
        self._jobs.close(error)

    def ends_within(self, timeout_s: float) -> bool:
        """Whether the thread has ended by then."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


class _Jobs:
    """The jobs of a thread, in order. Once closed, queued and later jobs fail."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Promise, Callable[[], Tensor]] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None

    def put(self, promise: Promise, make: Callable[[], Tensor]) -> None:
        self._queue.put((promise, make))
        self._fail_if_closed()

    def get(self) -> tuple[Promise, Callable[[], Tensor]] | None:
        """The next job; None at the end."""
        return self._queue.get()

    def end(self) -> None:
        self._queue.put(None)

    def close(self, error: BaseException) -> None:
        self._error = error
        self._fail_if_closed()

    def _fail_if_closed(self) -> None:
        if self._error is None:
            return
        with contextlib.suppress(queue.Empty):
            while True:
                if (job := self._queue.get_nowait()) is not None:
                    job[0].fail(self._error)


def _work(jobs: _Jobs, stream: torch.cuda.Stream | None) -> None:
    with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
        while (job := jobs.get()) is not None:
            promise, make = job
            try:
                promise.keep(make)
            except BaseException as error:  # of the promise itself: memory may have run out
                jobs.close(error)
                promise.fail(error)
                return
            del job, promise, make  # hold the bucket


_alive: weakref.WeakSet[CommThreads] = weakref.WeakSet()


def _end_all() -> None:
    for threads in list(_alive):
        threads.close()
