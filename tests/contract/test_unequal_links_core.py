"""A job's map of unequal links: what each host owns by it, the bits that follow, what stays as it is, who is told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from ringdp.errors import HandshakeError, PeerLostError
from tests.contract.core_checks import expect_equal
from tests.contract.core_ranks import World, core
from tests.contract.reduction_order import in_rank_order
from tests.contract.test_compressed_core import Case, check
from tests.helpers import need

need("hypothesis")
from hypothesis import HealthCheck, example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

SLOW = (1000, 1000, 1000, 100)
COUNT = 60_007


@contextmanager
def ranks_on(hosts: Sequence[int], uplinks: Sequence[int], **options: Any) -> Iterator[World]:
    world = World(len(hosts), hosts=hosts, uplinks=uplinks, **options)
    try:
        yield world
    finally:
        world.close()


def seconds(rates: Sequence[int], shares: Sequence[float]) -> float:
    """Of the busiest link, for one byte: docs/reference/algorithms.md."""
    return max((1 + (len(rates) - 2) * share) / rate for rate, share in zip(rates, shares, strict=True))


def least_seconds(rates: Sequence[int]) -> float:
    """The linear program's bound, by bisection: the time at which the links could carry shares that add up to 1."""
    low, high = 0.0, 2.0 / min(rates)
    for _ in range(100):
        middle = (low + high) / 2
        enough = sum(max(0.0, middle * rate - 1) for rate in rates) >= len(rates) - 2
        low, high = (low, middle) if enough else (middle, high)
    return max(high, 1 / min(rates))


# ---- What each host owns ----


@given(st.lists(st.integers(1, 1000), min_size=3, max_size=12))
@example([*SLOW])
@settings(max_examples=300, deadline=None, derandomize=True, database=None)
def test_shares_take_as_long_as_the_linear_programs_bound(rates: list[int]) -> None:
    weights, least = core.owner_weights(rates), least_seconds(rates)
    equal = seconds(rates, [1 / len(rates)] * len(rates))
    if not weights:
        assert equal <= 1.101 * least
        return
    assert equal >= 1.099 * least
    assert seconds(rates, [weight / sum(weights) for weight in weights]) <= 1.001 * least


def test_only_the_ratios_of_rates_count() -> None:
    assert core.owner_weights(SLOW) == core.owner_weights([rate * 125_000 for rate in SLOW])
    *fast, slow = core.owner_weights(SLOW)
    assert slow == 0
    assert len(set(fast)) == 1
    assert core.owner_weights([2**50, 2**50, 1]) == core.owner_weights([2**40, 2**40, 1])


@pytest.mark.parametrize("rates", [[7], [1, 1000], [5, 5, 5], [100, 97, 103, 99]])
def test_hosts_that_would_gain_little_own_alike(rates: list[int]) -> None:
    assert core.owner_weights(rates) == []


# ---- Results ----


