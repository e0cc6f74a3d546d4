"""All-reduce by recursive halving and doubling: its order to the bit for any number of ranks, who talks to whom, what
is sent, and who hears of trouble. Every type and reduction, and faulty networks: test_collectives_core.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from ringdp.errors import MismatchError, RingError
from tests.contract.core_checks import Case, check_all_reduce, check_that_all_hear_who_leaves
from tests.contract.core_ranks import HALVING, MANY, World, close_worlds, core, world
from tests.contract.reduction_order import (
    Array,
    in_halving_order,
    in_rank_order,
    in_ring_order,
    in_tree_order,
    narrow,
    random_input,
)

HALVING_ALL = {**HALVING, **MANY}  # of half types as well, between three hosts and more
BLOCK = 128 * 1024 // 4  # elements of a block of sums


@pytest.fixture(scope="module", autouse=True)
def _end_worlds() -> Iterator[None]:
    yield
    close_worlds()


def test_the_order_shows_in_the_bits() -> None:
    """The oracle tells it from the other orders, and hosts from one another."""
    inputs = [random_input("float32", "SUM", 1000, (rank, 4)) for rank in range(6)]
    found = [
        in_halving_order(inputs, "float32", "SUM", hosts) for hosts in ([0] * 6, [0, 0, 1, 1, 2, 2], [0, 0, 0, 1, 1, 1])
    ]
    found += [order(inputs, "float32", "SUM") for order in (in_rank_order, in_ring_order, in_tree_order)]
    assert len({x.tobytes() for x in found}) == len(found)
    halves = [narrow(np.array([x]), "float16") for x in (2048.0, 1.0, 1.0, 1.0, 1.0)]
    assert in_halving_order(halves, "float16", "SUM", [0] * 5)[0] == 2052.0  # rounded once


@pytest.mark.parametrize("size", range(2, 18))
def test_any_number_of_ranks(size: int) -> None:
    """On one host and on as many: blocks that are empty, short, all alike, and longer than what waits at a time."""
    counts = (0, 1, 16, 17, 16 * size - 1, 16 * size, 16 * size + 1, 1009, 20_011)
    cases = [
        Case(("float32", "bfloat16")[i % 2], ("SUM", "AVG")[i // 2 % 2], count, i) for i, count in enumerate(counts)
    ]
    for hosts in ((0,) * size, tuple(range(size))):
        check_all_reduce(world(size, hosts), HALVING_ALL, cases)


@pytest.mark.parametrize(
    "hosts", [(0, 0, 0, 1, 1, 1, 2, 2, 2), (0, 1, 2, 0, 1, 2), (0, 0, 1, 1, 2, 2, 3, 3, 4, 4), (0, 0, 0, 0, 1, 1, 1, 1)]
)
def test_several_ranks_on_hosts(hosts: tuple[int, ...]) -> None:
    cases = [Case(dtype, "AVG", count, 1) for dtype in ("float32", "float16") for count in (1, 31, 1000, 50_021)]
    check_all_reduce(world(len(hosts), hosts), HALVING_ALL, cases)


@pytest.mark.parametrize("size", (2, 3, 5))
def test_sums_that_wait_wrap_around_their_room(size: int) -> None:
    cases = [Case(dtype, "SUM", size * 5 * BLOCK + 7, 3) for dtype in ("float32", "bfloat16")]
    check_all_reduce(world(size, tuple(range(size))), HALVING_ALL, cases)


@pytest.mark.parametrize("dtype", ("float32", "float16"))
def test_a_watched_one_finds_what_is_not_finite(dtype: str) -> None:
    ranks = world(7, tuple(range(7)))
    for culprit in range(7):
        for place in (0, 16 * culprit, 299):
            buffers = [narrow(np.ones(300), dtype) for _ in range(7)]
            buffers[culprit][place] = np.inf

            def body(rank: int, group: Any, buffers: list[Array] = buffers) -> Any:
                work, report = group.all_reduce_watched(buffers[rank].view(np.uint8), dtype)
                work.wait()
                return report.finite, report.own

            found = ranks.run(body, HALVING_ALL)
            assert found == [(False, (0, place) if rank == culprit else None) for rank in range(7)]


def sent(ranks: World) -> Any:
    return np.array([[runtime.bytes_sent_to(peer) for peer in range(ranks.size)] for runtime in ranks.runtimes])


def test_many_ranks_use_few_pairs_and_send_as_little_as_a_ring() -> None:
    size, count = 17, 17 * 16 * 100
    ranks = world(size)
    before = sent(ranks)
    check_all_reduce(ranks, HALVING_ALL, [Case("float32", "SUM", count, 1)])
    told = sent(ranks) - before
    near = {
        (rank, (rank + sign * step) % size) for rank in range(size) for step in (1, 2, 4, 8, 16) for sign in (1, -1)
    }
    assert {(int(a), int(b)) for a, b in np.argwhere(told > 0)} <= near
    least = 2 * (size - 1) * 4 * count // size
    assert (least <= told.sum(1)).all()
    assert (told.sum(1) < 1.01 * least + 4000).all()


def test_a_host_sends_the_buffer_twice_at_most_however_many_ranks_it_has() -> None:
    hosts, count = (0, 1, 2) * 3, 9 * 16 * 100
    ranks = world(len(hosts), hosts)
    before = sent(ranks)
    check_all_reduce(ranks, HALVING_ALL, [Case("float32", "SUM", count, 1)])
    told = sent(ranks) - before
    for host in range(3):
        inside = np.array(hosts) == host
        across = told[inside][:, ~inside].sum()
        assert 2 * 2 / 3 * 4 * count <= across < 1.01 * 2 * 2 / 3 * 4 * count + 4000


def test_ranks_that_call_something_else_are_told() -> None:
    ranks = world(6)

    def rank(me: int) -> RingError | None:
        group = core.Group(
            ranks.runtimes[me], "halving and another", list(range(6)), timeout_ms=10_000, table=dict(HALVING_ALL)
        )
        group.barrier().wait()
        found = None
        try:
            group.all_reduce(np.zeros(1000 + (me == 4), np.float32), "float32").wait()
            group.all_reduce(np.zeros(3, np.float32), "float32").wait()
        except RingError as error:
            found = error
        group.close()
        return found

    for error in ranks.each(rank):
        assert isinstance(error, MismatchError)
        assert "float32[1000]" in str(error)
        assert "float32[1001]" in str(error)


@pytest.mark.parametrize("victim", (0, 5))
def test_a_rank_that_leaves_in_the_middle(victim: int) -> None:
    check_that_all_hear_who_leaves(6, victim, 100_000, HALVING_ALL)
