"""What `tests.core._core` refuses before anything reaches another rank, and how groups and runtimes end."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringdp.errors import InvalidArgumentError, InvalidStateError, PeerLostError
from tests.contract.core_ranks import World, core


@pytest.fixture
def alone() -> Iterator[Any]:
    runtime = core.Runtime(core.MemoryStore(), 0, 1)
    yield core.Group(runtime, "alone", [0])
    runtime.shut_down()


def floats(count: int = 4) -> Any:
    return np.ones(count, np.float32)


def odd_bytes() -> Any:
    return np.zeros(7, np.uint8)


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no such type": (lambda group: group.all_reduce(floats(), "float33"), "float33"),
    "no such reduction": (lambda group: group.all_reduce(floats(), "float32", "MEAN"), "MEAN"),
    "no such pair": (lambda group: group.all_reduce(floats(), "float32", "BAND"), "BAND is not defined for float32"),
    "no such pair here": (lambda group: group.reduce_scatter([floats()], floats(), "float32", "BOR"), "BOR"),
    "half an element": (lambda group: group.all_reduce(odd_bytes(), "float32"), "7 bytes"),
    "half an element to all": (lambda group: group.broadcast(odd_bytes(), "float16", 0), "7 bytes"),
    "half an element from all": (lambda group: group.all_gather(odd_bytes(), [odd_bytes()], "int32"), "7 bytes"),
    "half an element left": (lambda group: group.reduce_scatter([odd_bytes()], odd_bytes(), "int64"), "7 bytes"),
    "root beyond": (lambda group: group.broadcast(floats(), "float32", 1), "root 1"),
    "root below": (lambda group: group.broadcast(floats(), "float32", -1), "root -1"),
    "too many outputs": (lambda group: group.all_gather(floats(), [floats(), floats()], "float32"), "outputs: 2 for 1"),
    "too few inputs": (lambda group: group.reduce_scatter([], floats(), "float32"), "inputs: 0 for 1"),
    "an output of another size": (lambda group: group.all_gather(floats(), [floats(5)], "float32"), "20 bytes"),
    "an input of another size": (lambda group: group.reduce_scatter([floats(5)], floats(), "float32"), "20"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_arguments_that_cannot_be_used(alone: Any, what: str) -> None:
    call, words = REFUSED[what]
    with pytest.raises(InvalidArgumentError, match=words):
        call(alone)
    alone.barrier().wait()  # it is as it was


def test_buffers_that_cannot_be_written_or_are_not_flat(alone: Any) -> None:
    with pytest.raises(BufferError):
        alone.all_reduce(b"1234", "float32")
    with pytest.raises((BufferError, ValueError)):
        alone.all_reduce(np.zeros((4, 4), np.float32)[:, ::2], "float32")


@pytest.mark.parametrize(
    ("members", "words"),
    (
        ([1], "is out of range: the job has 1 rank"),
        ([0, -1], "is out of range: the job has 1 rank"),
        ([0, 0], "twice"),
        ([], "not a member"),
    ),
)
def test_groups_that_cannot_be(members: list[int], words: str) -> None:
    runtime = core.Runtime(core.MemoryStore(), 0, 1)
    with pytest.raises(InvalidArgumentError, match=words):
        core.Group(runtime, "it", members)
    with pytest.raises(InvalidArgumentError, match="'no_such_limit'"):
        core.Group(runtime, "it", [0], table={"no_such_limit": 1})
    runtime.shut_down()


@pytest.mark.parametrize(("rank", "world"), ((2, 2), (-1, 2), (0, 0), (5, 1)))
def test_ranks_that_cannot_be(rank: int, world: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"rank {rank} of {world}"):
        core.Runtime(core.MemoryStore(), rank, world, timeout_ms=100)


def test_use_after_the_end(alone: Any) -> None:
    runtime = core.Runtime(core.MemoryStore(), 0, 1)
    group = core.Group(runtime, "it", [0])
    group.close()
    group.close()
    with pytest.raises(InvalidStateError, match="destroyed"):
        group.barrier()
    other = core.Group(runtime, "other", [0])
    runtime.shut_down()
    runtime.shut_down()
    for use in (other.barrier, lambda: core.Group(runtime, "late", [0])):
        with pytest.raises(InvalidStateError, match="shut down"):
            use()


def test_threads_and_descriptors_end_with_the_runtime() -> None:
    def found() -> tuple[list[str], int]:
        threads = []
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # one of an earlier test that has just ended
                threads.append((task / "comm").read_text().strip())
        return sorted(name for name in threads if name.startswith("ringdp")), len(os.listdir("/proc/self/fd"))

    before = found()
    world = World(3)
    world.run(lambda rank, group: group.all_reduce(floats(100_000), "float32").wait())
    threads, descriptors = found()
    assert len(threads) == len(before[0]) + 6
    assert descriptors > before[1]
    works = world.run(lambda rank, group: group.all_reduce(floats(), "float32"))
    world.close()
    assert found() == before  # although somebody holds works
    del works


def test_a_runtime_that_is_let_go_says_goodbye() -> None:
    """Without shut_down: the last reference ends it, and who still waits for it hears of it."""
    store = core.MemoryStore()
    made: list[Any] = [None, None]

    def meet(rank: int) -> None:
        made[rank] = core.Runtime(store, rank, 2)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    group = core.Group(made[0], "both", [0, 1])
    work = group.all_reduce(floats(), "float32")
    made[1] = None
    with pytest.raises(PeerLostError, match=r"rank 1 .*left the job"):
        work.wait(5_000)
    made[0].shut_down()


def test_bytes_are_counted() -> None:
    world = World(2)
    before = [(runtime.bytes_sent(), runtime.bytes_received()) for runtime in world.runtimes]
    world.run(lambda rank, group: group.all_reduce(floats(1_000_000), "float32").wait())
    for runtime, (sent, received) in zip(world.runtimes, before, strict=True):
        for moved in (runtime.bytes_sent() - sent, runtime.bytes_received() - received):
            assert 4_000_000 <= moved < 1.01 * 4_000_000  # 2(n-1)/n of the buffer, and headers
    world.close()


def test_the_isa_has_a_name() -> None:
    assert core.isa() in ("scalar", "avx2", "avx512")
