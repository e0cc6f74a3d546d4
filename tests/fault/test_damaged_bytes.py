"""A bit that flips between two ranks: every rank raises an error that names the connection, whatever the bit was of."""

from __future__ import annotations

import random
import re
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringdp.errors import DamagedDataError, PeerLostError, RingError
from tests.contract.core_ranks import ALWAYS_SMALL, NEVER_SMALL, World
from tests.fault.hosts import Outcome, RankServer, RankSpec
from tests.fault.relay import Job

# docs/reference/wire_format.md
READY = 256  # what the ranks say between the handshake and the first frame: each its own, rank 0 that all are
HELLO_AND_CONFIRM, REPLY = 256 + READY, 128 + READY
HEADER, HEAD = 64, 72  # without and with checksums
DATA, GRANT, REQUEST, CREDIT, ABORT, BYE, PING, PONG = range(1, 9)

SOON_S = 5.0  # nothing takes so long; a busy machine may
LINK = re.compile(
    r"rank (\d) \(host \S+\) received damaged bytes from rank (\d) \(host \S+, pid \d+\) .*"
    r"on the connection tcp 127\.0\.0\.1:\d+ -> 127\.0\.0\.1:\d+ \(rank (\d)'s end first\)"
)


@dataclass
class Flip:
    """Which bit: of a frame of that type with so many bytes of payload at least."""

    kind: int
    byte: Callable[[int], int]  # of the frame's length, to the place in it
    bit: int = 0
    at_least: int = 0
    after: int = 0  # so many frames of that kind are left alone before
    done: bool = False


def anywhere(begin: int, end: int | None = None) -> Callable[[int], int]:
    return lambda length: random.Random(length).randrange(begin, length if end is None else end)


@dataclass
class Stream:
    """One direction of a relayed connection: what is to be sent on of what came."""

    skip: int  # bytes before the first frame
    flip: Flip | None
    head_bytes: int
    head: bytes = b""
    left: int = 0  # of the frame that passes
    damage_at: int = -1  # counted from the next byte

    def passed(self, data: bytes) -> bytes:
        out, data = bytearray(data[: self.skip]), data[self.skip :]
        self.skip -= len(out)
        while data or self.left:
            if not self.left:
                missing = self.head_bytes - len(self.head)
                self.head, data = self.head + data[:missing], data[missing:]
                if len(self.head) < self.head_bytes:
                    break
                self._begin(*struct.unpack_from("<BBI", self.head, 2))
                data, self.head = self.head + data, b""
            whole = bytearray(data[: self.left])
            data = data[self.left :]
            self.left -= len(whole)
            if self.flip is not None and 0 <= self.damage_at < len(whole):
                whole[self.damage_at] ^= 1 << self.flip.bit
                self.flip.done = True
            self.damage_at -= len(whole)
            out += whole
            if not data:
                break
        return bytes(out)

    def _begin(self, kind: int, _flags: int, payload: int) -> None:
        self.left = self.head_bytes + payload
        self.damage_at = -1
        if self.flip is None or self.flip.done or kind != self.flip.kind or payload < self.flip.at_least:
            return
        self.flip.after -= 1
        if self.flip.after < 0:
            self.damage_at = self.flip.byte(self.left)


def met(size: int, flips: dict[int, Flip], *, checksums: bool = True) -> Job:
    """`flips` by the rank that sends, 0 or 1."""
    streams: dict[tuple[int, int], Stream] = {}

    def change(number: int, sender: int, _before: int, data: bytes) -> bytes:
        skip = HELLO_AND_CONFIRM if sender == 1 else REPLY
        new = Stream(skip, flips.get(sender), HEAD if checksums else HEADER)
        return streams.setdefault((number, sender), new).passed(data)

    return Job(size, change, checksums=checksums)


def errors(ranks: Job, body: Callable[[int], Any]) -> list[tuple[RingError | None, float]]:
    """What each rank's part ended with, and how long it took."""

    def one(rank: int) -> tuple[RingError | None, float]:
        start = time.monotonic()
        try:
            body(rank)
        except RingError as error:
            return error, time.monotonic() - start
        return None, time.monotonic() - start

    return ranks.each(one)


def expect_named(error: RingError | None, *, rank: int, sender: int, receiver: int) -> None:
    """It tells of the connection from `sender` to `receiver`, whoever raises it."""
    assert isinstance(error, DamagedDataError), repr(error)
    assert isinstance(error, PeerLostError)
    found = LINK.search(str(error))
    assert found, str(error)
    assert [int(it) for it in found.groups()] == [receiver, sender, receiver], str(error)
    assert "(CRC32C)" in str(error)
    assert "ethtool -S" in str(error)
    assert error.peer == (receiver if rank == sender else sender)
    assert error.rank == rank
    assert ("reported by" in str(error)) == (rank != receiver)


def reduce_until_it_fails(group: Any, count: int) -> None:
    """Every sum that an operation has given is right."""
    for _ in range(200):
        data = np.full(count, float(group.rank + 1), np.float32)
        group.all_reduce(data, "float32").wait()
        assert (data == sum(range(1, group.size + 1))).all(), "a wrong sum, and no error"


