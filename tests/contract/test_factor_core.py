"""An all-reduce that multiplies its inputs gives the bits of one of multiplied inputs: every algorithm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from tests.contract.core_checks import FOLD_BLOCK_BYTES, SEGMENT_BYTES
from tests.contract.core_ranks import ALWAYS_SMALL, MANY, NEVER_SMALL, close_worlds, core, world
from tests.contract.reduction_order import Array, same_bits
from tests.helpers import need

need("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

LAYOUTS = {f"{size} ranks": (0,) * size for size in (1, 2, 3, 4)} | {"1+2": (0, 1, 1), "3+2": (0, 1, 0, 0, 1)}
TABLES = {"small": ALWAYS_SMALL, "large": NEVER_SMALL, "tree": {**ALWAYS_SMALL, **MANY}}


@pytest.fixture(scope="module", autouse=True)
def _end_worlds() -> Iterator[None]:
    yield
    close_worlds()


@settings(max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(
    hosts=st.sampled_from([*LAYOUTS.values()]),
    table=st.sampled_from([*TABLES.values()]),
    kind=st.sampled_from([("float32", "AVG"), ("float64", "AVG"), ("float32", "SUM"), ("float32", "MAX")]),
    edge=st.integers(0, 4),
)
def test_the_bits_of_an_input_that_was_multiplied_before(
    hosts: tuple[int, ...], table: Mapping[str, int], kind: tuple[str, str], edge: int
) -> None:
    (dtype, op), size = kind, len(hosts)
    item = np.dtype(dtype).itemsize
    factors = [1 / 3 + rank for rank in range(size - 1)] + [1.0]
    count = (0, 1, size + 1, FOLD_BLOCK_BYTES // item + 3, 2 * size * SEGMENT_BYTES // item + 17)[edge]
    inputs = [np.random.default_rng((count, rank)).uniform(-1, 1, count).astype(dtype) for rank in range(size)]
    multiplied = [x * x.dtype.type(factor) for x, factor in zip(inputs, factors, strict=True)]

    def body(rank: int, group: core.Group, inputs: list[Array] = inputs, multiplied: list[Array] = multiplied) -> None:
        ours = group.all_reduce(inputs[rank].view(np.uint8), dtype, op, factors=factors)
        group.all_reduce(multiplied[rank].view(np.uint8), dtype, op).wait()
        ours.wait()

    world(size, None if len(set(hosts)) == 1 else hosts).run(body, table)
    for ours, theirs in zip(inputs, multiplied, strict=True):
        assert same_bits(ours, theirs), count


def test_an_input_of_factor_zero_counts_nothing() -> None:
    def body(rank: int, group: core.Group) -> None:
        x = np.full(70_000, 3.0 + rank, np.float32)
        group.all_reduce(x.view(np.uint8), "float32", factors=[0.0, 2.0, 0.0]).wait()
        assert (x == 8.0).all()

    world(3).run(body, NEVER_SMALL)


def test_other_types_and_other_numbers_of_factors_are_refused() -> None:
    def body(_rank: int, group: core.Group) -> None:
        with pytest.raises(ValueError, match="float32 and float64"):
            group.all_reduce(np.ones(4, np.int32).view(np.uint8), "int32", factors=[0.5, 0.5])
        with pytest.raises(ValueError, match="each of the 2 ranks, not 3"):
            group.all_reduce(np.ones(4, np.float32).view(np.uint8), "float32", factors=[0.5] * 3)

    world(2).run(body, NEVER_SMALL)
