"""A rank that dies while the ranks meet, at each stage of it: the others say so within three seconds, and name it."""

from __future__ import annotations

import hmac
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import pytest
from torch.distributed import FileStore, Store, TCPStore  # type: ignore[attr-defined]

from tests.fault.faults import sampled
from tests.fault.hosts import Lab, Outcome, RankServer, RankSpec, why_not
from tests.fault.launch_jobs import wait_until
from tests.fault.test_rank_handshake import CONFIRM, HANDSHAKE_BYTES, HELLO, VERSION, message, record

BOUND_S = 3.0
HERE = "tests.fault.test_meeting_death"
SECRET = b"s" * 32

pytestmark = pytest.mark.timeout(120)


# What runs on the ranks.


def pending(spec: RankSpec, outcome: Outcome) -> None:
    """Meet, as ringdp.init() does; stay until everybody has met."""
    from ringdp import _C
    from ringdp.config import RingConfig

    config = RingConfig(secret=SECRET, host_name=spec.host_name or socket.gethostname(), connect_timeout_ms=60_000)
    settings = config.as_dict() | {"several_hosts": bool(spec.variables.get("SEVERAL_HOSTS"))}
    store, wait = open_store(spec), timedelta(seconds=60)
    where = {"rank": spec.rank, "size": spec.world}
    met = _C.PendingMesh(store=store, **where, hello="", timeout=wait, first_notice_s=10.0, config=settings)
    outcome.value = len(met.hellos())
    outcome.seconds = time.monotonic() - outcome.at
    store.set(f"through/{spec.rank}", "")
    store.wait([f"through/{rank}" for rank in range(spec.world)], timedelta(seconds=30))
    met.close()


def open_store(spec: RankSpec) -> Store:
    if spec.method.startswith("file://"):
        return FileStore(spec.method.removeprefix("file://"), spec.world)
    host, port = spec.method.removeprefix("tcp://").rsplit(":", 1)
    return TCPStore(host, int(port), spec.world, spec.rank == 0, wait_for_workers=False)


