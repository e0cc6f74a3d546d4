"""What a launcher's door lets in: the handshake under every change of its bytes, and strangers in numbers."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import io
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringdp import __version__
from ringdp.config import RingConfig
from ringdp.launcher.door import proof
from ringdp.launcher.door.gate import Gate
from ringdp.launcher.door.head import About, Door
from ringdp.launcher.door.proof import RefusedError, Trust
from tests.train.harness import ring_is_built

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")
SECRET, OTHER = b"s" * 32, b"o" * 32


def trust(secret: bytes = SECRET, *, tls: bool = False) -> Trust:
    return Trust(RingConfig(secret=secret, tls=tls))


Both = tuple[Any, Any]


def between(change: Callable[[int, bytes], bytes], secrets: tuple[bytes, bytes] = (SECRET, SECRET)) -> Both:
    """A handshake through somebody who changes messages: the nth, as it passes. What each side has."""

    async def both() -> Both:
        loop = asyncio.get_running_loop()
        left, left_end = socket.socketpair()
        right, right_end = socket.socketpair()
        for one in (left, left_end, right, right_end):
            one.setblocking(False)

        async def middle() -> None:
            ways = ((left_end, right_end), (right_end, left_end), (left_end, right_end))
            for number, (source, to) in enumerate(ways):
                await loop.sock_sendall(to, change(number, await proof.receive(source, 128)))

        async def outcome(work: Awaitable[Any]) -> Any:
            try:
                return await asyncio.wait_for(work, 0.2)
            except (proof.NotProvenError, RefusedError, TimeoutError, OSError) as error:
                return error

        passing = asyncio.create_task(outcome(middle()))
        hears = asyncio.create_task(outcome(proof.hear(right, trust(secrets[1]))))
        asks = await outcome(proof.ask(left, trust(secrets[0]), proof.Kind.RELAY, proof.place_of(3, 41000)))
        left.close()
        await passing
        left_end.close()
        right_end.close()
        heard = await hears
        right.close()
        return asks, heard

    return asyncio.run(both())


def test_both_sides_agree_on_what_it_is_for() -> None:
    asked, heard = between(lambda number, bytes_: bytes_)
    assert heard == (proof.Kind.RELAY, proof.place_of(3, 41000), asked)
    assert proof.node_and_port(proof.place_of(3, 41000)) == (3, 41000)


@settings(max_examples=30, deadline=None)
@given(which=st.integers(0, 2), at=st.integers(0, 127), bit=st.integers(0, 7))
def test_one_changed_bit_lets_nobody_in(which: int, at: int, bit: int) -> None:
    def flip(number: int, message: bytes) -> bytes:
        changed = bytearray(message)
        changed[at] ^= 1 << bit if number == which else 0
        return bytes(changed)

    asked, heard = between(flip)
    assert isinstance(heard, Exception)
    assert which == 2 or isinstance(asked, Exception)


def test_another_secret_gets_no_answer() -> None:
    asked, heard = between(lambda number, bytes_: bytes_, (OTHER, SECRET))
    assert isinstance(asked, Exception)
    assert isinstance(heard, proof.NotProvenError)


def test_a_replayed_handshake_gets_an_answer_and_no_further() -> None:
    recorded: list[bytes] = []

    def record(number: int, message: bytes) -> bytes:
        recorded.append(message)
        return message

    between(record)
    asked, heard = between(lambda number, message: recorded[number])
    assert isinstance(asked, Exception)
    assert isinstance(heard, Exception)


def wish(node: int, port: int, secret: bytes = SECRET) -> bytes:
    content = proof.WISH.pack(proof.WISH_MAGIC, node, port, os.urandom(16))
    return content + hmac.new(secret, content, "sha256").digest()


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_only_a_rank_of_the_job_has_a_wish(data: st.DataObject) -> None:
    right = wish(2, 30000)
    assert proof.read_wish(right, SECRET) == (2, 30000)
    wrong = data.draw(st.binary(min_size=64, max_size=64) | st.just(wish(2, 30000, OTHER)))
    at = data.draw(st.integers(0, 63))
    flipped = bytearray(right)
    flipped[at] ^= data.draw(st.integers(1, 255))
    for bytes_ in (wrong, bytes(flipped)):
        with pytest.raises(proof.NotProvenError):
            proof.read_wish(bytes_, SECRET)


@pytest.fixture(params=[False, True], ids=["plain", "TLS"])
def tls(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def door(tls: bool) -> Iterator[Door]:
    made = Door(0, trust(tls=tls), About(here=0, nodes=3, run_id="x", elastic=False, max_restarts=0), lambda line: None)
    yield made
    made.close()


def enter(door: Door, *, tls: bool) -> int:
    gate = Gate(("127.0.0.1", door.port), trust(tls=tls), None)
    try:
        return gate.enter(10.0, lambda line: None)[1]
    finally:
        gate.close()


@pytest.mark.parametrize(
    "sent",
    [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 128, os.urandom(4096), b"RINGDP\r\n" + b"\1" * 120, b"RINGDP"],
    ids=range(5),
)
def test_a_stranger_gets_no_byte_and_is_closed(door: Door, sent: bytes) -> None:
    began_s = time.monotonic()
    with socket.create_connection(("127.0.0.1", door.port)) as stranger:
        stranger.sendall(sent)
        stranger.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert time.monotonic() - began_s < 4.0


def test_a_host_is_let_in_while_strangers_come_in_numbers(door: Door, tls: bool) -> None:
    """Some silent, some talking; this process holds no more than a bounded number of their connections."""
    ends = threading.Event()

    def flood() -> None:
        held: list[socket.socket] = []
        while not ends.is_set():
            with contextlib.suppress(OSError):
                held.append(socket.create_connection(("127.0.0.1", door.port)))
                held[-1].sendall(b"x" * (len(held) % 2))
            if len(held) > 300:
                held.pop(0).close()
        for one in held:
            one.close()

    flooding = threading.Thread(target=flood)
    flooding.start()
    try:
        time.sleep(0.5)
        began_s = time.monotonic()
        assert enter(door, tls=tls) == 1
        assert time.monotonic() - began_s < 8.0
        descriptors = len(os.listdir("/proc/self/fd"))
        assert descriptors < 300 + 256 + 100
    finally:
        ends.set()
        flooding.join()


def test_a_host_has_the_number_that_it_wants_or_the_next_one(door: Door, tls: bool) -> None:
    gates = [Gate(("127.0.0.1", door.port), trust(tls=tls), wants) for wants in (2, None)]
    assert [gate.enter(10.0, lambda line: None)[1] for gate in gates] == [2, 1]
    with pytest.raises(RefusedError, match="the job has all of its 3 hosts, and is not elastic"):
        enter(door, tls=tls)
    for gate in gates:
        gate.close()


def test_the_store_is_reached_through_the_door_alone(door: Door, tls: bool) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    gate = Gate(("127.0.0.1", door.port), trust(tls=tls), None)
    gate.enter(10.0, lambda line: None)
    here = TCPStore("127.0.0.1", door.store_port, None, False, wait_for_workers=False)
    there = TCPStore("127.0.0.1", gate.store_port, None, False, wait_for_workers=False)
    there.set("key", "value" * 100_000)
    assert here.get("key") == b"value" * 100_000
    gate.close()


def test_what_goes_through_the_door_can_be_read_only_without_tls(door: Door, tls: bool) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    seen = bytearray()

    def carry(source: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                seen.extend(data)
                to.sendall(data)
            to.shutdown(socket.SHUT_WR)

    def pass_on() -> None:
        while True:
            with contextlib.suppress(OSError):
                came, _ = between_them.accept()
                goes = socket.create_connection(("127.0.0.1", door.port))
                for one, other in ((came, goes), (goes, came)):
                    threading.Thread(target=carry, args=(one, other), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as between_them:
        threading.Thread(target=pass_on, daemon=True).start()
        gate = Gate(("127.0.0.1", between_them.getsockname()[1]), trust(tls=tls), None)
        gate.enter(10.0, lambda line: None)
        there = TCPStore("127.0.0.1", gate.store_port, None, False, wait_for_workers=False)
        there.set("some key", "some words" * 100)
        assert there.get("some key") == b"some words" * 100
        gate.close()
    assert (b"some words" in seen) is not tls
    assert (b"some key" in seen) is not tls
    assert (b'"run_id"' in seen) is not tls


def test_ranks_of_two_hosts_talk_through_the_door(door: Door, tls: bool) -> None:
    """And a port at which no rank listens is nobody's."""
    gates = [Gate(("127.0.0.1", door.port), trust(tls=tls), None) for _ in range(2)]
    nodes = [gate.enter(10.0, lambda line: None)[1] for gate in gates]
    with socket.create_server(("127.0.0.1", 0)) as rank, socket.create_server(("127.0.0.1", 0)) as stranger:
        port = rank.getsockname()[1]
        (gates[1].folder / str(port)).touch()
        local_port, node, round_trip_us = map(int, (gates[0].folder / "door").read_text().split())
        assert node == nodes[0]
        assert 0 <= round_trip_us < 1_000_000
        with socket.create_connection(("127.0.0.1", local_port)) as dialling:
            dialling.sendall(wish(nodes[1], port) + b"hello")
            reached, _ = rank.accept()
            with reached:
                assert reached.recv(5, socket.MSG_WAITALL) == b"hello"
                reached.sendall(b"x" * 3_000_000)
                reached.shutdown(socket.SHUT_WR)
                got = 0
                while data := dialling.recv(1 << 16):
                    got += len(data)
                assert got == 3_000_000
                dialling.sendall(b"last")
                dialling.shutdown(socket.SHUT_WR)
                assert reached.recv(10, socket.MSG_WAITALL) == b"last"
        with socket.create_connection(("127.0.0.1", local_port)) as dialling:
            dialling.sendall(wish(nodes[1], stranger.getsockname()[1]))
            dialling.settimeout(15)
            assert dialling.recv(1) == b""
        stranger.settimeout(0.1)
        with pytest.raises(TimeoutError):
            stranger.accept()
    for gate in gates:
        gate.close()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda one: st.lists(one, max_size=3) | st.dictionaries(st.text(max_size=5), one, max_size=3),
    max_leaves=8,
)
SAID = st.dictionaries(st.sampled_from(["wants", "node", "id", "host", "version"]), JSON).map(
    lambda it: json.dumps({"version": __version__, **it})
)


