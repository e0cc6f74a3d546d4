"""Small collectives in groups of many ranks: the tree's order to the bit, who talks to whom, and who hears of trouble.

A group counts as large above `direct_ranks` members. Most tests set that to 2, so that a few ranks are many.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from ringdp.errors import MismatchError, RingError
from tests.contract.core_checks import (
    BOUND_S,
    Case,
    check_all_gather,
    check_all_reduce,
    check_broadcast,
    check_reduce,
    check_that_all_hear_who_leaves,
)
from tests.contract.core_ranks import ALWAYS_SMALL, BUILT_IN, MANY, World, close_worlds, core, world
from tests.contract.reduction_order import Array, in_rank_order, in_ring_order, in_tree_order, narrow, random_input

ALWAYS_TREE = {**ALWAYS_SMALL, **MANY}


@pytest.fixture(scope="module", autouse=True)
def _end_worlds() -> Iterator[None]:
    yield
    close_worlds()


# ---- Bits ----


def test_the_order_shows_in_the_bits() -> None:
    """The oracle tells the tree from the other orders, and roots from each other."""
    inputs = [random_input("float32", "SUM", 1000, (rank, 4)) for rank in range(5)]
    found = [in_rank_order(inputs, "float32", "SUM"), in_ring_order(inputs, "float32", "SUM")]
    found += [in_tree_order(inputs, "float32", "SUM", root) for root in range(5)]
    assert len({x.tobytes() for x in found}) == len(found)
    halves = [narrow(np.array([x]), "float16") for x in (2048.0, 1.0, 1.0, 1.0, 1.0)]
    assert in_tree_order(halves, "float16", "SUM")[0] == 2052.0  # rounded once, not on the way up


@pytest.mark.parametrize("dtype", ("float32", "float16"))
def test_a_watched_one_finds_what_is_not_finite(dtype: str) -> None:
    ranks = world(7)
    for culprit in range(7):
        buffers = [narrow(np.ones(300), dtype) for _ in range(7)]
        buffers[culprit][100 + culprit] = np.inf

        def body(rank: int, group: Any, buffers: list[Array] = buffers) -> Any:
            work, report = group.all_reduce_watched(buffers[rank].view(np.uint8), dtype)
            work.wait()
            return report.finite, report.own

        found = ranks.run(body, ALWAYS_TREE)
        assert found == [(False, (0, 100 + culprit) if rank == culprit else None) for rank in range(7)]


def test_what_one_writes_the_next_one_reads() -> None:
    size = 6
    buffers = [np.full(500, float(rank + 1), np.float32) for rank in range(size)]

    def body(rank: int, group: Any) -> None:
        mine = buffers[rank]
        works = [group.reduce(mine, "float32", 2), group.broadcast(mine, "float32", 2)]
        works += [group.all_reduce(mine, "float32", "AVG"), group.broadcast(mine, "float32", 5)]
        for work in works:
            work.wait()

    world(size).run(body, MANY)
    assert all(set(mine.tolist()) == {21.0} for mine in buffers)


# ---- Who talks to whom ----


def partners(size: int) -> list[set[int]]:
    """Those at ±2^k from each rank."""
    steps = [1 << k for k in range(size.bit_length()) if 1 << k < size]
    return [{(rank + sign * step) % size for step in steps for sign in (1, -1)} for rank in range(size)]


def sent(ranks: World) -> list[list[int]]:
    return [[runtime.bytes_sent_to(peer) for peer in range(ranks.size)] for runtime in ranks.runtimes]


@pytest.mark.parametrize("size", (17, 20))
def test_many_ranks_use_few_pairs(size: int) -> None:
    """With the built-in table, above 16 ranks, and whatever the root."""
    ranks = world(size)
    before = sent(ranks)
    cases = [
        Case(dtype, "SUM", count, seed=root)
        for root, count in ((0, 1), (5, 300), (size - 1, 0))
        for dtype in ("float32", "bfloat16")
    ]
    check_all_reduce(ranks, BUILT_IN, cases)
    check_reduce(ranks, BUILT_IN, cases)
    check_broadcast(ranks, BUILT_IN, cases)
    check_all_gather(ranks, BUILT_IN, cases)
    ranks.run(lambda _, group: group.barrier().wait())
    used = [[after > start for after, start in zip(*row, strict=True)] for row in zip(sent(ranks), before, strict=True)]
    for rank, (row, allowed) in enumerate(zip(used, partners(size), strict=True)):
        assert {peer for peer, told in enumerate(row) if told} <= allowed, f"rank {rank} of {size}"


def test_up_to_sixteen_ranks_go_straight_to_everybody() -> None:
    ranks = world(16)
    before = sent(ranks)
    check_all_reduce(ranks, BUILT_IN, [Case("float32", "SUM", 100, 1)])
    used = np.array(sent(ranks)) > np.array(before)
    assert (used == ~np.eye(16, dtype=bool)).all()


def test_the_choice() -> None:
    def taken(size: int, bytes_: int, **table: int) -> str:
        return str(core.all_reduce_algorithm(size, "float32", bytes_, table=table))

    assert [taken(16, 1024), taken(17, 1024), taken(17, 1028)] == ["fold", "tree", "halving"]
    assert [taken(17, 1024, direct_ranks=17), taken(16, 1024, direct_ranks=15)] == ["fold", "tree"]
    limit = 128 * 1024 // 64 * 32
    without = {"halving_rank_bytes": 0}
    assert [taken(32, limit, **without), taken(32, limit + 4, **without)] == ["tree", "ring"]
    assert [taken(2, 4, direct_ranks=0), taken(1, 4, direct_ranks=0)] == ["fold", "fold"]
    assert core.all_reduce_algorithm(32, "bfloat16", limit + 4) == "pairwise"
    hosts = [rank // 4 for rank in range(32)]
    found = [core.all_reduce_algorithm(32, "float32", it, hosts=hosts, table=without) for it in (12_288, 12_292)]
    assert found == ["tree", "two_level"]


def test_a_barrier_waits_for_everybody() -> None:
    for late in (0, 7, 16):
        arrived = [0.0] * 17

        def body(rank: int, group: Any, late: int = late, arrived: list[float] = arrived) -> float:
            if rank == late:
                time.sleep(0.05)
            arrived[rank] = time.monotonic()
            group.barrier().wait()
            return time.monotonic()

        left = world(17).run(body)
        assert min(left) >= max(arrived)


# ---- Trouble ----

SMALL, LARGE = 12, 400_000
plays = itertools.count()


def zeros(count: int, dtype: Any = np.float32) -> Any:
    return np.zeros(count, dtype)


def blocks(n: int, count: int = SMALL) -> list[Any]:
    return [zeros(count) for _ in range(n)]


CALLS: dict[str, Callable[[Any, int], Any]] = {
    "all_reduce(float32[12], SUM)": lambda group, n: group.all_reduce(zeros(SMALL), "float32"),
    "all_reduce(float32[0], SUM)": lambda group, n: group.all_reduce(zeros(0), "float32"),
    "all_reduce(int32[12], SUM)": lambda group, n: group.all_reduce(zeros(SMALL, np.int32), "int32"),
    "all_reduce(float32[400000], SUM)": lambda group, n: group.all_reduce(zeros(LARGE), "float32"),
    "broadcast(float32[12], root 0)": lambda group, n: group.broadcast(zeros(SMALL), "float32", 0),
    "broadcast(float32[0], root 0)": lambda group, n: group.broadcast(zeros(0), "float32", 0),
    "broadcast(float32[12], root 3)": lambda group, n: group.broadcast(zeros(SMALL), "float32", 3),
    "broadcast(float32[400000], root 3)": lambda group, n: group.broadcast(zeros(LARGE), "float32", 3),
    "reduce(float32[12], SUM, root 0)": lambda group, n: group.reduce(zeros(SMALL), "float32", 0),
    "reduce(float32[12], SUM, root 3)": lambda group, n: group.reduce(zeros(SMALL), "float32", 3),
    "gather(float32[12], root 0)": lambda group, n: group.gather(
        zeros(SMALL), blocks(n) if group.rank == 0 else [], "float32", 0
    ),
    "gather(float32[12], root 3)": lambda group, n: group.gather(
        zeros(SMALL), blocks(n) if group.rank == 3 else [], "float32", 3
    ),
    "scatter(float32[12], root 3)": lambda group, n: group.scatter(
        blocks(n) if group.rank == 3 else [], zeros(SMALL), "float32", 3
    ),
    "all_gather(float32[12])": lambda group, n: group.all_gather(zeros(SMALL), blocks(n), "float32"),
    "reduce_scatter(float32[12], SUM)": lambda group, n: group.reduce_scatter(blocks(n), zeros(SMALL), "float32"),
    "barrier": lambda group, n: group.barrier(),
}


def play(ranks: World, calls: Sequence[str], table: Mapping[str, int]) -> list[tuple[RingError | None, float]]:
    """What each rank gets from its call and from two that all agree on, and how long that took."""
    size, name = ranks.size, f"play {next(plays)}"
    together = Barrier(size, timeout=30)

    def rank(me: int) -> tuple[RingError | None, float]:
        group = core.Group(ranks.runtimes[me], name, list(range(size)), timeout_ms=10_000, table=dict(table))
        group.barrier().wait()
        together.wait()
        found, start = None, time.monotonic()
        try:
            CALLS[calls[me]](group, size).wait()
            for _ in range(2):
                group.all_reduce(zeros(3), "float32").wait()
        except RingError as error:
            found = error
        took = time.monotonic() - start
        together.wait()
        group.close()
        return found, took

    return ranks.each(rank)


def expect_told(outcomes: Sequence[tuple[RingError | None, float]], calls: Sequence[str]) -> None:
    for rank, (error, took) in enumerate(outcomes):
        what = f"{calls} on rank {rank}"
        assert isinstance(error, MismatchError), f"{what}: {error}"
        assert all(call in str(error) for call in set(calls)), f"{what}: {error}"
        assert took < BOUND_S, what


@pytest.mark.parametrize("first", CALLS)
def test_one_that_does_something_else_is_told_apart(first: str) -> None:
    """The odd one out is at different places of the tree: its root, inside and at its end."""
    mine = list(CALLS).index(first)
    for index, second in enumerate(CALLS):
        if second == first or (index + mine) % 4:
            continue
        calls = [first] * 6
        calls[(index // 4 + mine) % 6] = second
        expect_told(play(world(6), calls, MANY), calls)


@pytest.mark.parametrize("cut", (1, 3, 8))
@pytest.mark.parametrize("what", ("broadcast(float32[12], root {})", "reduce(float32[12], SUM, root {})"))
def test_ranks_that_believe_in_different_roots(what: str, cut: int) -> None:
    """Stretches of ranks around a root of their own: few edges lead from one to the other, or none."""
    calls = [what.format(0 if rank < cut else 3) for rank in range(9)]
    expect_told(play(world(9), calls, MANY), calls)


def test_two_gathers_whose_members_never_meet() -> None:
    """Each root waits for members of the other's. Gathers know the built-in table only, so this takes many ranks."""
    size = 18
    runtimes, together = world(size).runtimes, Barrier(size, timeout=30)

    def gather(group: Any, root: int) -> None:
        group.gather(zeros(SMALL), blocks(size) if group.rank == root else [], "float32", root).wait()
        for _ in range(2):
            group.all_reduce(zeros(3), "float32").wait()

    def rank(me: int) -> float:
        group = core.Group(runtimes[me], "two gathers", list(range(size)), timeout_ms=10_000)
        group.barrier().wait()
        together.wait()
        start = time.monotonic()
        with pytest.raises(MismatchError, match=r"gather\(float32\[12\], root (4|13)\)"):
            gather(group, 4 if me < 9 else 13)
        took = time.monotonic() - start
        together.wait()
        group.close()
        return took

    assert max(world(size).each(rank)) < BOUND_S


def test_who_is_complete_at_once_still_tells_its_neighbours() -> None:
    """Rank 1's bytes of a broadcast are there before it calls it: behind them on that connection came a barrier."""
    ranks = world(4)
    told = [0]

    def body(rank: int, group: Any) -> None:
        if rank > 1:
            return group.broadcast(zeros(SMALL), "float32", 0).wait()
        pair = core.Group(ranks.runtimes[rank], "rank 0 and 1", [0, 1], timeout_ms=10_000)
        if rank == 0:
            group.broadcast(zeros(SMALL), "float32", 0).wait()
            pair.barrier().wait()
        else:
            pair.barrier().wait()
            before = ranks.runtimes[1].bytes_sent_to(2)
            group.broadcast(zeros(SMALL), "float32", 0).wait()
            pair.barrier().wait()
            told[0] = ranks.runtimes[1].bytes_sent_to(2) - before
        if rank == 0:
            pair.barrier().wait()
        return pair.close()

    ranks.run(body, MANY)
    assert told[0] > 0


@pytest.mark.parametrize("victim", (0, 4, 12, 17))
def test_a_rank_that_leaves_in_the_middle(victim: int) -> None:
    check_that_all_hear_who_leaves(18, victim, 100)