def whoami(spec: RankSpec) -> str:
    """The record that a rank leaves, docs/reference/wire_format.md."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    fields = {
        "host": spec.host_name or socket.gethostname(),
        "pid": os.getpid(),
        "started": Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19],
        "boot": boot,
        "space": os.stat("/proc/self/ns/pid").st_ino,
        "network": os.stat("/proc/self/ns/net").st_ino,
        "host_id": "",
        "ips": spec.variables.get("IP", ""),
        "hello": "",
    }
    return "".join(f"{key}={value}\n" for key, value in fields.items())


def tables() -> str:
    """The algorithm tables that every rank brings along, as a rank 0 publishes them."""
    from tests.core import _core

    store = _core.MemoryStore()
    with ThreadPoolExecutor(2) as pool:
        for met in list(pool.map(lambda rank: _core.Runtime(store, rank, 2), range(2))):
            pool.submit(met.shut_down)
    return record(store.get("job"))["tables"]


def die(spec: RankSpec) -> NoReturn:
    folder = Path(spec.variables["FOLDER"])
    (folder / "died.new").write_text(f"{time.monotonic()} {os.getpid()}")
    (folder / "died.new").rename(folder / "died")
    if os.getpid() != 1:  # the first of a process namespace cannot kill itself
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(137)


def victim(spec: RankSpec, outcome: Outcome) -> None:
    """Speaks the protocol up to the stage at which it dies."""
    stage, store = spec.variables["STAGE"], open_store(spec)
    if stage == "keeping the store":
        store.set("who/0", whoami(spec))
        check = hmac.new(SECRET, b"ringdp secret check", "sha256").hexdigest()
        published = {
            "version": VERSION,
            "world": 3,
            "epoch": 0,
            "job": "00" * 16,
            "check": check,
            "tables": tables(),
            "checksums": "0",
            "full_mesh_ranks": "16",
            "streams": "auto",
            "tls": "no TLS",
        }
        store.set("job", "".join(f"{key}={value}\n" for key, value in published.items()))
        store.wait(["at/1", "at/2"], timedelta(seconds=20))  # so both know who this is
        die(spec)
    store.set(f"who/{spec.rank}", whoami(spec))
    if stage == "alone":
        die(spec)
    store.wait(["who/0"], timedelta(seconds=20))
    if stage == "before it listens":
        die(spec)
    if stage == "connected":
        store.set("who/2", store.get("who/0").decode())  # never comes
    listener = socket.create_server((spec.variables.get("IP", "127.0.0.1"), 0))
    address = "{}:{}".format(*listener.getsockname())
    store.set(f"at/{spec.rank}", f"addresses={address}\n")
    if stage == "called":
        listener.accept()[0].recv(1)
        die(spec)
    store.wait(["at/0"], timedelta(seconds=20))
    if stage == "listening":
        die(spec)
    ip, port = record(store.get("at/0"))["addresses"].split(",")[0].rsplit(":", 1)
    peer = socket.create_connection((ip, int(port)))
    fields: dict[str, Any] = {"sender": spec.rank, "receiver": 0, "world": spec.world, "secret": SECRET}
    job = bytes.fromhex(record(store.get("job"))["job"])
    hello = message(HELLO, job, **fields)
    peer.sendall(hello)
    reply = peer.recv(HANDSHAKE_BYTES, socket.MSG_WAITALL)
    if stage == "in the handshake":
        die(spec)
    peer.sendall(message(CONFIRM, job, transcript=hello + reply, **fields))
    die(spec)


# The tests.


def expect_named(outcomes: list[Outcome], folder: Path, dead: int, host: str, *, by: str = "PeerLostError") -> None:
    died_at, pid = (folder / "died").read_text().split()
    survivors = [it for rank, it in enumerate(outcomes) if rank != dead]
    assert outcomes[dead].error == "died"
    for it in survivors:
        assert it.error == by, it.text
        assert it.at - float(died_at) < BOUND_S, it.text
        assert f"rank {dead} (host {host}, pid {pid})" in it.text
        assert it.peer == dead or (by == "HandshakeError" and it.peer is not None)


def specs(folder: Path, stage: str, *, world: int, present: list[int], dead: int = 1) -> list[RankSpec]:
    variables = {"STAGE": stage, "FOLDER": str(folder)}
    body = {rank: f"{HERE}:victim" if rank == dead else f"{HERE}:pending" for rank in present}
    method = f"file://{folder}/store"
    return [RankSpec(rank, world, variables=variables, method=method, body=body[rank]) for rank in present]


@pytest.mark.parametrize(
    "stage", ["alone", "before it listens", "listening", "called", "in the handshake", "connected"]
)
def test_a_rank_of_this_host(server: RankServer, tmp_path: Path, stage: str) -> None:
    # Only rank 2 calls rank 1. Where rank 2 never comes, rank 0 alone waits for both.
    present = [0, 1] if stage in ("alone", "before it listens", "connected") else [0, 1, 2]
    outcomes = server.run(specs(tmp_path, stage, world=3, present=present), tmp_path)
    expect_named(outcomes, tmp_path, 1, socket.gethostname())


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("stage", ["connected", *sampled(["listening", "called", "in the handshake"], 1)])
def test_a_rank_of_another_host(server: RankServer, tmp_path: Path, stage: str) -> None:
    """No process to look up: connections that end, or that nobody takes any more, tell."""
    with Lab() as lab:
        lab.link("eth0", ["10.1.0.{}/24"])
        ranks = specs(tmp_path, stage, world=3, present=[0, 1] if stage == "connected" else [0, 1, 2])
        for it in ranks:
            it.space, it.host_name, it.own_pids = lab.spaces[it.rank % 2], f"h{it.rank % 2}", True
            it.variables = it.variables | {"IP": f"10.1.0.{it.rank % 2 + 1}", "SEVERAL_HOSTS": "1"}
        outcomes = server.run(ranks, tmp_path)
    listened = stage in ("listening", "called", "in the handshake")
    expect_named(outcomes, tmp_path, 1, "h1", by="HandshakeError" if listened else "PeerLostError")


def test_the_rank_that_keeps_the_store(server: RankServer, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = specs(tmp_path, "keeping the store", world=3, present=[0, 1, 2], dead=0)
    for it in ranks:
        it.method = f"tcp://127.0.0.1:{port}"
    outcomes = server.run(ranks, tmp_path)
    expect_named(outcomes, tmp_path, 0, socket.gethostname())


def test_a_rank_that_raises_tells_why(server: RankServer, tmp_path: Path) -> None:
    ranks = specs(tmp_path, "", world=3, present=[0, 1, 2], dead=-1)
    ranks[2].world = 4
    outcomes = server.run(ranks, tmp_path)
    for it in outcomes:
        assert it.error == "HandshakeError"
        assert "the world size differs: 3 at rank 0, 4 at rank 2" in it.text
        assert it.seconds < BOUND_S


def test_a_stopped_rank_is_not_dead(server: RankServer, tmp_path: Path) -> None:
    """It counts as slow: the others wait, and go on when it does."""
    ranks = specs(tmp_path, "", world=3, present=[0, 1, 2], dead=-1)
    ranks[1].body, ranks[2].body = f"{HERE}:stop_in_the_middle", f"{HERE}:after_the_stop"
    server.start(ranks, tmp_path)
    path = tmp_path / "stopped"
    wait_until(path.exists, "rank 1 to stop")
    pid = int(path.read_text())
    time.sleep(4.0)  # longer than anything that is known to be dead
    assert not list(tmp_path.glob("outcome-*"))
    os.kill(pid, signal.SIGCONT)
    outcomes = server.finish()
    assert [it.text for it in outcomes] == ["", "", ""]
    assert [it.value for it in outcomes] == [3, 3, 3]


def after_the_stop(spec: RankSpec, outcome: Outcome) -> None:
    wait_until((Path(spec.variables["FOLDER"]) / "stopped").exists, "rank 1 to stop")
    pending(spec, outcome)


def stop_in_the_middle(spec: RankSpec, outcome: Outcome) -> None:
    folder, store = Path(spec.variables["FOLDER"]), open_store(spec)
    if (child := os.fork()) == 0:  # stops its parent once that has introduced itself
        store = open_store(spec)
        store.wait([f"who/{spec.rank}"], timedelta(seconds=20))
        os.kill(os.getppid(), signal.SIGSTOP)
        (folder / "stopped.new").write_text(str(os.getppid()))
        (folder / "stopped.new").rename(folder / "stopped")
        os._exit(0)
    pending(spec, outcome)
    os.waitpid(child, 0)


@pytest.mark.parametrize("how", ["raises", "exits"])
def test_a_rank_whose_init_fails_after_they_met(server: RankServer, tmp_path: Path, how: str) -> None:
    """The others go on, and hear its reason with their first operation, not that it crashed."""
    ranks = specs(tmp_path, how, world=3, present=[0, 1, 2], dead=-1)
    for spec in ranks:
        spec.body = f"{HERE}:init_and_add"
    outcomes = server.run(ranks, tmp_path)
    reason = "RuntimeError: no memory on the device" if how == "raises" else "SystemExit: 3"
    assert [it.error for it in outcomes] == ["PeerLostError", reason.split(":")[0], "PeerLostError"]
    for it in (outcomes[0], outcomes[2]):
        assert it.peer == 1
        assert f"it left the job: its init ended by {reason}" in it.text
        assert "crashed" not in it.text


def init_and_add(spec: RankSpec, outcome: Outcome) -> None:
    import torch
    import torch.distributed as dist

    import ringdp
    from ringdp.job import process_group

    def fail(*_: Any) -> NoReturn:
        if spec.variables["STAGE"] == "exits":
            raise SystemExit(3)
        raise RuntimeError("no memory on the device")

    if spec.rank == 1:
        process_group._make_group = fail  # type: ignore[assignment]
    ringdp.init(rank=spec.rank, world_size=spec.world, init_method=spec.method)
    dist.all_reduce(torch.ones(3))


def test_a_rank_that_a_signal_stops_says_what_its_handler_raised(server: RankServer, tmp_path: Path) -> None:
    ranks = specs(tmp_path, "", world=4, present=[0, 1, 2], dead=-1)  # rank 3 never comes
    ranks[1].body = f"{HERE}:stopped_by_its_handler"
    outcomes = server.run(ranks, tmp_path)
    assert [told.error for told in outcomes] == ["HandshakeError", "SystemExit", "HandshakeError"]
    for it in (outcomes[0], outcomes[2]):
        assert it.peer == 1
        assert "was stopped while the ranks met, by SystemExit: out of time" in it.text
        assert it.seconds < BOUND_S


def stopped_by_its_handler(spec: RankSpec, outcome: Outcome) -> None:
    def leave(*_: Any) -> NoReturn:
        raise SystemExit("out of time")

    signal.signal(signal.SIGALRM, leave)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    pending(spec, outcome)