@given(st.lists(SAID.map(str.encode) | st.binary(max_size=40) | st.just(b"x" * 5000), min_size=1, max_size=4))
@settings(max_examples=150, deadline=None)
def test_whatever_a_launcher_says_ends_its_connection_at_worst(lines: list[bytes]) -> None:
    """Its secret is right; its version, or somebody in the middle without TLS, is not. No host that wants none of the
    first numbers may get one, and what it has said is no error of the door."""
    wrong = io.StringIO()
    handler = logging.StreamHandler(wrong)
    handler.setLevel(logging.ERROR)
    log = logging.getLogger("ringdp.launch")
    log.addHandler(handler)
    about = About(here=0, nodes=2, run_id="x", elastic=False, max_restarts=0)
    door = Door(0, trust(), about, lambda line: None)

    async def tell(connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_connect(connection, ("127.0.0.1", door.port))
        await proof.ask(connection, trust(), proof.Kind.REGISTER)
        await loop.sock_sendall(connection, b"\n".join(lines) + b"\n")
        connection.shutdown(socket.SHUT_WR)
        while await asyncio.wait_for(loop.sock_recv(connection, 1 << 16), 5):
            pass

    try:
        for _ in range(2):  # the second time, the first one's number is free again or taken
            with socket.socket() as connection, contextlib.suppress(ConnectionError):
                connection.setblocking(False)
                asyncio.run(tell(connection))
        with contextlib.suppress(RefusedError):  # the number is taken
            assert enter(door, tls=False) == 1
    finally:
        door.close()
        log.removeHandler(handler)
    assert wrong.getvalue() == ""


def test_a_launcher_without_tls_is_told_that_the_job_has_it() -> None:
    made = Door(
        0, trust(tls=True), About(here=0, nodes=2, run_id="x", elastic=False, max_restarts=0), lambda line: None
    )
    gate = Gate(("127.0.0.1", made.port), trust(), None)
    with pytest.raises(
        RefusedError, match=r"the job has TLS with the job's secret \(--tls\), and this launcher no TLS"
    ):
        gate.enter(10.0, lambda line: None)
    gate.close()
    made.close()


@pytest.mark.parametrize("libuv", [False, True])
def test_a_store_is_told_from_a_door(libuv: bool) -> None:
    """``--join`` names either."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from ringdp.launcher import joining

    store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, use_libuv=libuv)
    gate = Gate(("127.0.0.1", store.port), trust(), None)
    began_s = time.monotonic()
    with pytest.raises(RefusedError) as raised:
        gate.enter(20.0, lambda line: None, lambda: joining.is_store("127.0.0.1", store.port))
    assert raised.value.no_door
    assert joining.is_store("127.0.0.1", store.port)
    assert time.monotonic() - began_s < 5.0
    gate.close()


def test_a_number_that_another_host_has_by_now_is_not_given_back(door: Door, tls: bool) -> None:
    first = Gate(("127.0.0.1", door.port), trust(tls=tls), None)
    assert first.enter(10.0, lambda line: None)[1] == 1
    name = first._id
    first.close()
    second = Gate(("127.0.0.1", door.port), trust(tls=tls), 1)
    end_s = time.monotonic() + 10
    while True:  # until the door has seen the end of the first one's connection
        try:
            assert second.enter(10.0, lambda line: None)[1] == 1
            break
        except RefusedError:
            assert time.monotonic() < end_s
    back = Gate(("127.0.0.1", door.port), trust(tls=tls), None)
    back._id = name
    with pytest.raises(RefusedError, match="another host has its number by now"):
        back._loop.run(back._register(1))
    for gate in (second, back):
        gate.close()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialled = socket.create_connection(listener.getsockname())
        return dialled, listener.accept()[0]


@pytest.mark.parametrize("breaks", [0, 1])
def test_the_last_words_of_an_end_that_breaks_arrive(breaks: int) -> None:
    """It closes with input that it has not read, which resets its connection."""
    from ringdp import _C

    for _ in range(20):
        relay = _C.Relay()
        pairs = [tcp_pair(), tcp_pair()]
        relay.join(pairs[0][1].detach(), pairs[1][1].detach())
        leaves, stays = pairs[breaks][0], pairs[1 - breaks][0]
        stays.sendall(b"x" * 200_000)
        leaves.sendall(b"last words")
        time.sleep(0.01)
        leaves.close()
        stays.settimeout(5)
        assert stays.recv(10, socket.MSG_WAITALL) == b"last words"
        with contextlib.suppress(OSError):
            stays.sendall(b"more")
        stays.close()
        del relay
