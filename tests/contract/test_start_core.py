"""How ranks start as their number grows: what each asks of the store, and how many connections it makes."""

from __future__ import annotations

import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.contract.core_ranks import core


class CountingStore:
    """A store in Python that notes which keys each rank sets, and finds."""

    def __init__(self, ranks: int) -> None:
        self.sets = [0] * ranks
        self.found: list[set[str]] = [set() for _ in range(ranks)]
        self._values: dict[str, str] = {}
        self._lock = threading.Lock()

    def of(self, rank: int) -> Any:
        def set_(key: str, value: str) -> None:
            with self._lock:
                self.sets[rank] += 1
                self._values[key] = value

        def find(key: str) -> str | None:
            with self._lock:
                found = self._values.get(key)
                if found is not None:
                    self.found[rank].add(key)
                return found

        return core.CallbackStore(set_, find)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def start(ranks: int, *, timeout_ms: int) -> tuple[CountingStore, float]:
    """Starts that many, one on each host, lets them reduce once, and ends them; with the descriptors of a rank."""
    store, before = CountingStore(ranks), descriptors()
    ones = [np.ones(30_000, np.float32) for _ in range(ranks)]
    with ThreadPoolExecutor(ranks) as pool:

        def join(rank: int) -> Any:
            host = f"host {rank}"
            return core.Runtime(store.of(rank), rank, ranks, host_id=host, transport="tcp", timeout_ms=timeout_ms)

        runtimes = list(pool.map(join, range(ranks)))

        def reduce(rank: int) -> None:
            group = core.Group(runtimes[rank], "all", list(range(ranks)), timeout_ms=timeout_ms)
            group.all_reduce(ones[rank], "float32").wait()
            group.barrier().wait()
            group.close()

        list(pool.map(reduce, range(ranks)))
        each = (descriptors() - before) / ranks
        list(pool.map(lambda runtime: runtime.shut_down(), runtimes))
    assert all((mine == ranks).all() for mine in ones)
    return store, each


@pytest.mark.parametrize(
    "ranks",
    [
        20,
        64,
        pytest.param(256, marks=[pytest.mark.nightly, pytest.mark.timeout(300)]),
        pytest.param(512, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
)
def test_what_a_rank_needs_to_start(ranks: int) -> None:
    """Connections by the logarithm of their number; it sets few keys, and reads two of each other rank."""
    store, each = start(ranks, timeout_ms=150_000)
    assert max(store.sets) <= 3
    assert max(map(len, store.found)) <= 2 * ranks
    assert each <= 3 * math.log2(ranks) + 6
