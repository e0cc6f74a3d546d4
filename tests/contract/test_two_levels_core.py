"""All-reduce of ranks on several hosts, several on some of them: the documented order to the bit, the same whatever the
network does, and no byte twice to the same host. Ranks are threads; their hosts are what they say when they meet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.contract.core_checks import SHARED_HOSTS, Case, check_all_reduce, expect_equal
from tests.contract.core_ranks import BUILT_IN, NEVER_SMALL, World, close_worlds, core, world
from tests.contract.reduction_order import (
    in_rank_order,
    in_ring_order,
    in_two_levels,
    narrow,
    random_input,
    same_bits,
)

MORE_OF_A_KIND = ("interleaved", "1+2", "3x2", "2x4")
every_layout = pytest.mark.parametrize(
    "hosts",
    [
        pytest.param(hosts, id=name, marks=[pytest.mark.ci] if name in MORE_OF_A_KIND else [])
        for name, hosts in SHARED_HOSTS.items()
    ],
)
BLOCK_BYTES = 128 * 1024


@pytest.fixture(scope="module", autouse=True)
def _end_worlds() -> Iterator[None]:
    yield
    close_worlds()


def on(hosts: tuple[int, ...]) -> World:
    return world(len(hosts), hosts)


def test_many_shares_of_the_longest_blocks() -> None:
    hosts = SHARED_HOSTS["2+1+1"]
    longest = 4 * max(map(hosts.count, hosts)) * BLOCK_BYTES * len(set(hosts))
    cases = [Case("float32", "AVG", longest // 4 + off, seed=5) for off in (0, 1)]
    check_all_reduce(on(hosts), NEVER_SMALL, [*cases, Case("bfloat16", "SUM", longest * 3 // 4 + 17, seed=5)])


def test_groups_know_who_shares_a_host() -> None:
    ranks = on(SHARED_HOSTS["mixed"])
    members = [7, 2, 4, 0, 6]

    def body(rank: int, group: Any) -> list[int] | None:
        assert group.hosts == list(SHARED_HOSTS["mixed"])
        if rank not in members:
            return None
        some = core.Group(ranks.runtimes[rank], "some", members, table=dict(NEVER_SMALL))
        hosts: list[int] = some.hosts
        x = random_input("float32", "SUM", 100_000, (rank,))
        some.all_reduce(x.view(np.uint8), "float32").wait()
        inputs = [random_input("float32", "SUM", 100_000, (member,)) for member in members]
        expect_equal([x], [in_two_levels(inputs, "float32", "SUM", hosts)], "a group of some ranks")
        some.close()
        return hosts

    for rank, hosts in enumerate(ranks.run(body)):
        assert hosts == ([0, 0, 1, 1, 2] if rank in members else None)


def test_where_the_table_takes_it() -> None:
    def taken(hosts: tuple[int, ...], bytes_: int) -> str:
        name: str = core.all_reduce_algorithm(len(hosts), "float32", bytes_, hosts=list(hosts))
        return name

    for hosts in SHARED_HOSTS.values():
        limit, even = 24 * 1024 // (len(hosts) - 1), len({hosts.count(host) for host in hosts}) == 1
        assert [taken(hosts, limit), taken(hosts, limit + 4)] == ["fold", "halving" if even else "two_level"]
        assert taken(hosts, 64 * 1024 * len(hosts) + 4) == "two_level"
        for count in (limit // 4, limit // 4 + 1):
            check_all_reduce(on(hosts), BUILT_IN, [Case("float32", "SUM", count, seed=1)])
    for alone in ((0, 0, 0, 0), (0, 1, 2, 3)):
        assert taken(alone, 10_000_000) == "ring"


def test_a_mean_of_large_halves_does_not_overflow_on_its_way() -> None:
    hosts = SHARED_HOSTS["2x2"]
    buffers = [np.full(5000, 60_000.0, np.float16) for _ in hosts]
    on(hosts).run(
        lambda rank, group: group.all_reduce(buffers[rank].view(np.uint8), "float16", "AVG").wait(), NEVER_SMALL
    )
    assert {float(x) for buffer in buffers for x in np.unique(buffer)} == {60_000.0}


def test_the_order_shows_in_the_bits() -> None:
    """The oracle tells the orders apart, so that no other algorithm passes for this one, and no other map of hosts."""
    inputs = [narrow(np.array([x] * 64), "float32") for x in (1e8, 1.0, -1e8, 1.0)]
    results = [in_rank_order(inputs, "float32", "SUM"), in_ring_order(inputs, "float32", "SUM")]
    results += [in_two_levels(inputs, "float32", "SUM", hosts) for hosts in ((0, 0, 1, 1), (0, 1, 0, 1))]
    assert not any(same_bits(a, b) for i, a in enumerate(results) for b in results[:i])
    halves = [narrow(np.array([x]), "float16") for x in (2048.0, 1.0, 1.0, 1.0)]
    assert in_two_levels(halves, "float16", "SUM", (0, 0, 1, 1))[0] == 2050.0  # 2049 is rounded to 2048 on its host
    assert in_rank_order(halves, "float16", "SUM")[0] == 2052.0


@every_layout
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_byte_goes_to_a_host_twice(hosts: tuple[int, ...], dtype: str) -> None:
    """2(h-1)/h of the buffer leave each host, whatever the number of its ranks, but for headers."""
    ranks, size = on(hosts), 6 * 1024 * 1024

    def sent() -> list[int]:
        """By each host to all others."""
        out = dict.fromkeys(hosts, 0)
        for rank, runtime in enumerate(ranks.runtimes):
            out[hosts[rank]] += sum(
                runtime.bytes_sent_to(peer) for peer in range(len(hosts)) if hosts[peer] != hosts[rank]
            )
        return list(out.values())

    before = sent()
    ranks.run(lambda _, group: group.all_reduce(np.ones(size, np.uint8), dtype).wait(), BUILT_IN)
    ranks.run(lambda _, group: group.barrier().wait(), BUILT_IN)
    h = len(before)
    least = 2 * (h - 1) / h * size
    for host, bytes_ in enumerate(np.subtract(sent(), before)):
        assert least <= bytes_ <= 1.02 * least, f"host {host} sent {bytes_ / least} of what it must"

    before, chunk = sent(), 512 * 1024
    chunks = [np.ones(chunk, np.uint8) for _ in hosts]
    ranks.run(lambda _, group: group.reduce_scatter(chunks, np.ones(chunk, np.uint8), dtype).wait(), BUILT_IN)
    ranks.run(lambda _, group: group.barrier().wait(), BUILT_IN)
    for host, bytes_ in zip(dict.fromkeys(hosts), np.subtract(sent(), before), strict=True):
        least = chunk * (len(hosts) - hosts.count(host))
        assert least <= bytes_ <= 1.02 * least, f"reduce-scatter: host {host} sent {bytes_ / least} of what it must"
