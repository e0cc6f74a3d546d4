"""Hosts that are far apart: sites that ranks name, and what a long round trip changes: results, bytes, who is told."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from ringdp.errors import HandshakeError
from tests.contract.core_ranks import core

FAR = {"far_round_trip_us": 1}  # loopback's round trip then counts as long
COUNT = 60_007


@contextmanager
def job(
    hosts: Sequence[str], sites: Sequence[str] | None = None, table: Mapping[str, int] | None = None
) -> Iterator[list[Any]]:
    """A group of ranks, threads of this process, that meet as ranks of these hosts and sites."""
    store, size = core.MemoryStore(), len(hosts)

    def join(rank: int) -> tuple[Any, Any]:
        site = sites[rank] if sites else ""
        runtime = core.Runtime(
            store,
            rank,
            size,
            host_id=hosts[rank],
            site=site,
            transport="tcp",
            table=dict(table or {}),
            timeout_ms=10_000,
        )
        return runtime, core.Group(runtime, "g", list(range(size)), timeout_ms=20_000)

    with ThreadPoolExecutor(size) as pool:
        joined = list(pool.map(join, range(size)))
        try:
            yield joined
        finally:
            list(pool.map(lambda one: (one[1].close(), one[0].shut_down()), joined))


def on_all(joined: Sequence[Any], body: Any) -> list[Any]:
    with ThreadPoolExecutor(len(joined)) as pool:
        return list(pool.map(lambda rank: body(rank, joined[rank][1]), range(len(joined))))


def inputs(size: int) -> list[Any]:
    return [np.random.default_rng(rank).standard_normal(COUNT).astype(np.float32) for rank in range(size)]


def reduced(joined: Sequence[Any], op: str = "SUM") -> Any:
    """What all ranks have after an all-reduce of `inputs`: the same bits, or the test fails."""
    buffers = inputs(len(joined))
    on_all(joined, lambda rank, group: group.all_reduce(buffers[rank], "float32", op).wait())
    for rank, other in enumerate(buffers):
        assert other.tobytes() == buffers[0].tobytes(), f"rank {rank} differs from rank 0"
    return buffers[0]


def test_float32_goes_in_pairs_where_a_round_trip_is_long() -> None:
    x = inputs(4)
    in_rank_order = ((x[0] + x[1]) + x[2]) + x[3]
    with job("abcd", table=FAR) as far:
        assert reduced(far).tobytes() == in_rank_order.tobytes()
        assert reduced(far, "AVG").tobytes() == (in_rank_order / np.float32(4)).tobytes()
    with job("abcd", table={"pairwise_bytes": 0, "halving_rank_bytes": 0}) as near:
        ring = reduced(near)
    assert ring.tobytes() != in_rank_order.tobytes()
    np.testing.assert_allclose(ring, in_rank_order, rtol=1e-4, atol=1e-5)


def test_a_round_trip_inside_a_host_changes_nothing() -> None:
    with job("aaaa", table=FAR) as here, job("aaaa") as usual:
        assert reduced(here).tobytes() == reduced(usual).tobytes()


def test_two_levels_exchange_in_pairs_between_far_hosts() -> None:
    """Every block in the order of the hosts, where a ring between three hosts begins each block at another."""
    x = inputs(5)
    by_host = [x[0] + x[1], x[2], x[3] + x[4]]
    in_host_order = (by_host[0] + by_host[1]) + by_host[2]
    with job("aabcc", table=FAR) as far:
        assert reduced(far).tobytes() == in_host_order.tobytes()
        assert reduced(far, "AVG").tobytes() == (in_host_order / np.float32(5)).tobytes()
    with job("aabcc") as near:
        assert reduced(near).tobytes() != in_host_order.tobytes()


@pytest.mark.parametrize("hosts", ["abc", "aabb"])
def test_long_buffers_go_as_far_as_the_path_holds(hosts: str) -> None:
    """Longer than what peers may have under way between hosts that are near; bits are as between those."""
    count = 6_000_000

    def on(table: Mapping[str, int]) -> list[bytes]:
        x = [np.random.default_rng(rank).standard_normal(count).astype(np.float32) for rank in range(len(hosts))]
        half = [it.astype(np.float16) for it in x]
        with job(hosts, table=table) as joined:
            on_all(joined, lambda rank, group: group.all_reduce_compressed([x[rank]], [3], "int8")[0].wait())
            on_all(joined, lambda rank, group: group.all_reduce(half[rank], "float16", "AVG").wait())
        return [it.tobytes() for it in x + half]

    far = on(FAR)
    assert far == on({})
    assert far == far[:1] * len(hosts) + far[-1:] * len(hosts)


def test_pairs_may_be_asked_for_at_any_distance() -> None:
    def taken(size_bytes: int, **table: int) -> str:
        name: str = core.all_reduce_algorithm(4, "float32", size_bytes, table=table, hosts=[0, 1, 2, 3])
        return name

    limit = 2**20
    assert [taken(limit, pairwise_bytes=limit), taken(limit + 4, pairwise_bytes=limit)] == ["pairwise", "halving"]
    assert taken(limit, pairwise_bytes=limit, direct_ranks=3) == "halving"  # they need a connection for every pair


@pytest.mark.parametrize("sites", ["AABB", "ABAB", "AAAB"])
def test_ranks_of_a_site_count_as_one_host(sites: str) -> None:
    x = inputs(4)
    members = [[rank for rank in range(4) if sites[rank] == site] for site in "AB"]
    by_site = []
    for ranks in members:
        total = x[ranks[0]].copy()
        for rank in ranks[1:]:
            total += x[rank]
        by_site.append(total)
    with job("abcd", sites) as joined:
        assert joined[0][1].hosts == ["AB".index(site) for site in sites]
        assert reduced(joined).tobytes() == (by_site[0] + by_site[1]).tobytes()


def test_one_site_for_all_is_as_good_as_none() -> None:
    with job("abcd", "AAAA") as named, job("abcd") as unnamed:
        assert named[0][1].hosts == [0, 1, 2, 3]
        assert reduced(named).tobytes() == reduced(unnamed).tobytes()


@pytest.mark.parametrize("per_site", [1, 2, 3])
@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_one_code_crosses_between_sites_however_many_hosts_they_have(per_site: int, codec: str) -> None:
    """In each direction; without sites it is n/2 codes."""
    size, count = 2 * per_site, 1_000_000
    sites = "A" * per_site + "B" * per_site
    with job([str(rank) for rank in range(size)], sites) as joined:

        def crossed() -> list[int]:
            sent = dict.fromkeys("AB", 0)
            for rank, (runtime, _) in enumerate(joined):
                sent[sites[rank]] += sum(
                    runtime.bytes_sent_to(peer) for peer in range(size) if sites[peer] != sites[rank]
                )
            return list(sent.values())

        x = [[np.random.default_rng(rank).standard_normal(count).astype(np.float32)] for rank in range(size)]
        before = crossed()
        on_all(joined, lambda rank, group: group.all_reduce_compressed(x[rank], [3], codec)[0].wait())
        code = core.codec_bytes(codec, count)
        for bytes_ in np.subtract(crossed(), before):
            assert code <= bytes_ <= 1.02 * code
        for rank in range(size):
            assert x[rank][0].tobytes() == x[0][0].tobytes()


def test_a_rank_without_a_site_is_told_on_all_ranks() -> None:
    store = core.MemoryStore()

    def join(rank: int) -> str:
        site = "paris" if rank != 1 else ""
        with pytest.raises(HandshakeError) as caught:
            core.Runtime(store, rank, 3, host_id=str(rank), site=site, timeout_ms=10_000)
        return str(caught.value)

    with ThreadPoolExecutor(3) as pool:
        for words in pool.map(join, range(3)):
            for part in ("has RINGDP_SITE=paris", "rank 1 ", "has none", "on the ranks of every host, or on none"):
                assert part in words
