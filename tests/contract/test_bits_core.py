"""The bits of a result depend on inputs, type, world and table, and on nothing else: not on how the bytes are cut into
segments, nor on how the network hands them over, nor on checksums behind them. Hashed over a grid of these."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.contract.core_ranks import ALWAYS_SMALL, NEVER_SMALL, World
from tests.contract.reduction_order import random_input

# Bytes of a segment and the seed of what the network does to it; 0: nothing.
SEGMENTS_AND_FAULTS = ((64, 1), (4096, 2), (65_472, 1), (262_144, 0), (262_144, 2))
COUNTS = {"float32": 100_003, "bfloat16": 70_001, "float64": 9_999, "complex64": 5_000}


@contextlib.contextmanager
def made(size: int, **options: Any) -> Iterator[World]:
    ranks = World(size, **options)
    try:
        yield ranks
    finally:
        ranks.close()


def digest(ranks: World) -> str:
    """Of what every rank gets from all reductions of all types over both tables, several of them in flight at once."""
    buffers = [
        [random_input(dtype, op, count, (rank, index)) for rank in range(ranks.size)]
        for index, (dtype, count) in enumerate(COUNTS.items())
        for op in ("SUM", "AVG", "PRODUCT")
    ]
    names = [(dtype, op) for dtype in COUNTS for op in ("SUM", "AVG", "PRODUCT")]
    result = hashlib.sha256()
    for table in (NEVER_SMALL, ALWAYS_SMALL):
        work = [[x.copy() for x in each] for each in buffers]

        def body(rank: int, group: Any, work: list[list[Any]] = work) -> None:
            works = [group.all_reduce(mine[rank].view(np.uint8), *name) for mine, name in zip(work, names, strict=True)]
            for one in works:
                one.wait()

        ranks.run(body, table)
        for each in work:
            alike = {hashlib.sha256(x.tobytes()).digest() for x in each}
            assert len(alike) == 1, "ranks differ"
            result.update(alike.pop())
    return result.hexdigest()


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_neither_segments_nor_delays_show(size: int) -> None:
    digests: dict[Any, str] = {}
    for segment_bytes, seed in SEGMENTS_AND_FAULTS:
        with made(size, segment_bytes=segment_bytes, fault_seed=seed) as ranks:
            digests[segment_bytes, seed] = digest(ranks)
            if seed == 2:
                digests[segment_bytes, seed, "again"] = digest(ranks)
    for checksums in (False, True):
        with made(size, transport="tcp", checksums=checksums) as ranks:
            digests["tcp", checksums] = digest(ranks)
    assert len(set(digests.values())) == 1, digests


def test_what_cannot_be_is_refused() -> None:
    from ringdp.errors import InvalidArgumentError

    for segment_bytes in (0, 63, 262_145):
        with pytest.raises(InvalidArgumentError, match="segment_bytes must be 64 to 262144"):
            World(1, segment_bytes=segment_bytes)
