"""Meetings by handles, which torch's reconfigure is built on: any set of ranks, again and again, without a store."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from ringdp.errors import HandshakeError, InvalidArgumentError, InvalidStateError, PeerLostError, RingTimeoutError
from tests.contract.core_ranks import core
from tests.fault.launch_jobs import wait_until

PREFIX = "ringdp-handle-"

pytestmark = pytest.mark.timeout(60)


class Party:
    """Ranks as threads: each has a Reconfiguration, and the runtimes of its last meeting."""

    def __init__(self, size: int, **options: Any) -> None:
        self.ranks = [core.Reconfiguration(**options) for _ in range(size)]
        self.handles = [it.handle() for it in self.ranks]
        self.runtimes: dict[int, Any] = {}
        self._threads = ThreadPoolExecutor(size)
        self._uuids = itertools.count(100)

    def start(self, who: Sequence[int], handles: Sequence[str], uuid: int, **options: Any) -> list[Future[Any]]:
        return [self._threads.submit(self.ranks[i].meet, uuid, list(handles), **options) for i in who]

    def meet(self, who: Sequence[int], **options: Any) -> list[tuple[int, int]]:
        """The members `who` meet; their (rank, world), in the order of `who`."""
        uuid = next(self._uuids)
        met = [it.result() for it in self.start(who, [self.handles[i] for i in who], uuid, **options)]
        for i, (_, _, runtime) in zip(who, met, strict=True):
            old = self.runtimes.pop(i, None)
            self.runtimes[i] = runtime
            if old is not None:
                old.shut_down()
        return [(rank, world) for rank, world, _ in met]

    def add_up(self, who: Sequence[int]) -> None:
        """An all-reduce of the members gives the sum of their numbers on each."""

        def body(place: int) -> np.ndarray[Any, Any]:
            group = core.Group(self.runtimes[who[place]], "all", list(range(len(who))))
            mine = np.full(1000, float(who[place] + 1), np.float32)
            group.all_reduce(mine.view(np.uint8), "float32", "SUM").wait(20_000)
            return mine

        for result in self._threads.map(body, range(len(who))):
            assert (result == sum(i + 1 for i in who)).all()

    def close(self) -> None:
        for runtime in self.runtimes.values():
            runtime.shut_down()
        self._threads.shutdown()


@pytest.fixture
def party(request: pytest.FixtureRequest) -> Iterator[Party]:
    made = Party(getattr(request, "param", 4))
    yield made
    made.close()


CHANGES = {
    "identity": ([0, 1, 2, 3], [0, 1, 2, 3]),
    "shrink by the last": ([0, 1, 2, 3], [0, 1, 2]),
    "shrink by one in the middle": ([0, 1, 2, 3], [0, 2, 3]),
    "grow": ([0, 1], [0, 1, 2, 3]),
    "grow and shrink at once": ([0, 1, 2], [3, 0, 2]),
    "another order": ([0, 1, 2, 3], [2, 0, 3, 1]),
    "down to one and up": ([2], [0, 1, 2, 3]),
    "all of them new": ([0, 1], [2, 3]),
}


@pytest.mark.parametrize(("before", "after"), CHANGES.values(), ids=list(CHANGES))
def test_any_members_follow_any_others(party: Party, before: list[int], after: list[int]) -> None:
    for who in (before, after):
        assert party.meet(who) == [(place, len(who)) for place in range(len(who))]
        party.add_up(who)


def test_two_halves_become_one_group_and_part_again(party: Party) -> None:
    for half in ([0, 1], [2, 3]):
        party.meet(half)
    party.meet([0, 1, 2, 3])
    party.add_up([0, 1, 2, 3])
    for half in ([0, 3], [2, 1]):
        party.meet(half)
        party.add_up(half)


def test_without_an_order_all_choose_the_same(party: Party) -> None:
    shuffled = [[0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0], [1, 0, 3, 2]]
    starts = [party.start([i], [party.handles[it] for it in shuffled[i]], 7, ordered=False)[0] for i in range(4)]
    met = [it.result() for it in starts]
    assert sorted(rank for rank, _, _ in met) == [0, 1, 2, 3]
    for _, world, runtime in met:
        assert world == 4
        runtime.shut_down()


def test_a_uuid_serves_once(party: Party) -> None:
    party.start([0], [party.handles[0]], 5)[0].result()[2].shut_down()
    with pytest.raises(InvalidStateError, match="uuid 5 was already used"):
        party.start([0], [party.handles[0]], 5)[0].result()


def test_an_absent_member_is_named_and_the_others_try_again(party: Party) -> None:
    party.meet([0, 1, 2])
    begin = time.monotonic()
    for attempt in party.start([0, 1, 2], party.handles, 50, timeout_ms=1500):
        with pytest.raises((RingTimeoutError, PeerLostError), match=r"reconfigure \(uuid 50\) failed.*another uuid"):
            attempt.result()
    assert time.monotonic() - begin < 15
    party.add_up([0, 1, 2])  # they are what they were
    party.meet([0, 2])
    party.add_up([0, 2])


def test_a_member_that_is_gone_is_known_at_once(party: Party) -> None:
    gone = core.Reconfiguration()
    handle = gone.handle()
    del gone  # its port is closed
    begin = time.monotonic()
    for attempt in party.start([0, 1], [*party.handles[:2], handle], 60, timeout_ms=30_000):
        with pytest.raises((PeerLostError, HandshakeError), match="rank 2"):
            attempt.result()
    assert time.monotonic() - begin < 15


def test_attempts_with_different_uuids_do_not_mix(party: Party) -> None:
    starts = [party.start([i], party.handles[:2], 70 + i, timeout_ms=700)[0] for i in range(2)]
    for attempt in starts:
        with pytest.raises((RingTimeoutError, PeerLostError), match="same new uuid"):
            attempt.result()


def refused(party: Party, handles: Sequence[str], match: str, error: type[Exception] = InvalidArgumentError) -> None:
    begin = time.monotonic()
    with pytest.raises(error, match=match):
        party.start([0], handles, next(party._uuids))[0].result()
    assert time.monotonic() - begin < 5


def test_handles_that_are_no_group(party: Party) -> None:
    own, other = party.handles[:2]
    refused(party, [], "own handle is not among the 0 given")
    refused(party, [other], "own handle is not among")
    refused(party, [own, other, own], "there twice")
    for bad in ("", "nccl2:0:17:1:10.0.0.1:2900", PREFIX, PREFIX + "zz", PREFIX + "00" * 40, own[:-40], own + "0"):
        if bad == own[:-40]:
            continue  # a shorter hello is still a handle; see the secret below
        refused(party, [own, bad], r"handle 1 of 2 is not one of the backend ring")


def changed(handle: str, key: str, value: str) -> str:
    text = bytes.fromhex(handle.removeprefix(PREFIX)).decode()
    lines = [f"{key}={value}" if line.startswith(f"{key}=") else line for line in text.splitlines()]
    return PREFIX + ("\n".join(lines) + "\n").encode().hex()


def test_a_handle_without_the_secret_is_refused() -> None:
    party, stranger = Party(2, secret=b"s" * 32), Party(1, secret=b"t" * 32)
    try:
        party.meet([0, 1])
        party.add_up([0, 1])
        own, other = party.handles
        forged = changed(other, "addresses", "127.0.0.1:9")
        for bad in (forged, stranger.handles[0]):
            refused(party, [own, bad], "not made with this job's secret", HandshakeError)
        open_one = core.Reconfiguration().handle()
        refused(party, [own, open_one], "has no secret file", HandshakeError)
        refused(stranger, [stranger.handles[0], open_one], "has no secret file", HandshakeError)
        assert b"s" * 32 not in bytes.fromhex(own.removeprefix(PREFIX))
    finally:
        party.close()
        stranger.close()


def test_settings_that_differ_are_named_on_both(party: Party) -> None:
    with_checksums = core.Reconfiguration(checksums=True)
    handles = [party.handles[0], with_checksums.handle()]
    for one in (party.ranks[0], with_checksums):
        with pytest.raises(HandshakeError, match=r"RINGDP_CHECKSUM differs: 0 on host .* 1 on host"):
            one.meet(80, handles)


def test_with_tls() -> None:
    party = Party(3, secret=b"s" * 32, transport="tcp", tls=True)
    plain = core.Reconfiguration(secret=b"s" * 32)
    try:
        for who in ([0, 1], [2, 1, 0]):
            party.meet(who)
            party.add_up(who)
            assert {it for i in who for it in party.runtimes[i].transports().values()} == {"tcp, TLS 1.3"}
        handles = [party.handles[0], plain.handle()]
        for one in (party.ranks[0], plain):
            with pytest.raises(
                HandshakeError, match=r"RINGDP_TLS differs: TLS with the job's secret on host .* no TLS on"
            ):
                one.meet(80, handles)
    finally:
        party.close()


def test_strangers_at_the_port_change_nothing(party: Party) -> None:
    text = bytes.fromhex(party.handles[0].removeprefix(PREFIX)).decode()
    addresses = dict(line.split("=", 1) for line in text.splitlines())["addresses"].split(",")
    host, port = next(it for it in addresses if it.startswith("127.")).rsplit(":", 1)
    strangers = []
    for content in (b"", b"GET / HTTP/1.0\r\n\r\n", bytes(range(256)), b"RINGDP\r\n" + bytes(120)):
        stranger = socket.create_connection((host, int(port)))
        stranger.sendall(content)
        strangers.append(stranger)
    party.meet([0, 1, 2, 3])
    party.add_up([0, 1, 2, 3])
    for stranger in strangers:
        stranger.close()


def test_descriptors_do_not_grow(party: Party) -> None:
    """No sockets; a bell (an eventfd) comes when a rank first sleeps on a connection, at most two at each end."""
    bells = 2 * 4 * 3

    def count(kind: str) -> int:
        found = 0
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # the one that listed the folder
                found += os.readlink(f"/proc/self/fd/{fd}").startswith(kind)
        return found

    party.meet([0, 1, 2, 3])
    party.add_up([0, 1, 2, 3])
    sockets, others = count("socket:"), count("anon_inode:")
    for _ in range(10):
        party.meet([0, 1, 2, 3])
        party.add_up([0, 1, 2, 3])
    wait_until(lambda: count("socket:") <= sockets, what=f"{sockets} sockets, as at first")
    wait_until(lambda: count("anon_inode:") <= others + bells, what=f"{others} others and {bells} bells")