@st.composite
def maps(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """The host of each of 3 to 7 ranks on 3 hosts or more, and the hosts' links, which make them own unlike parts."""
    size = draw(st.integers(3, 7))
    count = draw(st.integers(3, size))
    hosts = draw(
        st.permutations(
            [*range(count), *draw(st.lists(st.integers(0, count - 1), min_size=size - count, max_size=size - count))]
        )
    )
    rates = draw(st.lists(st.integers(1, 20), min_size=count, max_size=count))
    if not core.owner_weights(rates):
        rates[draw(st.integers(0, count - 1))] *= 100
    return list(hosts), rates


@given(
    map_of=maps(),
    codec=st.sampled_from(["int8", "int4", "bfloat16"]),
    counts=st.lists(st.sampled_from([0, 1, 257, 4_097, 70_001]), min_size=1, max_size=4),
    feedback=st.booleans(),
    seed=st.integers(0, 99),
)
@example(map_of=([0, 1, 2, 3], [*SLOW]), codec="int8", counts=[300_001, 256, 3], feedback=True, seed=0)
@example(map_of=([3, 0, 1, 2, 0, 3], [*SLOW]), codec="int8", counts=[70_001], feedback=True, seed=0)
@settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
def test_bits_are_those_of_the_documented_order(
    map_of: tuple[list[int], list[int]], codec: str, counts: list[int], feedback: bool, seed: int
) -> None:
    """Codes, and exact sums: in rank order with one rank on each host, else host after host."""
    hosts, rates = map_of
    with ranks_on(hosts, rates) as ranks:
        check(Case(ranks, codec, counts, feedback=feedback, seed=seed))
        for dtype in ("float32", "int64"):
            buffers = [
                np.random.default_rng((seed, rank)).normal(0, 9, COUNT).astype(dtype) for rank in range(len(hosts))
            ]
            of_hosts = [
                in_rank_order(
                    [x for x, its in zip(buffers, hosts, strict=True) if its == host], dtype, "SUM", divisor=1
                )
                for host in dict.fromkeys(hosts)
            ]
            wanted = in_rank_order(of_hosts, dtype, "SUM", divisor=1)
            ranks.run(lambda rank, group: group.all_reduce(buffers[rank], dtype).wait())  # noqa: B023
            expect_equal(buffers, [wanted] * len(hosts), f"{dtype} on {hosts}, links {rates}")


@pytest.mark.parametrize("far", [False, True], ids=["", "far apart"])
@pytest.mark.parametrize("off", [-1, 1])
def test_two_levels_of_many_shares(off: int, far: bool) -> None:
    """Blocks of the hosts that own most are as long as a receiver holds."""
    hosts, rates = (0, 0, 1, 1, 2, 2, 3, 3), (1000, 100, 1000, 500)
    count = 4 * 8 * 128 * 1024 // 4 + off
    x = [np.random.default_rng(rank).standard_normal(count).astype(np.float32) for rank in range(8)]
    of_hosts = [x[rank] + x[rank + 1] for rank in range(0, 8, 2)]
    wanted = ((of_hosts[0] + of_hosts[1]) + of_hosts[2]) + of_hosts[3]
    half = [it.astype(np.float16) for it in x]
    coded = [it.copy() for it in x]
    with ranks_on(hosts, rates, table={"far_round_trip_us": 1} if far else {}) as ranks:
        ranks.run(lambda rank, group: group.all_reduce(x[rank], "float32").wait())
        ranks.run(lambda rank, group: group.all_reduce(half[rank], "float16").wait())
        ranks.run(lambda rank, group: group.all_reduce_compressed([coded[rank]], [3], "int8")[0].wait())
    expect_equal(coded, coded[:1] * 8, "codes on 8 ranks")
    expect_equal(x, [wanted] * 8, "8 ranks on 4 hosts")
    expect_equal(half, half[:1] * 8, "half types on 8 ranks")


@pytest.mark.parametrize("hosts", [(0, 1, 2, 3), (0, 1, 2, 3, 3)], ids=["alone", "two ranks on the slow host"])
@pytest.mark.parametrize("codec", ["", "int8"])
def test_a_host_that_owns_nothing_sends_its_data_once(hosts: tuple[int, ...], codec: str) -> None:
    """Of S bytes (or their codes) S leave a slow host, not 2 (h-1)/h · S."""
    count = 400_000
    size = core.codec_bytes(codec, count) if codec else 4 * count
    slow = [rank for rank, host in enumerate(hosts) if host == 3]
    others = [rank for rank, host in enumerate(hosts) if host != 3]

    def sent(uplinks: Sequence[int]) -> float:
        """By the slow host to others, over S."""
        with ranks_on(hosts, uplinks) as ranks:
            x = [np.ones(count, np.float32) for _ in hosts]

            def leaving() -> int:
                return sum(ranks.runtimes[rank].bytes_sent_to(other) for rank in slow for other in others)

            def body(rank: int, group: Any) -> None:
                if codec:
                    group.all_reduce_compressed([x[rank]], [0], codec)[0].wait()
                else:
                    group.all_reduce(x[rank], "float32").wait()
                group.barrier().wait()

            before = leaving()
            ranks.run(body)
            return (leaving() - before) / size

    assert 1 < sent(SLOW) < 1.02
    assert 1.48 < sent((1, 1, 1, 1)) < 1.53


def test_without_a_map_or_with_equal_links_nothing_changes() -> None:
    def bits(uplinks: Sequence[int]) -> list[bytes]:
        x = [np.random.default_rng(rank).standard_normal(COUNT).astype(np.float32) for rank in range(4)]
        y = [it.copy() for it in x]
        with ranks_on((0, 1, 2, 3), uplinks) as ranks:
            ranks.run(lambda rank, group: group.all_reduce(x[rank], "float32").wait())
            ranks.run(lambda rank, group: group.all_reduce_compressed([y[rank]], [5], "int8")[0].wait())
        return [it.tobytes() for it in (*x, *y)]

    assert bits(()) == bits((300, 301, 299, 300))
    assert bits(()) != bits(SLOW)


def test_in_rank_order_codes_do_not_depend_on_the_map() -> None:
    """Groups that promise the same bits on any hosts."""

    def bits(uplinks: Sequence[int]) -> list[bytes]:
        x = [np.random.default_rng(rank).standard_normal(COUNT).astype(np.float32) for rank in range(4)]
        y = [it.copy() for it in x]

        def body(rank: int, group: Any) -> None:
            group.add_in_rank_order()
            group.all_reduce_compressed([x[rank]], [7], "int8")[0].wait()
            group.all_reduce(y[rank], "float32").wait()

        with ranks_on((0, 1, 2, 3), uplinks) as ranks:
            ranks.run(body)
        return [it.tobytes() for it in (*x, *y)]

    assert bits(()) == bits(SLOW)


def test_a_group_has_the_weights_of_its_own_hosts() -> None:
    """As an elastic job's next view has: without the slow host the others own alike, and the bits are those."""
    x = [np.random.default_rng(rank).standard_normal(COUNT).astype(np.float32) for rank in range(4)]
    y = [it.copy() for it in x]

    def some(rank: int, world: World, buffers: list[Any]) -> None:
        if rank == 3:
            return
        group = core.Group(world.runtimes[rank], "some", [0, 1, 2], timeout_ms=20_000)
        group.all_reduce_compressed([buffers[rank]], [5], "int8")[0].wait()
        group.close()

    with ranks_on((0, 1, 2, 3), SLOW) as ranks:
        ranks.each(lambda rank: some(rank, ranks, x))
    with ranks_on((0, 1, 2, 3), ()) as ranks:
        ranks.each(lambda rank: some(rank, ranks, y))
    expect_equal(x, y, "three hosts alike of four")


# ---- Faults ----


def test_ranks_with_other_maps_are_refused_with_both_and_their_files() -> None:
    store = core.MemoryStore()
    tables = [{"uplink.a": 125, "uplink.b": 1250}, {"uplink.a": 125, "uplink.b": 2500}]

    def join(rank: int) -> None:
        with pytest.raises(HandshakeError) as caught:
            core.Runtime(store, rank, 2, table=tables[rank], table_source=f"file {rank}", timeout_ms=10_000)
        assert "uplink.b=1250 at rank 0 (file 0), uplink.b=2500 at rank 1 (file 1)" in str(caught.value)
        assert "uplink.a" not in str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(join, range(2)))


