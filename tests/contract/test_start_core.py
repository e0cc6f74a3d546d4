"""How ranks start as their number grows: what each asks of the store, and how many connections it makes."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.contract import start_jobs
from tests.contract.core_ranks import core, value_in


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
        2,
        16,
        20,
        64,
        pytest.param(256, marks=[pytest.mark.nightly, pytest.mark.timeout(300)]),
        pytest.param(512, marks=[pytest.mark.slow, pytest.mark.timeout(600)]),
    ],
)
def test_what_a_rank_needs_to_start(ranks: int) -> None:
    """Keys that a rank sets and reads, and connections: by the logarithm of the number of ranks."""
    store, each = start(ranks, timeout_ms=150_000)
    found = [len(keys) for keys in store.found]
    doublings = math.log2(ranks)
    assert max(store.sets) <= 5  # of rank 0: its records, both blocks of all, and the job's
    assert max(found) <= 4 + 8 * doublings  # also where it looks twice, since others are late
    assert ranks <= 16 or sum(found) <= 8 * ranks  # seven of eight have no ranks below them
    assert each <= (ranks + 6 if ranks <= 16 else 3 * doublings + 6)  # up to 16 all pairs connect


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_thousand_ranks_start() -> None:
    """In four processes: in one their connections would need more descriptors than this machine gives to one."""
    ranks, parts = 1000, 4
    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    bounds = [ranks * part // parts for part in range(parts + 1)]
    with ProcessPoolExecutor(parts, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = [
            pool.submit(start_jobs.join, store.port, first, end, ranks, 600_000)
            for first, end in itertools.pairwise(bounds)
        ]
        done = [job.result() for job in jobs]
    assert max(keys for keys, *_ in done) <= 9 + 8 * math.log2(ranks)
    assert all(sums == [ranks] * len(sums) for _, sums, *_ in done)


def rejected(
    ranks: int, store: Any, *, without: tuple[int, ...] = (), timeout_ms: int = 3000, **options: Any
) -> set[str]:
    """What the ranks of a large job say that cannot start, without their own names; `options`: by rank, or of all."""

    def join(rank: int) -> str:
        mine = {name: value(rank) if callable(value) else value for name, value in options.items()}
        with pytest.raises(RuntimeError) as error:
            core.Runtime(store, rank, ranks, transport="tcp", timeout_ms=timeout_ms, **mine)
        return str(error.value)

    present = [rank for rank in range(ranks) if rank not in without]
    with ThreadPoolExecutor(len(present)) as pool:
        return set(pool.map(join, present))


@pytest.mark.parametrize("absent", [(0,), (1,), (8,), (13,), (16, 19)])
def test_a_rank_that_never_comes_is_named_on_every_rank(absent: tuple[int, ...]) -> None:
    names = ("rank " if len(absent) == 1 else "ranks ") + ", ".join(map(str, absent))
    said = rejected(20, core.MemoryStore(), without=absent, timeout_ms=500)
    assert all(f"it waited for {names} of 20, which never came" in text for text in said), said


def test_a_rank_whose_settings_differ_is_named_on_every_rank() -> None:
    said = rejected(20, core.MemoryStore(), full_mesh_ranks=lambda rank: 17 if rank == 13 else 16)
    assert all("RINGDP_FULL_MESH_RANKS differs: 16 at rank 0, 17 at rank 13" in text for text in said), said


class ChangedStore:
    """A store in which one key always has that value, once a rank has set it."""

    def __init__(self, key: str, value: str) -> None:
        self._key, self._value = key, value
        self._values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self._values[key] = self._value if key == self._key else value

    def core(self) -> Any:
        return core.CallbackStore(self.set, self._values.get)


@pytest.mark.parametrize("key", ["whos/8", "whos/0", "ats/8", "ats/0"])
@pytest.mark.parametrize("value", ["", "0:host=a", "9:x\n\n", "=1\n\n", "0:a\n\n" * 7, "x" * 100_000])
def test_bytes_that_are_no_records_end_the_start_with_an_error(key: str, value: str) -> None:
    said = rejected(20, ChangedStore(key, value).core())
    wrong = [text for text in said if "left records of the ranks in the store that cannot be read" in text]
    assert wrong == list(said), said
    assert all(f"rank {key.partition('/')[2]} " in text for text in said)


def test_a_rank_that_died_before_it_passed_records_on_is_named() -> None:
    """Rank 8 has set its own record, and none for the seven after it: its process is not there any more."""
    small = core.MemoryStore()
    with ThreadPoolExecutor(2) as pool:
        for one in list(pool.map(lambda rank: core.Runtime(small, rank, 2, transport="tcp"), range(2))):
            pool.submit(one.shut_down)
    fields = dict(line.split("=", 1) for line in value_in(small, "who/0").splitlines())
    store = core.MemoryStore()
    store.set("who/8", "".join(f"{key}={value}\n" for key, value in {**fields, "started": "1"}.items()))
    said = rejected(20, store, without=(8,), timeout_ms=20_000)
    assert all("rank 8 " in text and "died while the ranks met" in text for text in said), said
