"""Every collective of the core, ranks as threads: the documented order to the bit, close to a sum in double precision,
and the same bits on all ranks, whatever their hosts, the table of algorithms, segments and a network that delays."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any

import numpy as np
import pytest

from ringdp.errors import InvalidArgumentError
from tests.contract.core_checks import (
    CHECKS,
    SHARED_HOSTS,
    Case,
    batches,
    check_all_reduce,
    check_all_to_all,
    check_broadcast,
    check_reduce,
    check_reduce_scatter,
    edges,
    every_pair,
    expect_equal,
)
from tests.contract.core_ranks import (
    ALWAYS_SMALL,
    BUILT_IN,
    HALVING,
    MANY,
    NEVER_SMALL,
    World,
    close_worlds,
    core,
    world,
)
from tests.contract.reduction_order import HALF, Array, in_rank_order, in_ring_order, itemsize, narrow, pairs, same_bits
from tests.helpers import need

need("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

LAYOUTS = {**{str(size): (0,) * size for size in (1, 2, 3, 4, 5, 6, 8, 9)}, **SHARED_HOSTS}
FAULTY = ("2", "3", "5", "interleaved", "2+1+1")
FAULTS: Sequence[Mapping[str, int]] = [
    {"segment_bytes": 64, "fault_seed": 3},
    {"segment_bytes": 4096, "fault_seed": 1, "checksums": True},
    {"segment_bytes": 65_472, "fault_seed": 2},
]
TABLES: Mapping[str, Mapping[str, int]] = {
    "small": ALWAYS_SMALL,
    "large": NEVER_SMALL,
    "halving": HALVING,
    "many ranks": {**ALWAYS_SMALL, **MANY},
    "built in": BUILT_IN,
    "built in, many ranks": MANY,
}
ONE_BUFFER = (check_all_reduce, check_broadcast, check_reduce)
LARGEST_BYTES = 5 * 1024 * 1024  # of all ranks' inputs of one call


@pytest.fixture(scope="module", autouse=True)
def _end_worlds() -> Iterator[None]:
    yield
    close_worlds()


def on(layout: str, **options: int) -> World:
    hosts = LAYOUTS[layout]
    return world(len(hosts), hosts, **options)


def test_the_core_reduces_what_the_documents_list() -> None:
    every = itertools.product(core.dtypes(), ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"))
    assert {pair for pair in every if core.reduction_supported(*pair)} == set(pairs())


@settings(max_examples=30, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(
    layout=st.sampled_from([*LAYOUTS]),
    faults=st.sampled_from([{}, {}, {}, *FAULTS]),
    draw=st.randoms(use_true_random=True),
)
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("check", CHECKS)
def test_any_mixture(check: Callable[..., None], table: str, layout: str, faults: dict[str, int], draw: Random) -> None:
    """Random types and sizes, in flight together on one group, in the same order on all ranks."""
    ranks = on(draw.choice(FAULTY) if faults else layout, **faults)
    pieces = 1 if check in ONE_BUFFER else ranks.size
    cases = []
    for seed in range(draw.randint(1, 8)):
        dtype, op = draw.choice(pairs())
        near = draw.choice(edges(ranks.hosts, dtype)) // (20 if faults else 1)
        count = max(0, draw.choice((0, near, near)) + draw.randint(-16, 17))
        cases.append(Case(dtype, op, count, seed, special=draw.random() < 0.3))
    check(ranks, TABLES[table], [case for case in cases if within(ranks, pieces, case)])


@pytest.mark.parametrize("check", [check_all_reduce, check_reduce, check_reduce_scatter])
@pytest.mark.parametrize(
    ("layout", "table"),
    [("3", "small"), ("4", "large"), ("6", "many ranks"), ("2+1+1", "large"), ("5", "halving"), ("3x2", "halving")],
    ids=str,
)
def test_every_type_and_reduction(check: Callable[..., None], layout: str, table: str) -> None:
    """A fold, a ring, a tree, two levels, and halving."""
    ranks = on(layout)
    pieces = ranks.size if check is check_reduce_scatter else 1
    for batch in batches(every_pair(ranks.hosts, shift=len(table))):
        check(ranks, TABLES[table], [case for case in batch if within(ranks, pieces, case)])


def within(ranks: World, pieces: int, case: Case) -> bool:
    return case.count * itemsize(case.dtype) * ranks.size * pieces <= LARGEST_BYTES


def test_all_to_all_with_equal_pieces() -> None:
    for layout in ("2", "5", "interleaved"):
        check_all_to_all(on(layout), BUILT_IN, every_pair(LAYOUTS[layout], shift=0)[::9], even=True)


def test_the_order_shows_in_the_bits() -> None:
    """The oracle can tell the two orders apart, so that neither test above passes for the other's algorithm."""
    inputs = [narrow(np.array([x] * 48), "float32") for x in (1e8, 1.0, -1e8)]
    assert not same_bits(in_rank_order(inputs, "float32", "SUM"), in_ring_order(inputs, "float32", "SUM"))
    halves = [narrow(np.array([x]), "float16") for x in (2048.0, 1.0, 1.0)]
    assert in_rank_order(halves, "float16", "SUM")[0] == 2050.0  # rounded once, not after each step
    assert in_rank_order([np.array([-7], np.int32), np.array([0], np.int32)], "int32", "AVG")[0] == -3


