"""Every collective of the core, ranks as threads: the documented order to the bit, close to a sum in double precision,
and the same bits on all ranks.

By default each (world, algorithm) sees every (dtype, op) once, with sizes that go round; `-m slow` runs all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from tests.contract.core_checks import (
    CHECKS,
    SEGMENT_BYTES,
    Case,
    batches,
    check_all_gather,
    check_all_reduce,
    check_all_to_all,
    check_broadcast,
    check_gather_and_scatter,
    check_reduce,
    check_reduce_scatter,
    documented_order,
    everything,
    expect_equal,
    inner_sizes,
    movement_cases,
    sample,
    sizes,
)
from tests.contract.core_ranks import ALWAYS_SMALL, BUILT_IN, LIMITS, NEVER_SMALL, close_worlds, core, world
from tests.contract.reduction_order import (
    FLOATING,
    HALF,
    INTEGERS,
    Array,
    in_rank_order,
    in_ring_order,
    itemsize,
    narrow,
    pairs,
    same_bits,
    special_input,
)
from tests.helpers import need

need("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

WORLDS = (1, 2, 3, 4, 5, 8)
TABLES = {"small": ALWAYS_SMALL, "large": NEVER_SMALL}
every_world = pytest.mark.parametrize("size", WORLDS)
both_tables = pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)


@pytest.fixture(scope="module", autouse=True)
def _end_worlds() -> Iterator[None]:
    yield
    close_worlds()


def test_the_core_reduces_what_the_documents_list() -> None:
    every = itertools.product(core.dtypes(), ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"))
    assert {pair for pair in every if core.reduction_supported(*pair)} == set(pairs())


@every_world
@both_tables
def test_all_reduce(size: int, table: Mapping[str, int]) -> None:
    for index, cases in enumerate(batches(sample(size, shift=len(table) + size))):
        check_all_reduce(world(size), table, cases, in_flight=index % 2 == 0)


@every_world
def test_reduce_scatter(size: int) -> None:
    cases = [case for case in sample(size, shift=size) if case.count <= SEGMENT_BYTES // itemsize(case.dtype) + 1]
    cases.append(Case("float32", "SUM", SEGMENT_BYTES // 2 + 17, seed=3))
    for batch in batches(cases):
        check_reduce_scatter(world(size), NEVER_SMALL, batch)


@every_world
@both_tables
def test_all_gather_and_broadcast(size: int, table: Mapping[str, int]) -> None:
    counts = {dtype: sizes(size, dtype) for dtype in ("float32", "int8")}
    counts["complex128"] = [0, 1, size + 1]
    for batch in batches(movement_cases(size, counts)):
        check_all_gather(world(size), table, [case for case in batch if case.count < 150_000])
        check_broadcast(world(size), table, batch)


@every_world
@both_tables
def test_reduce(size: int, table: Mapping[str, int]) -> None:
    for cases in batches(sample(size, shift=2 * size + len(table))):
        check_reduce(world(size), table, cases)


@every_world
def test_gather_scatter_and_all_to_all(size: int) -> None:
    counts = {dtype: sizes(size, dtype) for dtype in ("float32", "int8")}
    counts["complex128"] = [0, 1, size + 1]
    for batch in batches([case for case in movement_cases(size, counts) if case.count < 300_000]):
        check_gather_and_scatter(world(size), BUILT_IN, batch)
        small = [case for case in batch if case.count < 150_000]
        check_all_to_all(world(size), BUILT_IN, small)
        check_all_to_all(world(size), BUILT_IN, small, even=True)


@pytest.mark.parametrize("size", (2, 3, 5))
@both_tables
@pytest.mark.parametrize("dtype", FLOATING)
def test_infinities_nans_and_zeros(size: int, table: Mapping[str, int], dtype: str) -> None:
    ranks = world(size)
    for op in ("SUM", "AVG", "PRODUCT", "MIN", "MAX"):
        inputs = [special_input(dtype, rank, size) for rank in range(size)]
        buffers = [x.copy() for x in inputs]

        def body(rank: int, group: Any, op: str = op, buffers: list[Array] = buffers) -> None:
            group.all_reduce(buffers[rank].view(np.uint8), dtype, op).wait()

        ranks.run(body, table)
        case = Case(dtype, op, len(inputs[0]), seed=0)
        wanted = documented_order(ranks, table, case, inputs)
        expect_equal(buffers, [wanted] * size, f"{op} of special values in {dtype} on {size} ranks")


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


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_any_mixture(data: st.DataObject) -> None:
    """Random collectives, types, sizes and limits, in flight together on one group, in the same order on all ranks."""
    ranks = world(data.draw(st.sampled_from(WORLDS[:5]), label="world"))
    limit = data.draw(st.sampled_from((0, 1, 1000, 65_536, 2**40)), label="limits")
    table = dict.fromkeys(LIMITS, limit)
    check = data.draw(st.sampled_from(CHECKS), label="collective")
    cases = []
    for seed in range(data.draw(st.integers(1, 10), label="in flight")):
        dtype, op = data.draw(st.sampled_from(pairs()))
        near = st.sampled_from((16 * ranks.size, 1000, *inner_sizes(ranks.size, dtype), *sizes(ranks.size, dtype)[6:9]))
        count = data.draw(st.one_of(st.integers(0, 70), st.builds(int.__add__, near, st.integers(-16, 17))))
        cases.append(Case(dtype, op, count, seed))
    check(ranks, table, cases)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@every_world
@both_tables
def test_every_type_and_size(size: int, table: Mapping[str, int]) -> None:
    ranks = world(size)
    for cases in batches(everything(size)):
        check_all_reduce(ranks, table, cases)
        check_reduce(ranks, table, cases)
        if table is NEVER_SMALL:
            check_reduce_scatter(ranks, table, [case for case in cases if case.count * size < 2_000_000])
    counts = {dtype: sizes(size, dtype) + inner_sizes(size, dtype) for dtype in (*INTEGERS, *FLOATING, "complex128")}
    for cases in batches(movement_cases(size, counts)):
        check_all_gather(ranks, table, cases)
        check_broadcast(ranks, table, cases)
        check_gather_and_scatter(ranks, table, cases)
        check_all_to_all(ranks, table, [case for case in cases if case.count * size < 2_000_000])


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
