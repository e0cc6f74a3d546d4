"""What a watched all-reduce tells: whether its result is finite, the same on all ranks, and which ranks brought an
infinity or a NaN and where. Whatever the algorithm, the type and the place in the buffer; ranks are threads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest

from tests.contract.core_checks import BATCH, FOLD_BLOCK_BYTES, SEGMENT_BYTES
from tests.contract.core_ranks import ALWAYS_SMALL, BUILT_IN, NEVER_SMALL, World, close_worlds, core, world
from tests.contract.reduction_order import FLOATING, Array, itemsize, narrow, same_bits, widen
from tests.helpers import need

need("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

ONE_HOST = {f"{size} ranks": (0,) * size for size in (1, 2, 3, 5)}
TWO_LEVELS = {"1+2": (0, 1, 1), "2+1+1": (0, 0, 1, 2), "3+2": (0, 1, 0, 0, 1)}
LAYOUTS = ONE_HOST | TWO_LEVELS
TABLES = {"small": ALWAYS_SMALL, "large": NEVER_SMALL}
every_layout = pytest.mark.parametrize("hosts", LAYOUTS.values(), ids=LAYOUTS)
every_dtype = pytest.mark.parametrize("dtype", FLOATING)

Own = tuple[int, int] | None  # of a rank: buffer and index
Places = Sequence[tuple[int, int, float]]  # rank, index, what it brings there


@pytest.fixture(scope="module", autouse=True)
def _end_worlds() -> Iterator[None]:
    yield
    close_worlds()


def on(hosts: tuple[int, ...]) -> World:
    return world(len(hosts), None if len(set(hosts)) == 1 else hosts)


def inputs_with(places: Places, size: int, dtype: str, count: int) -> list[Array]:
    inputs = [np.random.default_rng((count, rank)).uniform(-1, 1, count) for rank in range(size)]
    for rank, index, value in places:
        inputs[rank][index] = value
    return [narrow(values, dtype) for values in inputs]


def check(
    hosts: tuple[int, ...],
    table: Mapping[str, int],
    dtype: str,
    op: str,
    inputs_of: Sequence[list[Array]],
) -> list[bool]:
    """Reduce each of `inputs_of` (one array per rank), some at a time; the verdicts, which all ranks share."""
    verdicts = []
    for start in range(0, len(inputs_of), BATCH):
        batch = inputs_of[start : start + BATCH]
        after = [[x.copy() for x in inputs] for inputs in batch]

        def body(rank: int, group: core.Group, after: list[list[Array]] = after) -> list[tuple[bool, Own]]:
            calls = [group.all_reduce_watched(buffers[rank], dtype, op) for buffers in after]
            for work, _ in calls:
                work.wait()
            return [(report.finite, report.own) for _, report in calls]

        told = on(hosts).run(body, table)
        for number, (before, reduced) in enumerate(zip(batch, after, strict=True)):
            assert all(same_bits(reduced[0], other) for other in reduced)
            finite = bool(np.isfinite(widen(reduced[0], dtype)).all())
            for rank, own_input in enumerate(before):
                wrong = np.flatnonzero(~np.isfinite(widen(own_input, dtype)))
                first = (0, int(wrong[0])) if wrong.size else None
                assert told[rank][number] == (finite, first), (rank, len(own_input), op)
            verdicts.append(finite)
    return verdicts


@every_layout
@every_dtype
def test_sums_that_overflow_though_every_input_is_finite(hosts: tuple[int, ...], dtype: str) -> None:
    huge = {"float16": 60000.0, "bfloat16": 3e38, "float32": 3e38, "float64": 1.5e308}[dtype]
    count = 3 * FOLD_BLOCK_BYTES // itemsize(dtype)
    places = [(rank, index, huge) for rank in range(len(hosts)) for index in (0, count - 1)]
    inputs = inputs_with(places, len(hosts), dtype, count)
    for table in TABLES.values():
        alone = len(hosts) == 1
        assert check(hosts, table, dtype, "SUM", [inputs]) == [alone]
        # float16 is added in float32, where the mean is taken before it is rounded.
        assert check(hosts, table, dtype, "AVG", [inputs]) == [alone or dtype == "float16"]


@pytest.mark.parametrize("hosts", ((0, 0, 0), (0, 0, 1)), ids=("one level", "two levels"))
@every_dtype
def test_an_infinity_that_the_result_has_lost_is_none(hosts: tuple[int, ...], dtype: str) -> None:
    inputs = inputs_with([(1, 3, np.inf)], 3, dtype, 1000)
    assert check(hosts, BUILT_IN, dtype, "MIN", [inputs]) == [True]
    assert check(hosts, BUILT_IN, dtype, "MAX", [inputs]) == [False]


def test_an_infinity_that_was_there_before_and_is_gone_is_not_seen_again() -> None:
    clean, wrong = inputs_with([], 2, "float32", 5000), inputs_with([(0, 4999, np.nan)], 2, "float32", 5000)
    assert check((0, 0), BUILT_IN, "float32", "SUM", [clean, wrong, clean]) == [True, False, True]


def test_types_without_infinities_are_finite() -> None:
    def body(rank: int, group: core.Group) -> tuple[bool, Own]:
        work, report = group.all_reduce_watched(np.full(100, -1, np.int32), "int32")
        work.wait()
        return report.finite, report.own

    assert on((0, 0)).run(body) == [(True, None)] * 2


@settings(max_examples=120, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_places(data: st.DataObject) -> None:
    hosts = data.draw(st.sampled_from(list(LAYOUTS.values())))
    table = data.draw(st.sampled_from([BUILT_IN, *TABLES.values()]))
    dtype = data.draw(st.sampled_from(FLOATING))
    longest = len(hosts) * SEGMENT_BYTES // itemsize(dtype) + 17
    count = data.draw(st.one_of(st.integers(1, 100_000), st.sampled_from([1, 16 * len(hosts) + 1, longest])))
    index = st.one_of(st.sampled_from([0, count // 2, count - 1]), st.integers(0, count - 1))
    place = st.tuples(st.integers(0, len(hosts) - 1), index, st.sampled_from([np.inf, -np.inf, np.nan]))
    places = data.draw(st.lists(place, max_size=6))
    op = data.draw(st.sampled_from(["SUM", "AVG"]))
    assert check(hosts, table, dtype, op, [inputs_with(places, len(hosts), dtype, count)]) == [not places]
