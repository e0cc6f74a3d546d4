"""Threads that average buckets: what they raise comes out of futures, and a thread that ends leaves none behind."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from ringdp.errors import InvalidStateError, SystemResourceError
from ringdp.hooks import comm_threads, futures
from ringdp.hooks.futures import Promise

CPU = torch.device("cpu")


class Group:
    """As much of a process group as a thread looks at while nothing is sent."""

    def rank(self) -> int:
        return 3


class Mine(BaseException):
    pass


def job(thread: comm_threads._CommThread, make: Any) -> torch.futures.Future[Tensor]:
    made = Promise(CPU)
    future = made.future
    thread.do(made, make)
    return future


def raises(error: BaseException) -> Any:
    def make() -> Tensor:
        raise error

    return make


@pytest.fixture
def thread() -> Any:
    made = comm_threads._CommThread(0, Group(), CPU)  # type: ignore[arg-type]
    yield made
    made.end()
    assert made.ends_within(5)


@pytest.mark.parametrize("error", [SystemExit(7), KeyboardInterrupt(), GeneratorExit(), Mine("mine"), StopIteration(1)])
def test_whatever_a_job_raises_comes_out_and_the_next_one_is_done(
    thread: comm_threads._CommThread, error: BaseException
) -> None:
    with pytest.raises(type(error)) as caught:
        job(thread, raises(error)).wait()
    assert caught.value is error
    assert job(thread, lambda: torch.ones(2)).wait().tolist() == [1, 1]


def test_a_lane_that_dies_fails_what_is_queued_and_what_comes(
    thread: comm_threads._CommThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def waits() -> Tensor:
        begun.set()
        assert go_on.wait(5)
        raise ValueError("mine")

    first = job(thread, waits)
    assert begun.wait(5)
    queued = [job(thread, lambda: torch.ones(1)) for _ in range(2)]
    fail, calls = futures._fail, []

    def without_memory(future: Any, error: BaseException) -> None:
        calls.append(error)
        if len(calls) == 1:
            raise MemoryError("none left")
        fail(future, error)

    monkeypatch.setattr(futures, "_fail", without_memory)
    go_on.set()
    assert thread.ends_within(5)
    for future in (first, *queued):
        assert future.done()
        with pytest.raises(MemoryError, match="none left"):
            future.wait()
    with pytest.raises(MemoryError, match="none left"):
        job(thread, lambda: torch.ones(1)).wait()


def test_closed_it_does_nothing_any_more(thread: comm_threads._CommThread) -> None:
    thread.fail_queued(InvalidStateError("this process ends"))
    with pytest.raises(InvalidStateError, match="this process ends"):
        job(thread, lambda: torch.ones(1)).wait()


def test_a_thread_that_cannot_start_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(SystemResourceError, match=r"no thread can be started.*ulimit -u") as caught:
        comm_threads._CommThread(0, Group(), CPU)  # type: ignore[arg-type]
    assert caught.value.rank == 3
