"""Ranks that do not do the same: whatever the two things are, every rank hears of it in the words of both sides."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from ringdp.errors import MismatchError, RingError
from tests.contract.core_ranks import close_worlds, core, world

SMALL, LARGE = 12, 400_000
BOUND_S = 3.0


def zeros(count: int, dtype: Any = np.float32) -> Any:
    return np.zeros(count, dtype)


def blocks(n: int, count: int = SMALL) -> list[Any]:
    return [zeros(count) for _ in range(n)]


@contextmanager
def named(name: str) -> Iterator[None]:
    scope = core.NamedScope()
    scope.enter(name)
    try:
        yield
    finally:
        scope.exit()


def named_reduce(group: Any, name: str, count: int = SMALL) -> Any:
    with named(name):
        return group.all_reduce(zeros(count), "float32")


def compressed(group: Any, count: int, codec: str) -> Any:
    return group.all_reduce_compressed([zeros(count)], [0], codec)[0]


def gather(group: Any, n: int, root: int) -> Any:
    return group.gather(zeros(SMALL), blocks(n) if group.rank == root else [], "float32", root)


def scatter(group: Any, n: int, root: int) -> Any:
    return group.scatter(blocks(n) if group.rank == root else [], zeros(SMALL), "float32", root)


# What a rank may do, and how messages call it (of an all-to-all some give one pair's elements, some all of them).
# `n` is the size of the group.
CALLS: dict[str, Callable[[Any, int], Any]] = {
    "all_reduce(float32[12], SUM)": lambda group, n: group.all_reduce(zeros(SMALL), "float32"),
    "all_reduce(float32[12], MAX)": lambda group, n: group.all_reduce(zeros(SMALL), "float32", "MAX"),
    "all_reduce(int32[12], SUM)": lambda group, n: group.all_reduce(zeros(SMALL, np.int32), "int32"),
    "all_reduce(float32[13], SUM)": lambda group, n: group.all_reduce(zeros(SMALL + 1), "float32"),
    "all_reduce(float32[0], SUM)": lambda group, n: group.all_reduce(zeros(0), "float32"),
    "all_reduce(float32[400000], SUM)": lambda group, n: group.all_reduce(zeros(LARGE), "float32"),
    "all_reduce(float32[400001], SUM)": lambda group, n: group.all_reduce(zeros(LARGE + 1), "float32"),
    "all_reduce(float16[400000], SUM)": lambda group, n: group.all_reduce(zeros(LARGE, np.float16), "float16"),
    "all_reduce(float32[12], SUM) 'bucket 0: a'": lambda group, n: named_reduce(group, "bucket 0: a"),
    "all_reduce(float32[12], SUM) 'bucket 1: b'": lambda group, n: named_reduce(group, "bucket 1: b"),
    "all_reduce(float32[400000], SUM) 'bucket 2: c'": lambda group, n: named_reduce(group, "bucket 2: c", LARGE),
    "all_reduce(float32[12], AVG, int8)": lambda group, n: compressed(group, SMALL, "int8"),
    "all_reduce(float32[12], AVG, int4)": lambda group, n: compressed(group, SMALL, "int4"),
    "all_reduce(float32[400000], AVG, int8)": lambda group, n: compressed(group, LARGE, "int8"),
    "broadcast(float32[12], root 0)": lambda group, n: group.broadcast(zeros(SMALL), "float32", 0),
    "broadcast(float32[12], root 1)": lambda group, n: group.broadcast(zeros(SMALL), "float32", 1),
    "broadcast(float32[400000], root 0)": lambda group, n: group.broadcast(zeros(LARGE), "float32", 0),
    "broadcast(float32[400000], root 1)": lambda group, n: group.broadcast(zeros(LARGE), "float32", 1),
    "reduce(float32[12], SUM, root 0)": lambda group, n: group.reduce(zeros(SMALL), "float32", 0),
    "reduce(float32[12], SUM, root 1)": lambda group, n: group.reduce(zeros(SMALL), "float32", 1),
    "reduce(float32[400000], SUM, root 1)": lambda group, n: group.reduce(zeros(LARGE), "float32", 1),
    "gather(float32[12], root 0)": lambda group, n: gather(group, n, 0),
    "gather(float32[12], root 1)": lambda group, n: gather(group, n, 1),
    "scatter(float32[12], root 0)": lambda group, n: scatter(group, n, 0),
    "scatter(float32[12], root 1)": lambda group, n: scatter(group, n, 1),
    "all_gather(float32[12])": lambda group, n: group.all_gather(zeros(SMALL), blocks(n), "float32"),
    "all_gather(float32[400000])": lambda group, n: group.all_gather(zeros(LARGE), blocks(n, LARGE), "float32"),
    "reduce_scatter(float32[12], SUM)": lambda group, n: group.reduce_scatter(blocks(n), zeros(SMALL), "float32"),
    "all_to_all(float32": lambda group, n: group.all_to_all(blocks(n), blocks(n), "float32"),
    "barrier": lambda group, n: group.barrier(),
}

plays = itertools.count()


@pytest.fixture(scope="module", autouse=True)
def runtimes_end() -> Iterator[None]:
    yield
    close_worlds()


def play(size: int, calls: list[str]) -> list[tuple[RingError | None, float]]:
    """What each rank gets from its call and from one that all agree on, and how long that took."""
    together = Barrier(size, timeout=30)
    runtimes, name = world(size).runtimes, f"play {next(plays)}"

    def rank(me: int) -> tuple[RingError | None, float]:
        group = core.Group(runtimes[me], name, list(range(size)), timeout_ms=10_000)
        group.barrier().wait()
        together.wait()  # who is still in the barrier when the group fails hears it there
        found, start = None, time.monotonic()
        try:
            CALLS[calls[me]](group, size).wait()
            # One that only sends may end before it hears of it; by then a third rank may be through the next one, too.
            for _ in range(2):
                group.all_reduce(zeros(3), "float32").wait()
        except RingError as error:
            found = error
        took = time.monotonic() - start
        together.wait()
        with pytest.raises(RingError) as later:
            group.barrier().wait()
        assert str(later.value) == str(found)
        group.close()
        return found, took

    return world(size).each(rank)


def check(calls: list[str], odd: int) -> None:
    first, second = calls[odd - 1], calls[odd]
    for rank, (error, took) in enumerate(play(len(calls), calls)):
        what = f"{calls} on rank {rank}"
        assert isinstance(error, MismatchError), f"{what}: {error}"
        assert first in str(error), f"{what}: {error}"
        assert second in str(error), f"{what}: {error}"
        assert f"rank {odd} (host " in str(error), f"{what}: {error}"
        assert error.operation, what
        assert took < BOUND_S, what


def pairings() -> list[Any]:
    """All on two ranks; on three a quarter by default, the rest by marker."""
    on_three = [pytest.param(3, first, marks=[pytest.mark.slow] if i % 4 else []) for i, first in enumerate(CALLS)]
    return [*((2, first) for first in CALLS), *on_three]


@pytest.mark.parametrize(("size", "first"), pairings())
def test_any_two_things_are_told_apart(size: int, first: str) -> None:
    for second in CALLS:
        if second != first:
            calls = [first] * size
            calls[1] = second
            check(calls, 1)


@pytest.mark.parametrize("odd", range(4))
def test_whichever_rank_it_is(odd: int) -> None:
    for first, second in itertools.permutations(
        ("all_reduce(float32[400000], SUM)", "broadcast(float32[400000], root 1)", "broadcast(float32[12], root 0)"), 2
    ):
        calls = [first] * 4
        calls[odd] = second
        check(calls, odd)


def test_named_ones_in_swapped_order() -> None:
    """Both in flight at once: neither succeeds anywhere, and the error is about the first."""
    runtimes, together = world(3).runtimes, Barrier(3, timeout=30)

    def rank(me: int) -> None:
        group = core.Group(runtimes[me], "swapped", [0, 1, 2], timeout_ms=10_000)
        group.barrier().wait()
        together.wait()
        order = ("right", "left") if me == 2 else ("left", "right")
        works = [named_reduce(group, name, LARGE) for name in order]
        for work in works:
            with pytest.raises(MismatchError, match="operation #2: ") as caught:
                work.wait()
            assert "'left'" in str(caught.value)
            assert "'right'" in str(caught.value)
        together.wait()
        group.close()

    world(3).each(rank)


def test_one_call_too_few() -> None:
    """A rank that has left out a step is found where the next two differ."""
    runtimes, together = world(2).runtimes, Barrier(2, timeout=30)

    def run(group: Any, steps: list[int]) -> None:
        for step in steps:
            named_reduce(group, f"step {step}").wait()

    def rank(me: int) -> None:
        group = core.Group(runtimes[me], "steps", [0, 1], timeout_ms=10_000)
        group.barrier().wait()
        with pytest.raises(MismatchError) as caught:
            run(group, [0, 1, 3, 4] if me == 1 else [0, 1, 2, 3, 4])
        assert "operation #4: " in str(caught.value)
        assert "'step 2'" in str(caught.value)
        assert "'step 3'" in str(caught.value)
        together.wait()
        group.close()

    world(2).each(rank)


@pytest.mark.parametrize("count, dtype", ((13, np.float32), (12, np.int32), (LARGE, np.float32)))
def test_a_message_and_a_receiver_that_expects_another(count: int, dtype: Any) -> None:
    runtimes, together = world(2).runtimes, Barrier(2, timeout=30)

    def exchange(group: Any, me: int) -> None:
        if me == 1:
            return group.receive(zeros(count, dtype), np.dtype(dtype).name, 0).wait()
        group.send(zeros(SMALL), "float32", 1).wait()
        return group.barrier().wait()  # the sender of few bytes may be done before it hears of it

    def rank(me: int) -> None:
        group = core.Group(runtimes[me], f"message {count} {dtype}", [0, 1], timeout_ms=10_000)
        group.barrier().wait()
        together.wait()
        with pytest.raises(MismatchError) as caught:
            exchange(group, me)
        assert "float32[12]" in str(caught.value)
        assert f"{np.dtype(dtype).name}[{count}]" in str(caught.value)
        together.wait()
        group.close()

    world(2).each(rank)


def test_groups_beside_it_go_on() -> None:
    runtimes, heard = world(2).runtimes, Barrier(2, timeout=30)

    def rank(me: int) -> float:
        runtime = runtimes[me]
        wrong = core.Group(runtime, "wrong", [0, 1])
        right = core.Group(runtime, "right", [0, 1])
        with pytest.raises(MismatchError):
            wrong.all_reduce(zeros(SMALL + me), "float32").wait()
        buffer = np.ones(LARGE, np.float32)
        right.all_reduce(buffer, "float32").wait()
        heard.wait()
        return float(buffer[-1])

    assert world(2).each(rank) == [2.0, 2.0]
