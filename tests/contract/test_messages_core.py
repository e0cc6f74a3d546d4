"""Sends and receives of the core, ranks as threads: matched by sender, receiver, tag and count, whatever the order."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.contract.core_ranks import close_worlds, core, world
from tests.helpers import need

need("hypothesis")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from ringdp.errors import MismatchError, RingTimeoutError  # noqa: E402

SIZES = (0, 1, 1009, 16_384, 16_385, 70_000)  # float32: up to 16,384 goes unasked
ANYBODY = -1


@pytest.fixture(scope="module", autouse=True)
def _end_worlds() -> Iterator[None]:
    yield
    close_worlds()


def message(source: int, tag: int, index: int, count: int) -> Any:
    return np.full(count, 1000.0 * source + 100.0 * tag + index, np.float32)


@pytest.mark.parametrize("size", (2, 3, 5))
def test_every_size_both_ways(size: int) -> None:
    def body(rank: int, group: Any) -> None:
        others = [other for other in range(size) if other != rank]
        got = {(other, i): np.zeros(count, np.float32) for other in others for i, count in enumerate(SIZES)}
        works = [group.receive(got[other, i], "float32", other) for other, i in got]
        for i, count in enumerate(SIZES):
            works += [group.send(message(rank, 0, i, count), "float32", other) for other in others]
        for work in works:
            work.wait()
        for (other, i), block in got.items():
            assert np.array_equal(block, message(other, 0, i, SIZES[i])), (other, SIZES[i])

    world(size).run(body)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_order_of_calls(data: st.DataObject) -> None:
    """Ranks issue the same messages, with collectives between them, each in an order of its own."""
    size = data.draw(st.sampled_from((2, 3, 4)), label="world")
    pairs = list(itertools.permutations(range(size), 2))
    kinds = st.tuples(st.sampled_from(pairs), st.integers(0, 2), st.sampled_from(SIZES))
    plan = data.draw(st.lists(kinds, min_size=1, max_size=12), label="messages")
    collectives = data.draw(st.integers(0, 3), label="collectives")
    seed = data.draw(st.integers(0, 10_000), label="seed")

    def body(rank: int, group: Any) -> None:
        order = random.Random(f"{seed} {rank}")
        # A queue per (pair, tag, direction), whose order is what matches; the queues are mixed as this rank likes.
        queues: dict[Any, list[Any]] = {}
        for index, ((source, to), tag, count) in enumerate(plan):
            if rank == source:
                queues.setdefault(("send", to, tag), []).append(message(source, tag, index, count))
            if rank == to:
                queues.setdefault(("receive", source, tag), []).append((index, np.zeros(count, np.float32)))
        queues["all_reduce", 0, 0] = [np.full(1000, float(rank), np.float32) for _ in range(collectives)]
        works, received, reduced = [], [], []
        while any(queues.values()):
            kind, peer, tag = order.choice([key for key, waiting in queues.items() if waiting])
            block = queues[kind, peer, tag].pop(0)
            if kind == "send":
                works.append(group.send(block, "float32", peer, tag=tag))
            elif kind == "receive":
                received.append((peer, tag, *block))
                works.append(group.receive(block[1], "float32", peer, tag=tag))
            else:
                reduced.append(block)
                works.append(group.all_reduce(block, "float32"))
        order.shuffle(works)
        for work in works:
            work.wait()
        for source, tag, index, block in received:
            assert np.array_equal(block, message(source, tag, index, len(block))), (source, tag, index)
        for block in reduced:
            assert set(block.tolist()) == {size * (size - 1) / 2}

    world(size).run(body)


@pytest.mark.parametrize("count", (0, 5, 70_000))
def test_from_anybody(count: int) -> None:
    """Every message arrives once, in its sender's order, and the work says whose it was."""
    size, each = 4, 5

    def body(rank: int, group: Any) -> None:
        if rank > 0:
            works = [group.send(message(rank, 1, i, count), "float32", 0, tag=1) for i in range(each)]
        else:
            blocks = [np.zeros(count, np.float32) for _ in range(each * (size - 1))]
            works = [group.receive(block, "float32", ANYBODY, tag=1) for block in blocks]
        for work in works:
            work.wait()
        if rank == 0:
            seen = dict.fromkeys(range(1, size), 0)
            for work, block in zip(works, blocks, strict=True):
                source = work.source()
                assert np.array_equal(block, message(source, 1, seen[source], count))
                seen[source] += 1
            assert set(seen.values()) == {each}

    world(size).run(body)


