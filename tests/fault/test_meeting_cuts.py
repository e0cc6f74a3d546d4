"""Connections between ranks that end while the ranks meet, run, and leave: they are made again, nobody is called dead
for it, and each step counts."""

from __future__ import annotations

import ctypes
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from tests.contract.core_ranks import LIMITS, core
from tests.fault.faults import sampled

LIBC = ctypes.CDLL(None, use_errno=True)

pytestmark = pytest.mark.timeout(300)


def reset(connection: socket.socket) -> None:
    """RST both ways, as `ss -K` or a middlebox does: connect(2) to AF_UNSPEC."""
    LIBC.connect(connection.fileno(), bytes(16), 16)


HOW: dict[str, Callable[[socket.socket], object]] = {
    "reset": reset,
    "both": lambda it: it.shutdown(socket.SHUT_RDWR),
    "writing": lambda it: it.shutdown(socket.SHUT_WR),
    "reading": lambda it: it.shutdown(socket.SHUT_RD),
}


def connections() -> list[socket.socket]:
    """This process's own over TCP, in which all the ranks are: duplicates of the descriptors."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # other threads close descriptors meanwhile
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            it = socket.socket(fileno=os.dup(int(name)))
            if it.family == socket.AF_INET and it.type == socket.SOCK_STREAM:
                with suppress(OSError):
                    it.getpeername()
                    found.append(it)
                    continue
            it.close()
    return found


class Cutter:
    """Cuts a connection now and then, as a seed has it, until it has cut `most` or is stopped."""

    def __init__(self, seed: int, most: int, every_s: float, how: tuple[str, ...] = tuple(HOW)) -> None:
        self.cuts = 0
        self._draw, self._most, self._every_s, self._how = random.Random(seed), most, every_s, how
        self._on = True
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._on and self.cuts < self._most:
            time.sleep(self._draw.expovariate(1 / self._every_s))
            found = connections()
            if found and self._on:
                with suppress(OSError):
                    HOW[self._draw.choice(self._how)](self._draw.choice(found))
                    self.cuts += 1
            for it in found:
                it.close()

    def stop(self) -> int:
        self._on = False
        self._thread.join()
        return self.cuts


def meet(seed: int, size: int, transport: str, streams: int = 0, full_mesh_ranks: int = 16) -> int:
    """One meeting of ranks that are threads here, and a sum after it; how many connections were cut in it."""
    store = core.MemoryStore()
    options: dict[str, Any] = {
        "transport": transport,
        "streams": streams,
        "full_mesh_ranks": full_mesh_ranks,
        "timeout_ms": 30_000,
    }
    draw = random.Random(seed)
    cutter = Cutter(seed, draw.randint(1, 12), draw.choice([0.0001, 0.0005, 0.002]))
    with ThreadPoolExecutor(size) as pool:
        runtimes = list(pool.map(lambda rank: core.Runtime(store, rank, size, **options), range(size)))
        cuts = cutter.stop()

        def add_up(rank: int) -> None:
            group = core.Group(runtimes[rank], "all", list(range(size)), timeout_ms=20_000)
            x = np.full(5000, rank + 1, np.float32)
            group.all_reduce(x, "float32").wait()
            assert (x == size * (size + 1) / 2).all()
            group.barrier().wait()
            group.close()

        list(pool.map(add_up, range(size)))
        list(pool.map(lambda it: it.shut_down(), runtimes))
    return cuts


def meet_often(first_seed: int, size: int, transport: str, streams: int = 0) -> None:
    """At least twelve meetings, and more where ranks meet faster than connections are cut."""
    cuts = 0
    for number in range(100):
        cuts += meet(first_seed + number, size, transport, streams)
        if number >= 11 and cuts > 6:
            break
    assert cuts > 6


@pytest.mark.parametrize(("size", "transport"), sampled([(n, how) for n in (2, 3, 4, 6) for how in ("tcp", "auto")], 4))
def test_the_ranks_meet_whatever_is_cut(size: int, transport: str) -> None:
    meet_often(100 * size, size, transport)


def test_pairs_of_several_connections() -> None:
    meet_often(0, 2, "tcp", streams=4)


def leave(seed: int, size: int, steps: int) -> int:
    """Each rank leaves when its own last sum is there, while connections are cut; how many were."""
    store = core.MemoryStore()
    with ThreadPoolExecutor(size) as pool:
        options: dict[str, Any] = {"transport": "tcp", "timeout_ms": 30_000, "table": dict.fromkeys(LIMITS, 0)}
        runtimes = list(pool.map(lambda rank: core.Runtime(store, rank, size, **options), range(size)))
        together = threading.Barrier(size)

        def train(rank: int) -> None:
            group = core.Group(runtimes[rank], "all", list(range(size)), timeout_ms=20_000)
            together.wait()
            for step in range(steps):
                x = np.full(20_000, rank + step, np.float32)
                group.all_reduce(x, "float32").wait()
                assert (x == size * (size - 1) / 2 + size * step).all()
            runtimes[rank].shut_down()

        # What one's own process resets it has not read; the network does not do that.
        cutter = Cutter(seed, 1000, 0.001, ("both", "writing", "reading"))
        list(pool.map(train, range(size)))
        return cutter.stop()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_last_step_counts_whatever_is_cut(size: int) -> None:
    cuts = 0
    for seed in range(100):  # at least eight jobs, and more where they end faster than connections are cut
        cuts += leave(seed, size, 1 + seed % 4)
        if seed >= 7 and cuts > 20:
            break
    assert cuts > 20


def add_up_codes(seed: int, size: int, how: str) -> int:
    """Sums of codes, which a rank sends from memory that it uses again at once; how many connections were cut."""
    store = core.MemoryStore()
    with ThreadPoolExecutor(size) as pool:
        runtimes = list(
            pool.map(lambda rank: core.Runtime(store, rank, size, transport="tcp", timeout_ms=30_000), range(size))
        )
        cutter = Cutter(seed, 1000, 0.003, (how,))

        def train(rank: int) -> None:
            group = core.Group(runtimes[rank], "all", list(range(size)), timeout_ms=20_000)
            for step in range(12):
                x = np.full(400_000, rank + step, np.float32)
                group.all_reduce_compressed([x], [0], "int8")[0].wait()
                assert np.allclose(x, (size - 1) / 2 + step, rtol=0.02)

        list(pool.map(train, range(size)))
        cuts = cutter.stop()
        list(pool.map(lambda it: it.shut_down(), runtimes))
    return cuts


@pytest.mark.parametrize("how", ["both", "writing", "reading"])
def test_a_sum_of_codes_goes_on_whatever_is_cut(how: str) -> None:
    assert sum(add_up_codes(seed, 4, how) for seed in range(3)) > 20


def test_who_leaves_alone_does_not_wait_for_long() -> None:
    """The others' engines answer its goodbye, whatever their programs do."""
    store = core.MemoryStore()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rank: core.Runtime(store, rank, 2, transport="tcp"), range(2))
        began = time.monotonic()
        first.shut_down()
        assert time.monotonic() - began < 1.0
        second.shut_down()
