"""Who shares memory with whom, what is said where that cannot be, and what strangers and the dead can do to it."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringdp.config.console_log import WIDTH
from ringdp.errors import HandshakeError, InvalidArgumentError, PeerLostError, RingError, RingTimeoutError
from tests.contract.core_ranks import core, value_in
from tests.fault.hosts import ROOT, Outcome, RankServer, RankSpec
from tests.fault.launch_jobs import wait_until
from tests.fault.shared_memory_limits import forbid
from tests.fault.test_rank_handshake import CONFIRM, HANDSHAKE_BYTES, HELLO, SECRET, SetUp, message, record

HERE = "tests.fault.test_shared_memory"
MEMFD_CREATE, MADVISE = {"x86_64": (319, 28), "aarch64": (279, 233)}.get(os.uname().machine, (0, 0))
SHARED_BYTES = 256
OFFER, TOKEN, MEMORY, ACCEPTED, REFUSED, READY, ALL_READY = 1, 2, 3, 4, 5, 6, 7
DOOR = re.compile(r"@(ringdp/[0-9a-f]{32})$", re.MULTILINE)

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def log() -> Iterator[list[tuple[int, str]]]:
    lines: list[tuple[int, str]] = []
    core.set_log_sink(lambda level, text: lines.append((level, text)))
    yield lines
    core.set_log_sink(None)


def job(*options: dict[str, Any], before: Callable[[int], None] = lambda rank: None) -> list[Any]:
    """Ranks as threads, each with options of its own, that meet and add something up: who uses what, or the error."""
    store, world = core.MemoryStore(), len(options)

    def rank(me: int) -> Any:
        before(me)
        try:
            runtime = core.Runtime(store, me, world, timeout_ms=20_000, **options[me])
        except RingError as error:
            return error
        ones = np.full(1000, me + 1.0, np.float32)
        group = core.Group(runtime, "all", list(range(world)))
        group.all_reduce(ones, "float32").wait()
        group.close()
        assert ones[-1] == world * (world + 1) / 2
        found = runtime.transports()
        runtime.shut_down()
        return found

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(rank, range(world)))


def warnings(log: list[tuple[int, str]]) -> list[str]:
    return [text for level, text in log if level >= 2]


def infos(log: list[tuple[int, str]]) -> list[str]:
    return sorted(text for level, text in log if level == 1)


# Who shares with whom.


@pytest.mark.parametrize("transport, expected", [("auto", "shm"), ("shm", "shm"), ("tcp", "tcp")])
def test_ranks_of_one_host(log: list[tuple[int, str]], transport: str, expected: str) -> None:
    found = job(*[{"transport": transport}] * 3)
    assert found == [{peer: expected for peer in range(3) if peer != rank} for rank in range(3)]
    how = {"shm": "shared memory with ranks 1 and 2", "tcp": "TCP with ranks 1 and 2 (RINGDP_TRANSPORT=tcp)"}[expected]
    assert infos(log)[0] == f"rank 0 uses {how}"
    assert warnings(log) == []


def test_hosts_are_told_apart_by_their_id(log: list[tuple[int, str]]) -> None:
    found = job({"host_id": "a"}, {"host_id": "b"}, {"host_id": "a"}, {"host_id": "b"})
    assert found[0] == {1: "tcp", 2: "shm", 3: "tcp"}
    assert found[3] == {0: "tcp", 1: "shm", 2: "tcp"}
    assert infos(log)[0] == "rank 0 uses shared memory with rank 2, TCP with ranks 1 and 3"
    assert warnings(log) == []


def test_one_that_wants_tcp_gets_it(log: list[tuple[int, str]]) -> None:
    found = job({}, {"transport": "tcp"}, {})
    assert found == [{1: "tcp", 2: "shm"}, {0: "tcp", 2: "tcp"}, {0: "shm", 1: "tcp"}]
    assert warnings(log) == []


def test_one_that_must_share_with_one_that_will_not() -> None:
    start = time.monotonic()
    found = job({"transport": "shm"}, {"transport": "tcp"}, {}, {"host_id": "elsewhere"})
    for rank, error in enumerate(found):
        assert isinstance(error, HandshakeError), error
        assert re.search(r"rank 0 \(.* has RINGDP_TRANSPORT=shm, rank 1 \(.* RINGDP_TRANSPORT=tcp", str(error)), rank
    assert time.monotonic() - start < 5.0


def test_rings_of_a_given_size() -> None:
    assert job({"shm_ring_bytes": 2**16}, {"shm_ring_bytes": 2**18}) == [{1: "shm"}, {0: "shm"}]
    with pytest.raises(InvalidArgumentError, match="shm_ring_bytes must be a power of two"):
        core.Runtime(core.MemoryStore(), 0, 2, shm_ring_bytes=100_000)
    with pytest.raises(InvalidArgumentError, match="auto, shm or tcp, not 'udp'"):
        core.Runtime(core.MemoryStore(), 0, 2, transport="udp")


def test_the_memory_is_small_private_and_goes_with_its_ranks() -> None:
    def mapped() -> dict[str, int]:  # the file's number, and the most that is mapped of it
        found: dict[str, int] = {}
        for line in Path("/proc/self/maps").read_text().splitlines():
            if "/memfd:ringdp" in line:
                begin, end = (int(it, 16) for it in line.split()[0].split("-"))
                found[line.split()[4]] = found.get(line.split()[4], 0) + end - begin
        return found

    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    for world in (2, 4, 8):
        store = core.MemoryStore()
        with ThreadPoolExecutor(world) as pool:
            made = list(pool.map(lambda me, s=store, w=world: core.Runtime(s, me, w), range(world)))
            files = mapped()
            assert len(files) == world * (world - 1) // 2
            # Each is mapped by both ranks, and its rings twice: a quarter is real, and half of that each rank's.
            assert sum(files.values()) / 4 / world <= 8 * 2**20
            assert not [
                it for it in os.listdir("/proc/self/fd") if "memfd:ringdp" in link(it) and "stacks" not in link(it)
            ]  # the descriptors are closed
            list(pool.map(lambda it: it.shut_down(), made))
        made.clear()
        gc.collect()
        assert mapped() == {}
    assert len(os.listdir("/proc/self/fd")) == before


def link(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:
        return ""


# Where it cannot be had.


@pytest.mark.parametrize("rank, number, words", [(0, MEMFD_CREATE, "memfd_create: .*seccomp"), (2, MADVISE, "madvise")])
def test_a_filter_refuses(log: list[tuple[int, str]], rank: int, number: int, words: str) -> None:
    """Both ranks of a pair say the same, each once; the others share."""
    if number == 0:
        pytest.skip("the number of this system call is not known here")

    def before(me: int) -> None:
        if me == rank:
            forbid(number, errno.EPERM)

    found = job({}, {}, {}, before=before)
    alone = {peer: "tcp" for peer in range(3) if peer != rank}
    assert found[rank] == alone
    assert found[1] == {0: "tcp" if rank == 0 else "shm", 2: "tcp" if rank == 2 else "shm"}
    lines = warnings(log)
    assert len(lines) == 3, lines
    for line in lines:
        told = f"rank \\d cannot share memory with ranks? .*rank {rank}: {words}.*\nthough .*RINGDP_TRANSPORT"
        assert re.search(told, line), line
        assert all(len(f"ringdp: rank {rank}: {part}") <= WIDTH for part in line.splitlines())
    log.clear()
    for me, error in enumerate(job({}, {"transport": "shm"}, {}, {"host_id": "elsewhere"}, before=before)):
        assert isinstance(error, HandshakeError), (me, error)
        assert re.search(f"share memory .RINGDP_TRANSPORT=shm. and cannot: rank {rank}: {words}", str(error)), error


def limited(what: str, value: int, *more: str, **variables: str) -> dict[str, Any]:
    words = [sys.executable, "-m", "tests.fault.shared_memory_limits", what, str(value), *more]
    # Threads take little address space with that.
    command = ["sh", "-c", 'ulimit -S -s 512; exec "$@"', "sh", *words]
    env = os.environ | {"MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1"} | variables
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, env=env, check=False)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
    return dict(json.loads(done.stdout))


def expect_tcp(found: dict[str, Any], words: str) -> None:
    assert found["errors"] == []
    assert found["sums"] == [6.0] * 3
    assert {it for rank in found["transports"] for it in rank.values()} == {"tcp"}
    lines = [it for it in found["log"] if it.startswith("w ")]
    assert len(lines) == 3, lines
    assert all(re.search(words, it) for it in lines), lines


def test_limits_on_files_and_address_space() -> None:
    expect_tcp(limited("file size", 2**20), r"ulimit -f\) is 1048576 bytes, 2101248 are needed")
    expect_tcp(limited("address space", 24 * 2**20), "mmap: Cannot allocate memory.*ulimit -v")
    strict = limited("file size", 2**20, "shm")
    assert len(strict["errors"]) == 3
    assert all(it.startswith("HandshakeError: ") and "ulimit -f" in it for it in strict["errors"])


def test_a_limit_on_descriptors() -> None:
    """From too few to enough: an error in words, then TCP with a line why, if it needs fewer, then shared memory."""
    seen = set()
    for count in range(14, 40):
        found = limited("descriptors", count)
        if found["errors"]:
            assert any("open files" in it for it in found["errors"]), found
            seen.add("error")
            continue
        assert found["sums"] == [6.0] * 3
        used = {it for rank in found["transports"] for it in rank.values()}
        seen |= used
        lines = [it for it in found["log"] if it.startswith("w ") and "cannot share memory" in it]
        assert bool(lines) == ("tcp" in used), found
        if used == {"shm"}:
            break
    assert {"error", "shm"} <= seen, seen


def test_a_control_group_without_room() -> None:
    """There the kernel would kill, not refuse."""
    tried = [(Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"), (Path("/sys/fs/cgroup"), "memory.max")]
    group = limit_name = None
    for parent, name in tried:
        path = parent / f"ringdp-test-{os.getpid()}"
        try:
            path.mkdir()
        except OSError:
            continue
        if (path / name).exists():
            group, limit_name = path, name
            break
        path.rmdir()
    if group is None or limit_name is None:
        pytest.skip("no control group with a memory limit can be made here")
    try:
        variables = {"CONTROL_GROUP": str(group), "CONTROL_GROUP_LIMIT": limit_name}
        # What the process had before does not count there; what it takes in now is little, besides the shared memory.
        expect_tcp(limited("control group", 30 * 2**20, **variables), "control group leaves .* MiB, .* MiB are asked")
        wait_until(lambda: not (group / "cgroup.procs").read_text(), "the group to be empty")
        plenty = limited("control group", 400 * 2**20, **variables)
        assert {it for rank in plenty["transports"] for it in rank.values()} == {"shm"}
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text(), "the group to be empty")
        group.rmdir()


# What the other end may be: ranks that die or talk nonsense, written after docs/reference/wire_format.md.


def shared(
    kind: int, *, ring_bytes: int = 0, name: bytes = bytes(16), token: bytes = bytes(16), reason: str = ""
) -> bytes:
    return (b"RINGDPSM" + struct.pack("<IIQ", kind, 0, ring_bytes) + name + token + reason.encode()).ljust(
        SHARED_BYTES, b"\0"
    )


class Imitation:
    """Rank 0 runs; this is its peer, rank 1, up to the point where memory is to be shared."""

    def __init__(self, pool: ThreadPoolExecutor, timeout_ms: int = 20_000) -> None:
        store = core.MemoryStore()
        self.first = pool.submit(core.Runtime, store, 0, 2, secret=SECRET, timeout_ms=timeout_ms)
        store.set("who/1", value_in(store, "who/0"))
        self.place = record(store.get("at/0"))["addresses"]
        self.job = bytes.fromhex(record(store.get("job"))["job"])
        self.nonce = os.urandom(8)
        self.connect(1)
        self.offer = self.receive(SHARED_BYTES)

    def connect(self, number: int) -> None:
        """As the pair's connection of that number."""
        address, port = self.place.rsplit(":", 1)
        self.socket = socket.create_connection((address, int(port)), timeout=10.0)
        hello = message(HELLO, self.job, sender=1, receiver=0, nonce=self.nonce, number=number)
        self.socket.sendall(hello)
        reply = self.receive(HANDSHAKE_BYTES)
        words = message(CONFIRM, self.job, sender=1, receiver=0, transcript=hello + reply, number=number)
        self.socket.sendall(words)
        self.set_up = SetUp(hello + reply + words)

    def receive(self, count: int) -> bytes:
        return self.socket.recv(count, socket.MSG_WAITALL)

    def door(self) -> socket.socket:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.settimeout(10.0)
        made.connect(b"\0ringdp/" + self.offer[24:40].hex().encode())
        return made

    def error(self, kind: type[BaseException]) -> str:
        with pytest.raises(kind) as caught:
            self.first.result(timeout=20)
        assert getattr(caught.value, "peer", None) == 1
        assert f"rank 1 (host {socket.gethostname()}, pid {os.getpid()})" in str(caught.value)
        return str(caught.value)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as made:
        yield made