def test_who_was_posted_first_gets_the_first_message() -> None:
    """A receive from a certain rank, behind one from anybody with the same tag, does not take its message away."""

    def body(rank: int, group: Any) -> None:
        if rank == 1:
            for index in range(2):
                group.send(message(1, 0, index, 3), "float32", 0).wait()
        elif rank == 0:
            first, second = np.zeros(3, np.float32), np.zeros(3, np.float32)
            works = [group.receive(first, "float32", ANYBODY), group.receive(second, "float32", 1)]
            for work in works:
                work.wait()
            assert (first[0], second[0]) == (message(1, 0, 0, 1)[0], message(1, 0, 1, 1)[0])

    world(3).run(body)


def test_large_messages_both_ways_at_once_do_not_block() -> None:
    """Each rank sends before it receives, more than all buffers between them hold."""
    count = 4_000_000

    def body(rank: int, group: Any) -> None:
        got = np.zeros(count, np.float32)
        sending = group.send(message(rank, 0, 0, count), "float32", 1 - rank)
        group.receive(got, "float32", 1 - rank).wait()
        sending.wait()
        assert np.array_equal(got, message(1 - rank, 0, 0, count))

    world(2).run(body)


def test_a_flood_that_nobody_receives_yet_does_not_stop_the_others() -> None:
    """More small messages than the receiver stores unasked, then a collective, then the messages."""
    count, each = 16_000, 40

    def body(rank: int, group: Any) -> None:
        works = []
        if rank == 0:
            works = [group.send(message(0, 0, i, count), "float32", 1) for i in range(each)]
        ones = np.ones(100_000, np.float32)
        group.all_reduce(ones, "float32").wait()
        assert ones[0] == 2.0
        if rank == 1:
            for index in range(each):
                block = np.zeros(count, np.float32)
                group.receive(block, "float32", 0).wait()
                assert np.array_equal(block, message(0, 0, index, count))
        for work in works:
            work.wait()

    world(2).run(body)


def fresh_group(size: int, name: str, timeout_ms: int = 20_000) -> list[Any]:
    ranks = world(size)
    return [core.Group(runtime, name, list(range(size)), timeout_ms=timeout_ms) for runtime in ranks.runtimes]


@pytest.mark.parametrize("source", (0, ANYBODY))
def test_the_ends_must_agree(source: int) -> None:
    groups = fresh_group(2, f"ends {source}")
    texts: dict[int, str] = {}

    def disagree(rank: int) -> None:
        if rank == 0:
            groups[0].send(np.ones(10, np.float32), "float32", 1, tag=3).wait()
        else:
            groups[1].receive(np.zeros(12, np.float64), "float64", source, tag=3).wait()
        groups[rank].barrier().wait()  # a small send has left before anybody can object

    def body(rank: int, _: Any) -> None:
        with pytest.raises(MismatchError) as caught:
            disagree(rank)
        texts[rank] = str(caught.value)

    world(2).run(body)
    for text in texts.values():
        assert all(word in text for word in ("float32[10]", "float64[12]", "tag 3")), text


def test_a_receive_that_nobody_answers_names_whom_it_waits_for() -> None:
    groups = fresh_group(3, "silent", timeout_ms=500)

    def body(rank: int, _: Any) -> None:
        if rank != 0:
            return
        block = np.zeros(4, np.float32)
        start = time.monotonic()
        with pytest.raises(RingTimeoutError) as caught:
            groups[0].receive(block, "float32", 2, tag=1).wait()
        assert caught.value.peer == 2
        assert time.monotonic() - start < 2.0

    world(3).run(body)
    others = fresh_group(3, "silent too", timeout_ms=500)

    def anybody(rank: int, _: Any) -> None:
        if rank == 0:
            with pytest.raises(RingTimeoutError, match=r"recv from any rank .*waiting for a message from any rank"):
                others[0].receive(np.zeros(4, np.float32), "float32", ANYBODY, tag=1).wait()

    world(3).run(anybody)
    for group in (*groups, *others):
        group.close()
