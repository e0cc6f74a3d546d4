"""Some ranks of a large job as threads of one process of several: a descriptor's limit is each process's own."""

from __future__ import annotations

import resource
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.contract.core_ranks import core


def join(port: int, first: int, end: int, world: int, timeout_ms: int) -> tuple[int, list[int], float, float]:
    """Ranks ``first`` to ``end`` meet, sum once and leave.

    Returns:
        The most keys that one of them read and set; what each has as its sum; seconds until all had met; MiB of this
        process at its largest.
    """
    client = TCPStore("127.0.0.1", port, None, False, timedelta(milliseconds=timeout_ms))
    touched: list[set[str]] = [set() for _ in range(first, end)]

    def store_of(rank: int) -> Any:
        keys = touched[rank - first]

        def set_(key: str, value: str) -> None:
            keys.add(f"set {key}")
            client.set(key, value)

        def find(key: str) -> str | None:
            if not client.check([key]):
                return None
            keys.add(key)
            return client.get(key).decode()

        return core.CallbackStore(set_, find)

    def start(rank: int) -> Any:
        # Thousands of threads share few cores here: a rank may be silent for long.
        patience: dict[str, Any] = {"timeout_ms": timeout_ms, "heal_ms": 60_000}
        return core.Runtime(store_of(rank), rank, world, host_id=f"{rank}", transport="tcp", **patience)

    def add(runtime: Any, rank: int) -> int:
        mine = np.ones(1024, np.float32)
        group = core.Group(runtime, "all", list(range(world)), timeout_ms=timeout_ms)
        group.all_reduce(mine, "float32").wait()
        group.barrier().wait()
        group.close()
        assert (mine == mine[0]).all(), rank
        return int(mine[0])

    ranks = range(first, end)
    begin = time.monotonic()
    with ThreadPoolExecutor(len(ranks)) as pool:
        runtimes = list(pool.map(start, ranks))
        took_s = time.monotonic() - begin
        sums = list(pool.map(add, runtimes, ranks))
        list(pool.map(lambda runtime: runtime.shut_down(), runtimes))
    return max(map(len, touched)), sums, took_s, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