@pytest.mark.parametrize("victim", [0, 3], ids=["an owner", "the host that owns nothing"])
def test_all_hear_of_a_rank_that_leaves_in_the_middle(victim: int) -> None:
    """Exact sums and codes in flight: none hangs, and each names the rank."""
    begun = threading.Barrier(4)

    def body(call: Callable[[Any, Any], Any]) -> Callable[[int, Any], str]:
        def on(rank: int, group: Any) -> str:
            x = np.ones(4_000_000, np.float32)
            call(group, x).wait()
            begun.wait(20)
            if rank == victim:
                ranks.runtimes[rank].shut_down()
                return ""
            with pytest.raises(PeerLostError) as caught:
                call(group, x).wait()
            return str(caught.value)

        return on

    for call in (
        lambda group, x: group.all_reduce(x, "float32"),
        lambda group, x: group.all_reduce_compressed([x], [0], "int8")[0],
    ):
        with ranks_on((0, 1, 2, 3), SLOW) as ranks:
            told = ranks.run(body(call))
        assert all(f"rank {victim} (host h{victim}" in words for rank, words in enumerate(told) if rank != victim)


def test_a_nonsense_map_is_refused() -> None:
    with pytest.raises(ValueError, match=r"uplink\.a is 0 bytes a second"):
        core.Runtime(core.MemoryStore(), 0, 1, table={"uplink.a": 0})
