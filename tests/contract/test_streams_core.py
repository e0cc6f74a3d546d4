"""Ranks with several connections to each other: the same results, nothing left, and each end is the end of the pair."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from ringdp.errors import PeerLostError
from tests.contract.core_ranks import World

COUNT = 700_003


@contextmanager
def job(size: int, streams: int, **options: Any) -> Iterator[World]:
    made = World(size, hosts=range(size), transport="tcp", streams=streams, timeout_ms=10_000, **options)
    try:
        yield made
    finally:
        made.close()


def sums(joined: World, count: int = COUNT) -> list[Any]:
    def one(rank: int, group: Any) -> Any:
        buffer = np.random.default_rng(rank).standard_normal(count).astype(np.float32)
        group.all_reduce(buffer, "float32").wait()
        return buffer

    return joined.run(one)


def connections() -> set[str]:
    """Of this process: the inodes of its TCP sockets that are connected."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if match := re.fullmatch(r"socket:\[(\d+)\]", target):
            inodes.add(match[1])
    with open("/proc/self/net/tcp") as file:
        rows = [line.split() for line in list(file)[1:]]
    return {row[9] for row in rows if row[3] == "01" and row[9] in inodes}


@pytest.mark.parametrize("streams", [1, 2, 7, 32])
def test_results_are_those_of_one_connection_and_nothing_is_left(streams: int) -> None:
    with job(3, 1) as joined:
        expected = sums(joined)
    before = connections()
    with job(3, streams) as joined:
        assert len(connections() - before) == 3 * 2 * streams  # three pairs, both ends of each
        for bits in sums(joined):
            assert bits.tobytes() == expected[0].tobytes()
    assert connections() == before


def test_automatically_one_connection_where_ranks_are_near() -> None:
    before = connections()
    with job(2, 0) as joined:
        assert len(connections() - before) == 2
        sums(joined, 100)


def test_whatever_a_faulty_channel_does() -> None:
    with job(3, 5, fault_seed=11) as joined:
        first, *others = sums(joined)
        assert all(first.tobytes() == other.tobytes() for other in others)


def test_pairs_that_connect_later_have_them_too() -> None:
    before = connections()
    with job(6, 3, full_mesh_ranks=1) as joined:
        first, *others = sums(joined, 50_000)
        assert all(first.tobytes() == other.tobytes() for other in others)
        assert len(connections() - before) % (2 * 3) == 0


@pytest.mark.parametrize("which", range(3))
def test_one_that_is_cut_is_a_lost_peer_on_both_ranks(which: int) -> None:
    before = connections()
    with job(2, 3, heal_ms=0) as joined:
        sums(joined, 1000)
        ours = sorted(connections() - before)
        cut(ours[2 * which])
        began = time.monotonic()

        def hear(rank: int, group: Any) -> None:
            buffer = np.ones(5_000_000, np.float32)
            with pytest.raises(PeerLostError, match=f"rank {1 - rank} "):
                group.all_reduce(buffer, "float32").wait()

        joined.run(hear)
        assert time.monotonic() - began < 2.0


@pytest.mark.parametrize("which", range(3))
def test_one_that_is_cut_heals(which: int) -> None:
    with job(2, 1) as joined:
        expected = sums(joined)
    before = connections()
    with job(2, 3) as joined:
        for cut_one in (-1 - which, 0, 0):  # it goes on with one connection
            cut(sorted(connections() - before)[cut_one])
            began = time.monotonic()
            for bits in sums(joined):
                assert bits.tobytes() == expected[0].tobytes()
            assert time.monotonic() - began < 2.0


def cut(inode: str) -> None:
    """As a middlebox does that has forgotten a connection: it ends, both ways."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # of the listing itself
            if os.readlink(f"/proc/self/fd/{name}") == f"socket:[{inode}]":
                with socket.socket(fileno=os.dup(int(name))) as found:
                    found.shutdown(socket.SHUT_RDWR)
                return
    raise AssertionError("no such connection")
