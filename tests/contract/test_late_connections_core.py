"""Connections that are made when they are first needed: who has one from the start, and that nothing else changes."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from ringdp.errors import MismatchError, PeerLostError, RingError, RingTimeoutError
from tests.contract.core_ranks import NEVER_SMALL, World, core
from tests.fault.launch_jobs import wait_until

LARGE = 20  # ranks, above those that connect all pairs
PAIRS = LARGE * (LARGE - 1) // 2
FAR = 1, 14  # two ranks that are not connected from the start

pytestmark = pytest.mark.timeout(60)


def overlay(rank: int, world: int) -> set[int]:
    """With whom a rank of a large job begins, after docs/reference/wire_format.md."""
    found = {(rank + sign * 2**k) % world for k in range(world.bit_length()) for sign in (1, -1) if 2**k < world}
    parent = [-1, *((it - 1) // 4 for it in range(1, world))]
    found |= {it for it in range(world) if parent[it] == rank or parent[rank] == it}
    return found - {rank}


def sockets() -> int:
    """Of this process, which all ranks are threads of."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
        except FileNotFoundError:  # the one that listed the folder
            continue
    return found


@pytest.fixture
def ranks() -> Iterator[World]:
    made = World(LARGE, full_mesh_ranks=16)
    yield made
    made.close()


def add_up(count: int = 3) -> Callable[[int, Any], None]:
    def body(rank: int, group: Any) -> None:
        mine = np.full(count, float(rank + 1), np.float32)
        group.all_reduce(mine.view(np.uint8), "float32", "SUM").wait(30_000)
        assert (mine == group.size * (group.size + 1) / 2).all()

    return body


def all_to_all(rank: int, group: Any) -> None:
    size = group.size
    mine = [np.full(5, 100.0 * rank + to, np.float32) for to in range(size)]
    theirs = [np.zeros(5, np.float32) for _ in range(size)]
    bytes_of = [[it.view(np.uint8) for it in several] for several in (mine, theirs)]
    group.all_to_all(*bytes_of, "float32").wait(30_000)
    assert [it[0] for it in theirs] == [100.0 * it + rank for it in range(size)]


def error_of(body: Callable[[int, Any], Any]) -> Callable[[int, Any], tuple[RingError | None, float]]:
    def guarded(rank: int, group: Any) -> tuple[RingError | None, float]:
        begin = time.monotonic()
        try:
            body(rank, group)
        except RingError as error:
            return error, time.monotonic() - begin
        return None, time.monotonic() - begin

    return guarded


def test_who_is_connected_and_when(transport: str) -> None:
    assert FAR[1] not in overlay(FAR[0], LARGE)
    before = sockets()
    ranks = World(LARGE, full_mesh_ranks=16)
    try:
        at_start = sum(len(overlay(rank, LARGE)) for rank in range(LARGE)) // 2
        assert sockets() - before == 2 * at_start + LARGE  # and a listener each
        ranks.run(add_up(100_000), NEVER_SMALL)  # a ring needs no others
        assert sockets() - before == 2 * at_start + LARGE
        ranks.run(all_to_all)
        wait_until(lambda: sockets() - before == 2 * PAIRS + LARGE, "all pairs to be connected", 5.0)
        ranks.run(all_to_all)
        assert [it.transports() for it in ranks.runtimes] == [
            {peer: transport for peer in range(LARGE) if peer != rank} for rank in range(LARGE)
        ]
    finally:
        ranks.close()
    assert sockets() == before


def test_all_pairs_of_a_small_job_and_no_listener_afterwards() -> None:
    before = sockets()
    ranks = World(4, full_mesh_ranks=4)
    try:
        assert sockets() - before == 2 * 6
    finally:
        ranks.close()