def test_the_document_describes_the_set_up(pool: ThreadPoolExecutor) -> None:
    """A rank written after docs/reference/wire_format.md alone gets the memory, and reads there what rank 0 says."""
    it = Imitation(pool)
    magic, kind, zero, ring_bytes = struct.unpack("<8sIIQ", it.offer[:24])
    assert (magic, kind, zero, ring_bytes, it.offer[56:224]) == (b"RINGDPSM", OFFER, 0, 2**20, bytes(168))
    door = it.door()
    door.sendall(shared(TOKEN, token=it.offer[40:56]))
    reply, descriptors, _flags, _address = socket.recv_fds(door, SHARED_BYTES, 4)
    assert reply[:16] == shared(MEMORY)[:16]
    assert len(descriptors) == 1
    status = os.fstat(descriptors[0])
    assert (status.st_mode & 0o7777, status.st_size) == (0o600, 4096 + 2 * ring_bytes)
    assert not it.first.done()
    it.socket.close()  # it is not needed any more
    door.sendall(shared(ACCEPTED) + shared(READY))
    assert door.recv(SHARED_BYTES, socket.MSG_WAITALL)[:12] == shared(ALL_READY)[:12]
    first = it.first.result(timeout=10)
    assert first.transports() == {1: "shm"}
    pool.submit(first.shut_down).result(timeout=10)
    ring = os.pread(descriptors[0], 64, 4096)
    assert (ring[:2], ring[2]) == (struct.pack("<H", 0x4452), 6), ring  # goodbye, in the first ring
    os.close(descriptors[0])
    door.close()


