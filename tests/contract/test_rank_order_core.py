"""Groups that add in rank order: an element has the same bits in any buffer and wherever the ranks are."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from tests.contract import compressed_reference
from tests.contract.core_checks import Case, expect_equal
from tests.contract.core_ranks import ALWAYS_SMALL, BUILT_IN, MANY, NEVER_SMALL, World, close_worlds, core, world
from tests.contract.reduction_order import Array, in_rank_order, pairs
from tests.helpers import need

need("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

LAYOUTS = ((0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1), (0, 1, 2, 3), (0, 0), (0, 1), (0, 1, 1))
TABLES = {"built in": BUILT_IN, "large": NEVER_SMALL, "small": ALWAYS_SMALL, "many ranks": MANY}


@pytest.fixture(scope="module", autouse=True)
def _end_worlds() -> Iterator[None]:
    yield
    close_worlds()


class Ordered:
    """A group in rank order of all ranks of a world."""

    def __init__(self, hosts: Sequence[int], table: Mapping[str, int] = BUILT_IN) -> None:
        self.ranks: World = world(len(hosts), tuple(hosts))
        self.table = {**table}

    def each(self, body: Any) -> list[Any]:
        def run(rank: int) -> Any:
            name = f"in rank order {sorted(self.table.items())}"
            group = core.Group(
                self.ranks.runtimes[rank], name, list(range(self.ranks.size)), table=self.table, timeout_ms=60_000
            )
            group.add_in_rank_order()
            try:
                return body(rank, group)
            finally:
                group.barrier().wait()
                group.close()

        return self.ranks.each(run)

    def all_reduce(self, inputs: Sequence[Array], cuts: Sequence[int], dtype: str, op: str) -> list[Array]:
        """Of each rank's array, cut into buffers of so many elements, several of them in flight."""
        results = [x.copy() for x in inputs]

        def body(rank: int, group: Any) -> None:
            pieces = np.split(results[rank], np.cumsum(cuts)[:-1])
            works = [group.all_reduce(piece.view(np.uint8), dtype, op) for piece in pieces if piece.size]
            for work in works:
                work.wait()

        self.each(body)
        return results


@given(
    st.sampled_from(LAYOUTS),
    st.sampled_from(pairs()),
    st.lists(st.sampled_from([0, 1, 3, 16, 17, 255, 4096, 20_011, 100_000]), min_size=1, max_size=5),
    st.sampled_from(sorted(TABLES)),
    st.booleans(),
)
@settings(max_examples=120, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_neither_buffers_nor_hosts_show(
    hosts: tuple[int, ...], pair: tuple[str, str], cuts: list[int], table: str, special: bool
) -> None:
    inputs = Case(*pair, sum(cuts), seed=len(cuts), special=special).inputs(len(hosts))
    got = Ordered(hosts, TABLES[table]).all_reduce(inputs, cuts, *pair)
    expect_equal(got, [in_rank_order(inputs, *pair)] * len(hosts), f"cut at {cuts}, {pair}, {hosts}, {table}")


@pytest.mark.parametrize("codec", ["int8", "int4", "bfloat16", "float16"])
def test_codes_are_each_ranks_own(codec: str) -> None:
    """As if every rank had a host of its own, in any company: means and residuals."""
    sections = [70_001, 513, 4096]
    offsets = [zlib.crc32(b"parameter %d" % i) for i in range(len(sections))]
    for size in (3, 4):
        random = np.random.default_rng(size)

        def draw(scale: float, random: Any = random, size: int = size) -> list[list[Any]]:
            return [[random.normal(0, scale, n).astype(np.float32) for n in sections] for _ in range(size)]

        inputs, residuals = draw(1e-2), draw(1e-3)
        wanted = compressed_reference.all_reduce(
            inputs, offsets, codec, hosts=list(range(size)), divisor=size, residuals=residuals
        )
        for hosts in (one for one in LAYOUTS if len(one) == size):
            for together in (True, False):
                means = [[x.copy() for x in each] for each in inputs]
                after = [[x.copy() for x in each] for each in residuals]

                def body(
                    rank: int,
                    group: Any,
                    means: Any = means,
                    after: Any = after,
                    together: bool = together,
                    before: Any = residuals,
                ) -> None:
                    for some in [slice(None)] if together else [slice(i, i + 1) for i in range(len(sections))]:
                        work, _ = group.all_reduce_compressed(
                            means[rank][some],
                            offsets[some],
                            codec,
                            residuals=before[rank][some],
                            new_residuals=after[rank][some],
                        )
                        work.wait()

                Ordered(hosts).each(body)
                for rank in range(size):
                    expect_equal(means[rank], wanted.means, f"{codec} on rank {rank} of {hosts}, {together=}")
                    expect_equal(after[rank], wanted.residuals[rank], f"residual of rank {rank} of {hosts}")


def test_which_algorithm() -> None:
    def taken(hosts: Sequence[int], bytes_: int, table: Mapping[str, int] = BUILT_IN) -> str:
        name: str = core.all_reduce_algorithm(
            len(hosts), "float32", bytes_, hosts=list(hosts), table=dict(table), rank_order=True
        )
        return name

    for hosts in LAYOUTS:
        assert [taken(hosts, n) for n in (4, 10_000_000)] == ["fold", "pairwise"]
    assert taken(range(20), 4) == taken(range(20), 10_000_000) == "pairwise"  # not a tree, nor a ring


def test_a_rank_that_adds_in_another_order_is_named() -> None:
    ranks = World(3)
    name = "half in rank order"
    errors = []

    def body(rank: int) -> None:
        group = core.Group(ranks.runtimes[rank], name, [0, 1, 2], timeout_ms=10_000)
        if rank == 1:
            group.add_in_rank_order()
        try:
            group.all_reduce(np.zeros(1_000_000, np.float32).view(np.uint8), "float32").wait()
        except Exception as error:
            errors.append(str(error))

    ranks.each(body)
    ranks.close()
    assert len(errors) == 3
    assert all("order of summation" in error for error in errors), errors