@pytest.mark.parametrize(("source", "to"), [FAR, FAR[::-1]], ids=["to a higher rank", "to a lower rank"])
@pytest.mark.parametrize("posted", ["receive first", "send first", "from anybody"])
def test_a_message_between_ranks_that_are_not_connected(ranks: World, source: int, to: int, posted: str) -> None:
    def body(rank: int, group: Any) -> None:
        data = np.full(70_000, 7.0 if rank == source else 0.0, np.float32)
        if rank == source:
            time.sleep(0.2 if posted == "receive first" else 0.0)
            group.send(data.view(np.uint8), "float32", to=to).wait(20_000)
        if rank == to:
            time.sleep(0.2 if posted == "send first" else 0.0)
            work = group.receive(data.view(np.uint8), "float32", source=-1 if posted == "from anybody" else source)
            work.wait(20_000)
            assert (data == 7.0).all()
            assert work.source() == source

    ranks.run(body)


def test_many_groups_at_once(ranks: World) -> None:
    """Each of ten groups of other ranks, in use by all its members at the same time."""
    draw = np.random.default_rng(3)
    members = [sorted(map(int, draw.permutation(LARGE)[: 3 + it])) for it in range(10)]

    def body(rank: int) -> None:
        for index, those in enumerate(members):
            if rank in those:
                group = core.Group(ranks.runtimes[rank], f"some {index}", those, timeout_ms=20_000)
                for count in (1, 50_000):
                    add_up(count)(those.index(rank), group)

    ranks.each(body)


def test_a_disagreement_is_told_to_all(ranks: World) -> None:
    def body(rank: int, group: Any) -> None:
        count = 30 if rank == 7 else 3
        group.all_reduce(np.zeros(count, np.float32).view(np.uint8), "float32", "SUM").wait(30_000)

    for error, took_s in ranks.run(error_of(body), NEVER_SMALL):
        assert isinstance(error, MismatchError), error
        assert "rank 7 " in str(error)
        assert took_s < 5.0


def test_who_has_not_come_is_named_by_ranks_that_are_not_connected_with_it() -> None:
    ranks = World(LARGE, full_mesh_ranks=16)
    try:
        groups = [
            core.Group(it, "some", list(range(LARGE)), table=dict(NEVER_SMALL), timeout_ms=2000)
            for it in ranks.runtimes
        ]

        def body(rank: int) -> RingError | None:
            if rank != 9:
                try:
                    groups[rank].all_reduce(np.zeros(40, np.float32).view(np.uint8), "float32", "SUM").wait(20_000)
                except RingError as error:
                    return error
            return None

        errors = ranks.each(body)
        assert errors[9] is None
        for rank, error in enumerate(errors):
            if rank != 9:
                assert isinstance(error, RingTimeoutError), error
                assert error.peer == 9, error
    finally:
        ranks.close()


def test_descriptors_that_run_out_end_the_wait_with_the_reason(ranks: World) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 30, hard))
    try:
        outcomes = ranks.run(error_of(all_to_all), NEVER_SMALL)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    told = [(str(error), took_s) for error, took_s in outcomes if error is not None]
    assert told
    reasons = ("Too many open files", "descriptor did not come through", "if descriptors ran out: ulimit -n")
    assert any(reason in text for reason in reasons for text, _ in told), told
    assert all("ulimit -n" in text for text, _ in told), "\n".join(
        t for t, _ in told
    )  # also one whose peer has run out, which it cannot know
    assert max(took_s for _, took_s in told) < 12.0


def test_a_rank_that_leaves_is_missed_only_by_who_needs_it(ranks: World) -> None:
    ranks.run(add_up(), NEVER_SMALL)
    ranks.runtimes[FAR[1]].shut_down()

    def body(rank: int, group: Any) -> None:
        if rank == FAR[0]:
            group.send(np.zeros(9, np.float32).view(np.uint8), "float32", to=FAR[1]).wait(20_000)

    outcomes = ranks.run(error_of(body), NEVER_SMALL)
    error, took_s = outcomes[FAR[0]]
    assert isinstance(error, PeerLostError), error
    assert error.peer == FAR[1]
    assert "nothing listens there any more" in str(error)
    assert took_s < 5.0