@pytest.mark.parametrize("stage", ["offered", "at the door", "with the memory", "accepted", "ready"])
def test_a_connection_that_ends_is_no_death(pool: ThreadPoolExecutor, stage: str) -> None:
    """Of a rank whose process lives: another one takes its place, and the set-up goes on where it was."""
    it = Imitation(pool)
    held: list[socket.socket] = []
    if stage in ("at the door", "with the memory", "accepted", "ready"):
        held.append(it.door())
    if stage in ("with the memory", "accepted", "ready"):
        held[0].sendall(shared(TOKEN, token=it.offer[40:56]))
        for descriptor in socket.recv_fds(held[0], SHARED_BYTES, 4)[1]:
            os.close(descriptor)
    if stage in ("accepted", "ready"):
        held[0].sendall(shared(ACCEPTED))
    it.socket.close()
    if stage in ("offered", "at the door", "with the memory"):
        it.connect(2)
        assert it.receive(SHARED_BYTES)[:224] == it.offer[:224]
    held = held or [it.door()]
    if stage in ("offered", "at the door"):
        held[0].sendall(shared(TOKEN, token=it.offer[40:56]))
        for descriptor in socket.recv_fds(held[0], SHARED_BYTES, 4)[1]:
            os.close(descriptor)
    if stage in ("offered", "at the door", "with the memory"):
        held[0].sendall(shared(ACCEPTED))
    assert not it.first.done()
    start = time.monotonic()
    held[0].sendall(shared(READY))
    first = it.first.result(timeout=10)
    assert first.transports() == {1: "shm"}
    held[0].close()  # now it leaves without a goodbye
    group = core.Group(first, "all", [0, 1])
    with pytest.raises(PeerLostError, match="lost rank 1"):
        group.barrier().wait()
    group.close()
    pool.submit(first.shut_down).result(timeout=10)
    assert time.monotonic() - start < 2.0


