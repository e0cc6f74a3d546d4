"""Strangers, replays and ranks of other jobs at the port of a rank that waits for its peers."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import hmac
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from ringdp.errors import HandshakeError, RingTimeoutError
from tests.contract.core_ranks import core, value_in

SECRET = b"s" * 32
HANDSHAKE_BYTES = 128
VERSION = 10  # of the protocol: docs/reference/wire_format.md
MAGIC = b"RINGDP\r\n"
HELLO, REPLY, REFUSAL, CONFIRM = 1, 2, 3, 4
STRANGER_S = 2.0  # what a connection that proves nothing is given


# The messages as docs/reference/wire_format.md has them.


def message(
    kind: int,
    job: bytes,
    *,
    sender: int,
    receiver: int,
    secret: bytes = SECRET,
    transcript: bytes = b"",
    nonce: bytes = b"",
    **changed: int,
) -> bytes:
    values = {"version": VERSION, "epoch": 0, "world": 2, "number": 1, **changed}
    fields = (
        MAGIC
        + struct.pack("<II", values["version"], kind)
        + job
        + struct.pack("<IIIIII", values["epoch"], sender, receiver, values["world"], 0, 0)
        + nonce
        + os.urandom(24 - len(nonce))
    )
    fields += bytes(88 - len(fields)) + struct.pack("<Q", values["number"])
    return fields + hmac.digest(secret, transcript + fields, "sha256")


class SetUp:
    """The MACs of the messages of the set-up of shared memory that rank 1 sends, which has dialled."""

    def __init__(self, transcript: bytes) -> None:
        self.key, self.count = hmac.digest(SECRET, b"ringdp connection" + transcript, "sha256"), 0

    def signed(self, words: bytes) -> bytes:
        fields = words[:224].ljust(224, b"\0")
        label = b"ringdp set-up\1" + struct.pack("<Q", self.count)
        self.count += 1
        return fields + hmac.digest(self.key, label + fields, "sha256")


@dataclass
class Answer:
    kind: int
    version: int
    epoch: int
    sender: int
    receiver: int
    world: int
    reason: int

    @classmethod
    def read(cls, raw: bytes, transcript: bytes) -> Answer:
        assert len(raw) == HANDSHAKE_BYTES
        assert raw[:8] == MAGIC
        assert hmac.compare_digest(raw[96:], hmac.digest(SECRET, transcript + raw[:96], "sha256"))
        version, kind = struct.unpack("<II", raw[8:16])
        epoch, sender, receiver, world, reason = struct.unpack("<IIIII", raw[32:52])
        return cls(kind, version, epoch, sender, receiver, world, reason)


@dataclass
class Waiting:
    """Rank 0 of two, which has published where it is and waits for rank 1."""

    store: Any
    address: tuple[str, int]
    job: bytes
    first: Future[Any]
    pool: ThreadPoolExecutor
    sockets: list[socket.socket] = field(default_factory=list)

    def connect(self) -> socket.socket:
        made = socket.create_connection(self.address, timeout=10.0)
        self.sockets.append(made)
        return made

    def ask(self, *pieces: bytes) -> bytes:
        """All that comes back until the other side closes."""
        stranger = self.connect()
        answer = b""
        with contextlib.suppress(ConnectionError):
            for piece in pieces:
                stranger.sendall(piece)
            while part := stranger.recv(4096):
                answer += part
        return answer

    def meet(self) -> float:
        """Rank 1 comes; the two add something up. Returns the seconds it took them to meet."""
        start = time.monotonic()
        second = core.Runtime(self.store, 1, 2, secret=SECRET, timeout_ms=20_000)
        first = self.first.result(timeout=20)
        took = time.monotonic() - start
        buffers = [np.full(100_000, float(rank + 1), np.float32) for rank in range(2)]

        def add(rank: int, runtime: Any) -> None:
            group = core.Group(runtime, "all", [0, 1])
            group.all_reduce(buffers[rank], "float32").wait()
            group.close()

        done = [self.pool.submit(add, rank, runtime) for rank, runtime in enumerate((first, second))]
        for it in done:
            it.result(timeout=20)
        assert buffers[0][-1] == buffers[1][-1] == 3.0
        with pytest.raises(ConnectionRefusedError):  # closed to newcomers
            socket.create_connection(self.address, timeout=10.0)
        for it in [self.pool.submit(runtime.shut_down) for runtime in (first, second)]:
            it.result(timeout=20)
        return took


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def waiting() -> Iterator[Waiting]:
    before = descriptors()
    store = core.MemoryStore()
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(core.Runtime, store, 0, 2, secret=SECRET, timeout_ms=30_000)
        # It listens when it has heard from everybody: rank 1 lives on the same host.
        store.set("who/1", value_in(store, "who/0"))
        address, port = record(store.get("at/0"))["addresses"].rsplit(":", 1)
        assert address == "127.0.0.1"
        job = bytes.fromhex(record(store.get("job"))["job"])
        it = Waiting(store, (address, int(port)), job, first, pool)
        try:
            yield it
        finally:
            for stranger in it.sockets:
                stranger.close()
            if not first.done():  # the test failed on the way
                core.Runtime(store, 1, 2, secret=SECRET, timeout_ms=20_000).shut_down()
                first.result().shut_down()
    del first, it
    assert descriptors() == before


def record(text: bytes | str | None) -> dict[str, str]:
    assert text is not None
    text = text if isinstance(text, str) else text.decode()
    return dict(line.split("=", 1) for line in text.splitlines())


def hello(waiting: Waiting, **changed: Any) -> bytes:
    return message(HELLO, waiting.job, **{"sender": 1, "receiver": 0, **changed})


STRANGERS: dict[str, Callable[[Waiting], bytes]] = {
    "random bytes": lambda _: os.urandom(HANDSHAKE_BYTES),
    "more random bytes": lambda _: os.urandom(100_000),
    "an HTTP request": lambda _: b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"Accept: */*\r\n" * 20 + b"\r\n",
    "a TLS hello": lambda _: bytes.fromhex("1603010200010001fc0303") + os.urandom(506),
    "another secret": lambda w: hello(w, secret=b"t" * 32),
    "a bit flipped": lambda w: bytes([*hello(w)[:40], 1, *hello(w)[41:]]),
    "no MAC": lambda w: hello(w)[:96] + bytes(32),
    "a confirm first": lambda w: message(CONFIRM, w.job, sender=1, receiver=0),
    "a reply first": lambda w: message(REPLY, w.job, sender=1, receiver=0),
}


@pytest.mark.parametrize("who", STRANGERS)
def test_strangers_are_dropped_without_a_word(waiting: Waiting, who: str) -> None:
    start = time.monotonic()
    assert waiting.ask(STRANGERS[who](waiting)) == b""
    assert time.monotonic() - start < STRANGER_S  # at once: what was sent cannot be right any more
    assert waiting.meet() < 5.0


def test_slow_and_silent_strangers_have_their_time(waiting: Waiting) -> None:
    def one_byte_after_the_other() -> tuple[bytes, float]:
        start, stranger, answer = time.monotonic(), waiting.connect(), b""
        with contextlib.suppress(ConnectionError, TimeoutError):
            for byte in hello(waiting):
                stranger.sendall(bytes([byte]))
                stranger.settimeout(1.0)  # it stays silent; a byte a second
                with contextlib.suppress(TimeoutError):
                    answer = stranger.recv(1)
                    break
        return answer, time.monotonic() - start

    def silence() -> tuple[bytes, float]:
        start = time.monotonic()
        return waiting.ask(), time.monotonic() - start

    def half_a_hello() -> tuple[bytes, float]:
        start = time.monotonic()
        return waiting.ask(hello(waiting)[:64]), time.monotonic() - start

    with ThreadPoolExecutor(3) as pool:
        for it in [pool.submit(one_byte_after_the_other), pool.submit(silence), pool.submit(half_a_hello)]:
            answer, took = it.result()
            assert answer == b""
            assert STRANGER_S - 0.1 < took < STRANGER_S + 2.5
    assert waiting.meet() < 5.0


def test_strangers_do_not_keep_the_ranks_apart(waiting: Waiting) -> None:
    """While they are all still there."""
    before = descriptors()
    for _ in range(100):
        waiting.connect()
    held = descriptors() - before - 100  # ours are in the same process
    assert held <= 64 + 2
    assert waiting.meet() < 3 * STRANGER_S + 2.0


REFUSED: dict[str, tuple[dict[str, Any], int]] = {
    "another protocol version": ({"version": VERSION + 1}, 1),
    "another job": ({"job": bytes(16)}, 2),
    "another epoch": ({"epoch": 3}, 3),
    "another world size": ({"world": 5}, 4),
    "a rank that does not exist": ({"sender": 2}, 5),
    "the listener's own rank": ({"sender": 0}, 5),
    "for another rank": ({"receiver": 1}, 5),
}


@pytest.mark.parametrize("what", REFUSED)
def test_authentic_hellos_that_do_not_fit_are_told_why(waiting: Waiting, what: str) -> None:
    changed, reason = REFUSED[what]
    fields: dict[str, Any] = {"job": waiting.job, "sender": 1, "receiver": 0, **changed}
    sent = message(HELLO, **fields)
    answer = Answer.read(waiting.ask(sent), sent)
    assert (answer.kind, answer.reason) == (REFUSAL, reason)
    assert (answer.version, answer.epoch, answer.world, answer.sender) == (VERSION, 0, 2, 0)  # its side of it
    assert waiting.meet() < 5.0


def test_a_replayed_hello_gets_no_further(waiting: Waiting) -> None:
    sent = hello(waiting)
    replies = []
    for _ in range(10):
        stranger = waiting.connect()
        stranger.sendall(sent)
        stranger.settimeout(5.0)
        with contextlib.suppress(ConnectionError):
            if reply := stranger.recv(HANDSHAKE_BYTES):
                replies.append(reply)
    # Each reply is another one, and few are kept waiting for the confirm that only who knows the secret can send.
    assert len({reply[56:80] for reply in replies}) == len(replies) == 4
    assert all(Answer.read(reply, sent).kind == REPLY for reply in replies)
    with contextlib.suppress(ConnectionError):
        waiting.sockets[0].sendall(os.urandom(HANDSHAKE_BYTES))
        assert waiting.sockets[0].recv(1) == b""
    assert not waiting.first.done()
    assert waiting.meet() < 5.0


def test_the_document_describes_what_a_rank_does(waiting: Waiting) -> None:
    """A rank written after docs/reference/wire_format.md alone is let in."""
    peer = waiting.connect()
    sent = hello(waiting)
    peer.sendall(sent)
    reply = peer.recv(HANDSHAKE_BYTES, socket.MSG_WAITALL)
    answer = Answer.read(reply, sent)
    assert (answer.kind, answer.sender, answer.receiver, answer.world) == (REPLY, 0, 1, 2)
    confirm = message(CONFIRM, waiting.job, sender=1, receiver=0, transcript=sent + reply)
    peer.sendall(confirm)
    set_up = SetUp(sent + reply + confirm)
    # It is of the same host and does not want to share memory (the messages: test_shared_memory.py).
    assert peer.recv(256, socket.MSG_WAITALL)[:12] == b"RINGDPSM\1\0\0\0"
    for kind in (5, 6):
        peer.sendall(set_up.signed(b"RINGDPSM" + struct.pack("<I", kind)))
    assert peer.recv(256, socket.MSG_WAITALL)[:12] == b"RINGDPSM\7\0\0\0"
    first = waiting.first.result(timeout=10)
    # A barrier is an empty data frame each way; then it is told goodbye.
    group = core.Group(first, "all", [0, 1])
    work = group.barrier()
    head = peer.recv(64, socket.MSG_WAITALL)
    magic, kind, flags, length = struct.unpack("<HBBI", head[:8])
    group_id, sequence, offset, _fingerprint = struct.unpack("<QQQQ", head[8:40])
    collective, dtype, op, algorithm, root, count, name, credit = struct.unpack("<BBBBiQII", head[40:64])
    assert (magic, kind, flags & ~1, length) == (0x4452, 1, 0, 0)
    assert group_id != 0
    assert (sequence, offset) == (1, 0)
    assert (collective, dtype, op, algorithm, root, count, name, credit) == (0, 0, 0, 0, -1, 0, 0, 0)
    peer.sendall(head)
    work.wait(10_000)
    group.close()
    waiting.pool.submit(first.shut_down).result(timeout=10)
    assert peer.recv(64, socket.MSG_WAITALL)[2] == 6
    assert peer.recv(1) == b""


# Ranks that do not belong together: both sides say what differs.


def start_both(first: dict[str, Any], second: dict[str, Any], world: tuple[int, int] = (2, 2)) -> list[BaseException]:
    store = core.MemoryStore()
    errors: list[BaseException] = []

    def run(rank: int, options: dict[str, Any]) -> BaseException | None:
        try:
            core.Runtime(store, rank, world[rank], timeout_ms=5_000, **options).shut_down()
        except Exception as error:
            return error
        return None

    with ThreadPoolExecutor(2) as pool:
        for it in [pool.submit(run, 0, first), pool.submit(run, 1, second)]:
            error = it.result(timeout=20)
            assert error is not None
            errors.append(error)
    return errors


DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, int], tuple[str, ...]]] = {
    "world": ({}, {}, (2, 3), ("world size", "2 at rank 0", "3 at rank 1")),
    "epoch": ({"epoch": 4}, {"epoch": 5}, (2, 2), ("restart count", "4 at rank 0", "5 at rank 1")),
    "full mesh": ({"full_mesh_ranks": 3}, {}, (2, 2), ("RINGDP_FULL_MESH_RANKS differs: 3 at rank 0, 16 at rank 1",)),
    "streams": ({"streams": 4}, {"streams": 8}, (2, 2), ("RINGDP_STREAMS differs: 4 at rank 0, 8 at rank 1",)),
    "streams of one": ({}, {"streams": 8}, (2, 2), ("RINGDP_STREAMS differs: auto at rank 0, 8 at rank 1",)),
    "checksums": ({"checksums": True}, {}, (2, 2), ("RINGDP_CHECKSUM differs: 1 at rank 0, 0 at rank 1",)),
    "TLS": (
        {"secret": b"a" * 32, "tls": True},
        {"secret": b"a" * 32},
        (2, 2),
        ("RINGDP_TLS differs: TLS with the job's secret at rank 0, no TLS at rank 1",),
    ),
    "secret": ({"secret": b"a" * 32}, {"secret": b"b" * 32}, (2, 2), ("rank 1's secret is not rank 0's",)),
    "table": (
        {"table": {"fold_sent_bytes": 1}, "table_source": "built in"},
        {"table": {"fold_sent_bytes": 2}, "table_source": "RINGDP_TUNING=b.json"},
        (2, 2),
        ("one_host.fold_sent_bytes=1", "at rank 0 (built in)", "=2 at rank 1 (RINGDP_TUNING=b.json)"),
    ),
    "no secret at rank 1": ({"secret": b"a" * 32}, {}, (2, 2), ("rank 0 has a secret", "rank 1 has none")),
    "no secret at rank 0": ({}, {"secret": b"a" * 32}, (2, 2), ("rank 1 has a secret", "rank 0 has none")),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_differs_is_explained_on_both_sides(what: str) -> None:
    before = descriptors()
    first, second, world, words = DIFFERENT[what]
    start = time.monotonic()
    errors = start_both(first, second, world)
    assert time.monotonic() - start < 3.0  # nobody waits for the timeout
    for rank, error in enumerate(errors):
        assert isinstance(error, HandshakeError), error
        assert all(word in str(error) for word in words), str(error)
        assert (error.rank, error.peer) == (rank, 1 - rank)
        assert error.advice
        for secret in (b"a" * 32, b"b" * 32):
            assert secret.hex() not in str(error)
            assert secret.decode() not in str(error)
    errors.clear()
    assert descriptors() == before


def test_a_rank_that_never_comes_is_named() -> None:
    before = descriptors()
    store = core.MemoryStore()
    with pytest.raises(RingTimeoutError) as absent:
        core.Runtime(store, 0, 2, timeout_ms=300)
    assert absent.value.peer == 1
    # And one that said it would come, but does not connect.
    store = core.MemoryStore()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(core.Runtime, store, 0, 2, timeout_ms=500)
        store.set("who/1", value_in(store, "who/0"))
        with pytest.raises(
            RingTimeoutError, match=r" Timed out .* waited for rank 1 \(host .* to connect"
        ) as unconnected:
            first.result(timeout=10)
    assert unconnected.value.peer == 1
    del first
    assert descriptors() == before


def test_ctrl_c_ends_the_wait_for_a_connection() -> None:
    store = core.MemoryStore()
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    sent = 0.0

    def interrupt() -> None:
        nonlocal sent
        store.set("who/1", value_in(store, "who/0"))
        store.get("at/0")  # now it listens
        sent = time.monotonic()
        os.kill(os.getpid(), signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    helper.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            core.Runtime(store, 0, 2, timeout_ms=20_000)
        assert time.monotonic() - sent < 1.0
    finally:
        helper.join()
        signal.signal(signal.SIGINT, previous)


def test_the_secret_in_the_store_is_only_proved() -> None:
    """A secret that the launcher gave is not in the store, only its check; without one rank 0 publishes its own."""
    store = core.MemoryStore()
    with ThreadPoolExecutor(2) as pool:
        ranks = [pool.submit(core.Runtime, store, rank, 2, secret=SECRET) for rank in range(2)]
        runtimes = [it.result(timeout=10) for it in ranks]
        for it in [pool.submit(runtime.shut_down) for runtime in runtimes]:
            it.result(timeout=10)
    left = record(store.get("job"))
    assert "secret" not in left
    assert SECRET.hex() not in str(left)
    assert left["check"] == hmac.digest(SECRET, b"ringdp secret check", hashlib.sha256).hex()
