"""Ranks as threads of this process, over `tests.core._core`: real connections, no torch; they stay for many cases."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, TypeVar

from tests.helpers import need

if TYPE_CHECKING:
    from tests.core import _core

    core = _core
else:
    core = need("tests.core._core", "ringdp's extension, built with `make build`,")

Result = TypeVar("Result")

# In bytes; `direct_ranks` stays as it is built in.
LIMITS = ("fold_two_ranks_bytes", "fold_sent_bytes", "flat_broadcast_bytes", "direct_gather_bytes")
ALWAYS_SMALL: Mapping[str, int] = {**dict.fromkeys(LIMITS, 2**40), "halving_rank_bytes": 0}
NEVER_SMALL: Mapping[str, int] = {**dict.fromkeys(LIMITS, 0), "halving_rank_bytes": 0, "pairwise_bytes": 0}
HALVING: Mapping[str, int] = {**NEVER_SMALL, "halving_rank_bytes": 2**40}
BUILT_IN: Mapping[str, int] = {}
MANY: Mapping[str, int] = {"direct_ranks": 2}
"""Three ranks and more are a large group, in which small collectives use few pairs."""


def value_in(store: core.MemoryStore, key: str) -> str:
    """What a rank puts there, once it has."""
    value = store.get(key)
    assert value is not None, key
    return value


class World:
    """`size` ranks, each with a Runtime, and the groups of all of them that tests asked for.

    With `hosts`, `hosts[rank]` is the number of the rank's host: they say so when they meet, and are all here.
    Ranks of one host use the transport of the tests that run (conftest.py). ``uplinks[h]`` is host h's link in the
    job's map of uplinks; `weights` is then what the hosts own, as they first appear.
    """

    def __init__(
        self, size: int, *, hosts: Sequence[int] | None = None, uplinks: Sequence[int] = (), **options: Any
    ) -> None:
        self.size = size
        self.hosts = list(hosts or [0] * size)
        self.weights = core.owner_weights([uplinks[host] for host in dict.fromkeys(self.hosts)]) if uplinks else []
        self._threads = ThreadPoolExecutor(size, thread_name_prefix=f"rank-of-{size}")
        store = core.MemoryStore()
        options = {"transport": _transport(), "full_mesh_ranks": _full_mesh_ranks(), **options}
        if uplinks:
            options["table"] = {**options.get("table", {}), **{f"uplink.h{i}": rate for i, rate in enumerate(uplinks)}}
        self.runtimes = self.each(
            lambda rank: core.Runtime(
                store, rank, size, host_id=f"host {self.hosts[rank]}", host_name=self._name(rank), **options
            )
        )
        self._groups: dict[str, list[Any]] = {}

    def _name(self, rank: int) -> str:
        """Of its host in the map; without a map the system's."""
        return f"h{self.hosts[rank]}" if self.weights else ""

    def groups(self, table: Mapping[str, int]) -> list[Any]:
        """The group of all ranks with this algorithm table, one handle per rank."""
        name = repr(sorted(table.items()))
        if name not in self._groups:
            members = list(range(self.size))
            self._groups[name] = [
                core.Group(runtime, name, members, table=dict(table), timeout_ms=60_000) for runtime in self.runtimes
            ]
        return self._groups[name]

    def run(self, body: Callable[[int, Any], Result], table: Mapping[str, int] = BUILT_IN) -> list[Result]:
        """Call ``body(rank, group)`` on all ranks at the same time; results in rank order."""
        groups = self.groups(table)
        return self.each(lambda rank: body(rank, groups[rank]))

    def each(self, body: Callable[[int], Result]) -> list[Result]:
        """Call ``body(rank)`` on all ranks at the same time; results in rank order."""
        # A thread per rank and never more calls than ranks, so all of them run at once.
        futures = [self._threads.submit(body, rank) for rank in range(self.size)]
        wait(futures)
        return [future.result() for future in futures]

    def close(self) -> None:
        for groups in self._groups.values():
            for group in groups:
                group.close()
        self._groups.clear()
        self.each(lambda rank: self.runtimes[rank].shut_down())
        self.runtimes.clear()
        self._threads.shutdown()


def world(size: int, hosts: tuple[int, ...] | None = None, **options: int) -> World:
    """The world of this size, with these hosts and options, that all tests share; `close_worlds` ends it."""
    return _world(size, hosts, _transport(), tuple(sorted(options.items())))


@functools.cache
def _world(size: int, hosts: tuple[int, ...] | None, transport: str, options: tuple[tuple[str, int], ...]) -> World:
    others: dict[str, Any] = dict(options)
    made = World(size, hosts=hosts, transport=transport, **others)
    _made.append(made)
    return made


def _transport() -> str:
    return os.environ.get("RINGDP_TRANSPORT", "auto")


def _full_mesh_ranks() -> int:
    """RINGDP_FULL_MESH_RANKS=1 runs all of these contracts over connections that are made when they are needed."""
    return int(os.environ.get("RINGDP_FULL_MESH_RANKS", "16"))


_made: list[World] = []


def close_worlds() -> None:
    while _made:
        _made.pop().close()
    _world.cache_clear()