def test_a_rank_that_dies_with_the_memory_is_named_at_once(pool: ThreadPoolExecutor) -> None:
    it = Imitation(pool)
    door = it.door()
    door.sendall(shared(TOKEN, token=it.offer[40:56]))
    for descriptor in socket.recv_fds(door, SHARED_BYTES, 4)[1]:
        os.close(descriptor)
    door.sendall(shared(ACCEPTED))
    start = time.monotonic()
    door.close()  # no network is between them
    assert "died while the ranks met" in it.error(PeerLostError)
    assert time.monotonic() - start < 1.0
    it.socket.close()


@pytest.mark.parametrize(
    "words",
    [os.urandom(SHARED_BYTES), shared(OFFER), shared(ACCEPTED), shared(READY), shared(ALL_READY), bytes(SHARED_BYTES)],
    ids=["random", "offer", "accepted without the memory", "ready at once", "all ready at once", "zeros"],
)
def test_a_rank_that_talks_nonsense(pool: ThreadPoolExecutor, words: bytes) -> None:
    it = Imitation(pool)
    it.socket.sendall(it.set_up.signed(words))
    assert "cannot set up shared memory with rank 1" in it.error(HandshakeError)
    it.socket.close()


def test_a_refusal_is_the_end_of_it(pool: ThreadPoolExecutor, log: list[tuple[int, str]]) -> None:
    it = Imitation(pool)
    refusal = shared(REFUSED, reason="rank 1: \x1b[31mno memory today\xff")
    it.socket.sendall(it.set_up.signed(refusal) + it.set_up.signed(shared(READY)))
    assert it.receive(SHARED_BYTES)[:12] == shared(ALL_READY)[:12]
    first = it.first.result(timeout=10)
    assert first.transports() == {1: "tcp"}
    assert any("rank 0 cannot share memory with rank 1 (rank 1: " in text for text in warnings(log))
    assert not any("\x1b" in text for text in warnings(log))
    pool.submit(first.shut_down).result(timeout=10)
    assert it.receive(64)[:3] == struct.pack("<HB", 0x4452, 6)  # frames, as ever
    it.socket.close()