PLACES = {
    "payload": anywhere(HEAD),
    "first of the payload": lambda _: HEAD,
    "last of the payload": lambda length: length - 1,
    "magic": lambda _: 0,
    "type": lambda _: 2,
    "flags": lambda _: 3,
    "length, a little": lambda _: 4,
    "length, much": lambda _: 6,
    "group": anywhere(8, 16),
    "sequence": anywhere(16, 24),
    "offset": anywhere(24, 32),
    "fingerprint": anywhere(32, 40),
    "shape": anywhere(40, 56),
    "name": anywhere(56, 60),
    "credit": anywhere(60, 64),
    "checksum of the payload": anywhere(64, 68),
    "checksum of the header": anywhere(68, 72),
}


SOME = [*((3, place) for place in PLACES), (2, "payload"), (2, "group"), (4, "shape")]


@pytest.mark.parametrize(("size", "place"), SOME)
def test_a_bit_of_a_data_frame(size: int, place: str) -> None:
    flip = Flip(DATA, PLACES[place], bit=len(place) % 8, at_least=1, after=4)
    with met(size, {0: flip}) as ranks:
        groups = ranks.groups(NEVER_SMALL)
        outcomes = errors(ranks, lambda rank: reduce_until_it_fails(groups[rank], 200_000))
        assert flip.done
        for rank, (error, seconds) in enumerate(outcomes):
            expect_named(error, rank=rank, sender=0, receiver=1)
            assert seconds < SOON_S
        # The group stays failed; another one of these ranks says the same at once, one without that pair works.
        again = ranks.groups(name="again")
        for rank, (error, seconds) in enumerate(errors(ranks, lambda rank: again[rank].barrier().wait())):
            assert seconds < SOON_S, rank
            if rank >= 2 and error is None:
                continue  # all others had told it that they are there before ranks 0 and 1 heard of each other
            assert isinstance(error, PeerLostError), rank
            assert "as it was sent" in str(error) or "as they were sent" in str(error), str(error)


def test_without_checksums_the_ranks_differ_and_nobody_says_so() -> None:
    """Not a law, but what the checksums are for; and a proof that the bits above do flip."""
    flip = Flip(DATA, lambda _: HEADER + 2, bit=5, at_least=1, after=2)
    with met(2, {0: flip}, checksums=False) as ranks:
        groups = ranks.groups()
        data = [np.full(1000, float(rank + 1), np.float32) for rank in range(2)]
        for _ in range(3):
            ranks.each(lambda rank: groups[rank].all_reduce(data[rank], "float32").wait())
        assert flip.done
        assert (data[0] != data[1]).sum() == 1


def run_ahead(job: Job, rank: int) -> None:
    """Rank 0 issues more than the 1 MiB that rank 1 keeps for it, in three groups of 8 calls under way."""
    if rank == 1:
        time.sleep(0.2)
    groups = [job.group(rank, name=name) for name in ("first", "second", "third")]
    data = [np.ones(16_000, np.float32) for _ in range(24)]
    for work in [groups[i % 3].all_reduce(it, "float32") for i, it in enumerate(data)]:
        work.wait()


def reduce(job: Job, rank: int) -> None:
    reduce_until_it_fails(job.group(rank), 200_000)


def broadcast(job: Job, rank: int) -> None:
    group = job.group(rank)
    for _ in range(200):
        group.broadcast(np.ones(8_000, np.float32), "float32", 0).wait()
    group.barrier().wait()


CONTROL: dict[str, tuple[int, int, Callable[[Job, int], None]]] = {  # type, sender, what brings such a frame about
    "grant": (GRANT, 1, reduce),
    "request": (REQUEST, 0, run_ahead),
    "credit": (CREDIT, 1, broadcast),
}


@pytest.mark.parametrize("place", ["type", "sequence", "offset", "credit", "checksum of the header"])
@pytest.mark.parametrize("what", CONTROL)
def test_a_bit_of_a_frame_of_flow_control(what: str, place: str) -> None:
    kind, sender, body = CONTROL[what]
    flip = Flip(kind, PLACES[place], bit=1)
    with met(2, {sender: flip}) as ranks:
        outcomes = errors(ranks, lambda rank: body(ranks, rank))
        assert flip.done
        for rank, (error, seconds) in enumerate(outcomes):
            expect_named(error, rank=rank, sender=sender, receiver=1 - sender)
            assert seconds < SOON_S