def test_built_in_limits_are_where_the_documents_say() -> None:
    for size, dtype, limit in ((2, "float32", 1024 * 1024), (3, "float32", 64 * 1024), (5, "bfloat16", 32 * 1024)):
        assert core.all_reduce_algorithm(size, dtype, limit) == "fold"
        assert core.all_reduce_algorithm(size, dtype, limit + 4) == ("pairwise" if dtype in HALF else "ring")
        for count in (limit // itemsize(dtype), limit // itemsize(dtype) + 1):
            check_all_reduce(world(size), BUILT_IN, [Case(dtype, "SUM", count, seed=1)])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("table", ["small", "large"])
def test_every_type_at_every_size(layout: str, table: str) -> None:
    ranks = on(layout)
    for shift in range(5 + 3 * len(edges(ranks.hosts, "float32"))):
        for batch in batches(every_pair(ranks.hosts, shift)):
            check_all_reduce(ranks, TABLES[table], batch)
            check_reduce(ranks, TABLES[table], batch)
            check_reduce_scatter(ranks, TABLES[table], [case for case in batch if within(ranks, ranks.size, case)])


def test_segments_of_any_other_length_are_refused() -> None:
    for segment_bytes in (0, 63, 262_145):
        with pytest.raises(InvalidArgumentError, match="segment_bytes must be 64 to 262144"):
            World(1, segment_bytes=segment_bytes)


def test_groups_of_some_ranks_in_other_orders() -> None:
    """Members in any order: group ranks follow the list; groups that share ranks do not disturb each other."""
    ranks = world(5)
    members = {"reversed": [4, 3, 2, 1, 0], "odd": [3, 1], "some": [2, 4, 0]}
    results: dict[tuple[str, int], Array] = {}

    def body(rank: int, group: Any) -> None:
        mine = [name for name in members if rank in members[name]]
        if rank % 2:
            mine.reverse()  # ranks issue to their groups in different orders
        made = {name: core.Group(ranks.runtimes[rank], name, members[name], table=NEVER_SMALL) for name in mine}
        works = []
        for name in mine:
            assert made[name].rank == members[name].index(rank)
            results[name, rank] = np.arange(100_000, dtype=np.float32) + 2.0**rank
            works.append(made[name].all_reduce(results[name, rank], "float32"))
        for work in works:
            work.wait()
        for name in mine:
            made[name].close()

    ranks.run(body)
    for (name, rank), got in results.items():
        inputs = [np.arange(100_000, dtype=np.float32) + 2.0**member for member in members[name]]
        expect_equal([got], [in_ring_order(inputs, "float32", "SUM")], f"group {name}, rank {rank}")


def test_collectives_of_both_kinds_interleave() -> None:
    """What one operation writes the next one reads, without a wait in between."""
    ranks = world(4)
    for pattern in itertools.permutations(("all_reduce", "broadcast", "all_gather")):
        buffers = [np.full(30_000, float(rank + 1), np.float32) for rank in range(4)]
        gathered = [[np.zeros(30_000, np.float32) for _ in range(4)] for _ in range(4)]

        def body(
            rank: int,
            group: Any,
            pattern: tuple[str, ...] = pattern,
            buffers: list[Any] = buffers,
            gathered: list[Any] = gathered,
        ) -> None:
            works = []
            for name in pattern:
                if name == "all_reduce":
                    works.append(group.all_reduce(buffers[rank], "float32"))
                elif name == "broadcast":
                    works.append(group.broadcast(buffers[rank], "float32", 2))
                else:
                    works.append(group.all_gather(buffers[rank], gathered[rank], "float32"))
            for work in works:
                work.wait()

        ranks.run(body)
        values = [1.0, 2.0, 3.0, 4.0]
        seen = [0.0] * 4
        for name in pattern:
            if name == "all_reduce":
                values = [sum(values)] * 4
            elif name == "broadcast":
                values = [values[2]] * 4
            else:
                seen = list(values)
        for rank in range(4):
            assert set(buffers[rank].tolist()) == {values[rank]}, pattern
            assert [set(block.tolist()) for block in gathered[rank]] == [{value} for value in seen], pattern