def test_a_silent_rank_is_waited_for_and_named(pool: ThreadPoolExecutor, log: list[tuple[int, str]]) -> None:
    it = Imitation(pool, timeout_ms=1500)
    assert "it waited for rank 1" in it.error(RingTimeoutError)
    it.socket.close()


# Strangers at the door: found in /proc/net/unix by any process of the host.


def harass(stop: threading.Event, visits: list[int], results: set[bytes]) -> None:
    """Comes to every door there is, as often as it can, and stays."""
    held: list[socket.socket] = []
    while not stop.is_set():
        for name in DOOR.findall(Path("/proc/net/unix").read_text()):
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            made.settimeout(0.0)
            try:
                made.connect(b"\0" + name.encode())
                words = [b"", os.urandom(100), shared(TOKEN, token=os.urandom(16)), shared(ACCEPTED)][len(visits) % 4]
                if words:
                    made.send(words)
            except OSError:
                made.close()
                continue
            visits.append(1)
            held.append(made)
        for it in held[-50:]:
            with contextlib.suppress(OSError):
                results.add(it.recv(SHARED_BYTES))
        while len(held) > 400:
            held.pop(0).close()
    for it in held:
        it.close()


def test_strangers_get_nothing_and_hold_nobody_up() -> None:
    stop = threading.Event()
    visits: list[int] = []
    results: set[bytes] = set()
    stranger = threading.Thread(target=harass, args=(stop, visits, results))
    stranger.start()
    try:
        deadline = time.monotonic() + 60.0
        while len(visits) < 10:  # a door is open for a millisecond
            assert time.monotonic() < deadline
            assert job({}, {}, {})[0] == {1: "shm", 2: "shm"}
    finally:
        stop.set()
        stranger.join()
    assert results <= {b""}