@pytest.mark.parametrize(("kind", "place"), [(PING, "sequence"), (PONG, "sequence"), (PONG, "payload")])
def test_a_bit_of_a_question_or_its_answer(kind: int, place: str) -> None:
    """A rank that waits asks the others; one that has not called answers."""
    flip = Flip(kind, PLACES[place], bit=3)
    sender = 0 if kind == PING else 1
    with met(2, {sender: flip}) as ranks:
        groups = ranks.groups()
        outcomes = errors(ranks, lambda rank: groups[0].barrier().wait() if rank == 0 else None)
        assert flip.done
        expect_named(outcomes[0][0], rank=0, sender=sender, receiver=1 - sender)
        assert outcomes[0][1] < SOON_S
        # What rank 0 sent for its call came as it was, so the same call may end well on rank 1; the next does not.
        (_, _), (error, _) = errors(ranks, lambda rank: [groups[1].barrier().wait() for _ in range(2 * rank)])
        expect_named(error, rank=1, sender=sender, receiver=1 - sender)


@pytest.mark.parametrize("place", ["sequence", "payload", "length, a little"])
@pytest.mark.parametrize("kind", [ABORT, BYE])
def test_a_bit_of_a_last_word(kind: int, place: str) -> None:
    """Rank 0 gives a group up, or leaves; its word of that comes damaged: rank 1 tells of the connection, at once."""
    flip = Flip(kind, PLACES[place], bit=2)
    with met(2, {0: flip}) as ranks:
        groups = ranks.groups()
        ranks.runtimes[0].set_farewell("its program has ended")

        def body(rank: int) -> None:
            if rank == 1:  # a message, which disagrees with nothing
                groups[1].receive(np.empty(4, np.float32), "float32", 0).wait()
            elif kind == BYE:
                ranks.runtimes[0].shut_down()
            else:
                groups[0].all_reduce(np.ones(100_000, np.float32), "float32")  # in flight, so the others are told
                groups[0].close()

        (_, _), (error, seconds) = errors(ranks, body)
        assert flip.done
        expect_named(error, rank=1, sender=0, receiver=1)
        assert seconds < SOON_S


@pytest.mark.parametrize("seed", range(1, 9))
def test_a_bit_anywhere_on_every_connection(seed: int) -> None:
    """Each rank receives a flipped bit from every other: whichever comes first, no wrong sum is ever given."""
    count, within = (5, 5_000) if seed % 4 == 0 else (70_000, 500_000)
    ranks = World(2 + seed % 3, transport="tcp", checksums=True, fault_seed=seed, flip_within=within)
    try:
        groups = ranks.groups(NEVER_SMALL if seed % 2 else ALWAYS_SMALL)

        def body(rank: int) -> tuple[RingError | None, float]:
            start = time.monotonic()
            with pytest.raises(DamagedDataError) as told:
                reduce_until_it_fails(groups[rank], count)
            return told.value, time.monotonic() - start

        for error, seconds in ranks.each(body):
            assert re.search(
                r"rank \d \(host \S+\) received damaged bytes from rank \d \(host \S+, pid \d+\)", str(error)
            )
            assert "on the connection faulty tcp 127.0.0.1:" in str(error)
            assert seconds < SOON_S
    finally:
        ranks.close()


# Processes: the variable reaches the connections, and those that share memory have no use for it.


def frame_bytes(spec: RankSpec, outcome: Outcome) -> None:
    import torch
    import torch.distributed as dist

    import ringdp

    if spec.variables.get("BY") == "ringdp.init":
        ringdp.init(init_method=spec.method, rank=spec.rank, world_size=spec.world)
    else:
        dist.init_process_group("ring", init_method=spec.method, rank=spec.rank, world_size=spec.world)
    ones = torch.full((300_000,), float(spec.rank + 1))
    dist.all_reduce(ones)
    assert bool((ones == 3).all())
    before = ringdp.traffic().bytes_sent
    dist.barrier()  # one empty frame to the other rank
    outcome.value = ringdp.traffic().bytes_sent - before
    dist.destroy_process_group()


@pytest.mark.parametrize("by", ["ringdp.init", "init_process_group"])
@pytest.mark.parametrize(
    ("transport", "setting", "sent"), [("tcp", "1", HEAD), ("tcp", "0", HEADER), ("shm", "1", HEADER)]
)
def test_the_setting_is_for_tcp(
    server: RankServer, tmp_path: Path, transport: str, setting: str, sent: int, by: str
) -> None:
    variables = {"RINGDP_TRANSPORT": transport, "RINGDP_CHECKSUM": setting, "BY": by}
    method = f"file://{tmp_path}/store"
    body = f"{__name__}:frame_bytes"
    outcomes = server.run([RankSpec(r, 2, variables=variables, method=method, body=body) for r in range(2)], tmp_path)
    assert [it.text for it in outcomes] == ["", ""]
    assert [it.value for it in outcomes] == [sent, sent]


def test_processes_that_differ_about_the_setting_do_not_meet(server: RankServer, tmp_path: Path) -> None:
    method = f"file://{tmp_path}/store"
    specs = [RankSpec(r, 3, variables={"RINGDP_CHECKSUM": "011"[r]}, method=method) for r in range(3)]
    for it in server.run(specs, tmp_path):
        assert it.error == "HandshakeError", it
        assert re.search(r"RINGDP_CHECKSUM differs: 0 at rank 0, 1 at rank [12]", it.text), it.text
        assert "the same settings" in it.text
