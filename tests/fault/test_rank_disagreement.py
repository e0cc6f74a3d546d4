"""Ranks that do not do the same: whatever the two things are, every rank hears of it in the words of both sides."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from ringdp.errors import MismatchError, RingError
from tests.contract.core_ranks import core

SMALL, LARGE = 12, 400_000
BOUND_S = 3.0


def zeros(count: int, dtype: Any = np.float32) -> Any:
    return np.zeros(count, dtype)


# What a rank may do, and how messages call it. `n` is the size of the group.
CALLS: dict[str, Callable[[Any, int], Any]] = {
    "all_reduce(float32[12], SUM)": lambda group, n: group.all_reduce(zeros(SMALL), "float32"),
    "all_reduce(float32[12], MAX)": lambda group, n: group.all_reduce(zeros(SMALL), "float32", "MAX"),
    "all_reduce(int32[12], SUM)": lambda group, n: group.all_reduce(zeros(SMALL, np.int32), "int32"),
    "all_reduce(float32[13], SUM)": lambda group, n: group.all_reduce(zeros(SMALL + 1), "float32"),
    "all_reduce(float32[0], SUM)": lambda group, n: group.all_reduce(zeros(0), "float32"),
    "all_reduce(float32[400000], SUM)": lambda group, n: group.all_reduce(zeros(LARGE), "float32"),
    "all_reduce(float32[400001], SUM)": lambda group, n: group.all_reduce(zeros(LARGE + 1), "float32"),
    "all_reduce(float16[400000], SUM)": lambda group, n: group.all_reduce(zeros(LARGE, np.float16), "float16"),
    "broadcast(float32[12], root 0)": lambda group, n: group.broadcast(zeros(SMALL), "float32", 0),
    "broadcast(float32[12], root 1)": lambda group, n: group.broadcast(zeros(SMALL), "float32", 1),
    "broadcast(float32[400000], root 0)": lambda group, n: group.broadcast(zeros(LARGE), "float32", 0),
    "broadcast(float32[400000], root 1)": lambda group, n: group.broadcast(zeros(LARGE), "float32", 1),
    "all_gather(float32[12])": lambda group, n: group.all_gather(
        zeros(SMALL), [zeros(SMALL) for _ in range(n)], "float32"
    ),
    "all_gather(float32[400000])": lambda group, n: group.all_gather(
        zeros(LARGE), [zeros(LARGE) for _ in range(n)], "float32"
    ),
    "reduce_scatter(float32[12], SUM)": lambda group, n: group.reduce_scatter(
        [zeros(SMALL) for _ in range(n)], zeros(SMALL), "float32"
    ),
    "barrier": lambda group, n: group.barrier(),
}


def play(size: int, calls: list[str]) -> list[tuple[RingError | None, float]]:
    """What each rank gets from its call and from one that all agree on, and how long that took."""
    store, together = core.MemoryStore(), Barrier(size, timeout=30)

    def rank(me: int) -> tuple[RingError | None, float]:
        runtime = core.Runtime(store, me, size)
        group = core.Group(runtime, "all", list(range(size)), timeout_ms=10_000)
        group.barrier().wait()
        together.wait()  # who is still in the barrier when the group fails hears it there
        found, start = None, time.monotonic()
        try:
            CALLS[calls[me]](group, size).wait()
            group.all_reduce(zeros(3), "float32").wait()  # one that only sends may end before it hears of it
        except RingError as error:
            found = error
        took = time.monotonic() - start
        together.wait()  # a goodbye would be another reason to fail
        with pytest.raises(RingError) as later:
            group.barrier().wait()
        assert str(later.value) == str(found)
        group.close()
        runtime.shut_down()
        return found, took

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(rank, range(size)))


@pytest.mark.parametrize("size", (2, 3))
@pytest.mark.parametrize("first", CALLS)
def test_any_two_things_are_told_apart(size: int, first: str) -> None:
    for second in CALLS:
        if second == first:
            continue
        calls = [first] * size
        calls[1] = second
        for rank, (error, took) in enumerate(play(size, calls)):
            what = f"{calls} on rank {rank}"
            assert isinstance(error, MismatchError), f"{what}: {error}"
            assert first in str(error), what
            assert second in str(error), what
            assert "rank 1 (host " in str(error), what
            assert error.operation, what
            assert took < BOUND_S, what


@pytest.mark.parametrize("odd", range(4))
def test_whichever_rank_it_is(odd: int) -> None:
    for first, second in itertools.permutations(
        ("all_reduce(float32[400000], SUM)", "broadcast(float32[400000], root 1)", "broadcast(float32[12], root 0)"), 2
    ):
        calls = [first] * 4
        calls[odd] = second
        for error, took in play(4, calls):
            assert isinstance(error, MismatchError), f"{calls}: {error}"
            assert first in str(error)
            assert second in str(error)
            assert took < BOUND_S


def test_groups_beside_it_go_on() -> None:
    store, heard = core.MemoryStore(), Barrier(2, timeout=30)

    def rank(me: int) -> float:
        runtime = core.Runtime(store, me, 2)
        wrong = core.Group(runtime, "wrong", [0, 1])
        right = core.Group(runtime, "right", [0, 1])
        with pytest.raises(MismatchError):
            wrong.all_reduce(zeros(SMALL + me), "float32").wait()
        buffer = np.ones(LARGE, np.float32)
        right.all_reduce(buffer, "float32").wait()
        heard.wait()
        runtime.shut_down()
        return float(buffer[-1])

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(rank, range(2))) == [2.0, 2.0]