def test_another_user_is_told_apart(pool: ThreadPoolExecutor) -> None:
    """Even with the token: it would have to come from the job itself."""
    if os.geteuid() != 0:
        pytest.skip("needs root to be another user")
    it = Imitation(pool, timeout_ms=5000)
    code = (
        "import os, socket, sys\n"
        "os.setuid(65534)\n"
        "door = socket.socket(socket.AF_UNIX)\n"
        "door.connect(b'\\0ringdp/' + sys.argv[1].encode())\n"
        "door.sendall(bytes.fromhex(sys.argv[2]))\n"
        "words, descriptors, _, _ = socket.recv_fds(door, 256, 4)\n"
        "print(len(descriptors), words[56:].rstrip(b'\\0').decode())\n"
    )
    words = [it.offer[24:40].hex(), shared(TOKEN, token=it.offer[40:56]).hex()]
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=20, check=False)
    assert done.stdout.startswith("0 rank 1 runs as another user than rank 0 (65534 and 0"), done
    it.socket.close()
    it.error(RingTimeoutError)  # its process lives, and may connect again


# Processes.


def add(spec: RankSpec, outcome: Outcome) -> None:
    """Join as a program does, and tell what the bytes go through."""
    import torch
    import torch.distributed as dist

    import ringdp

    dist.init_process_group("ring", init_method=spec.method, rank=spec.rank, world_size=spec.world)
    ones = torch.full((300_000,), float(spec.rank + 1))
    dist.all_reduce(ones)
    outcome.value = float(ones[-1])
    outcome.peers = [ringdp.transports().get(peer, "") for peer in range(spec.world)]
    if spec.variables.get("FORK"):
        folder = Path(spec.variables["FORK"])
        if (child := os.fork()) == 0:
            text = "".join(it for it in Path("/proc/self/maps").read_text().splitlines() if "memfd:ringdp" in it)
            (folder / f"child-{spec.rank}").write_text(text or "nothing")
            os._exit(0)
        os.waitpid(child, 0)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("transport", ["auto", "tcp", "shm"])
def test_processes(server: RankServer, tmp_path: Path, transport: str) -> None:
    variables = {"RINGDP_TRANSPORT": transport, "FORK": str(tmp_path)}
    method = f"file://{tmp_path}/store"
    specs = [RankSpec(rank, 3, variables=variables, method=method, body=f"{HERE}:add") for rank in range(3)]
    outcomes = server.run(specs, tmp_path)
    assert [it.text for it in outcomes] == [""] * 3
    assert [it.value for it in outcomes] == [6.0] * 3
    used = "tcp" if transport == "tcp" else "shm"
    assert [it.peers for it in outcomes] == [["", used, used], [used, "", used], [used, used, ""]]
    assert {(tmp_path / f"child-{rank}").read_text() for rank in range(3)} == {"nothing"}
