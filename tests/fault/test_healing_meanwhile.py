"""Connections that a rank's own process loses while something else happens: forks, a stopped peer, the end, secrets."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.fault.hosts import Outcome, RankServer, RankSpec
from tests.fault.launch_jobs import wait_until

HERE = "tests.fault.test_healing_meanwhile"

pytestmark = pytest.mark.timeout(120)


# What runs on the ranks.


def cut_own() -> int:
    """End this process's connections over TCP, as the network would; how many there were."""
    cut = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # other threads close descriptors meanwhile
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as it:
            if it.family in (socket.AF_INET, socket.AF_INET6) and it.getpeername():
                it.shutdown(socket.SHUT_RDWR)
                cut += 1
    return cut


def join(spec: RankSpec) -> None:
    import torch.distributed as dist

    dist.init_process_group("ring", init_method=spec.method, rank=spec.rank, world_size=spec.world)
    dist.barrier()


def add_up(spec: RankSpec, step: int) -> None:
    import torch
    import torch.distributed as dist

    x = torch.arange(50_000, dtype=torch.float32) % 1000 + spec.rank + step % 7
    want = (torch.arange(50_000, dtype=torch.float32) % 1000 + step % 7) * spec.world + sum(range(spec.world))
    dist.all_reduce(x)
    assert torch.equal(x, want), f"step {step}"


def leave() -> None:
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()


def fork_while_it_heals(spec: RankSpec, outcome: Outcome) -> None:
    join(spec)
    for step in range(10):
        begin = time.monotonic()
        if spec.rank == step % spec.world:
            outcome.value += cut_own()
        child = os.fork()
        if child == 0:
            os._exit(0 if cut_own() == 0 else 1)  # it has none of them
        add_up(spec, step)
        assert os.waitpid(child, 0)[1] == 0
        outcome.seconds = max(outcome.seconds, time.monotonic() - begin)
    leave()


def end_while_it_heals(spec: RankSpec, outcome: Outcome) -> None:
    import torch.distributed as dist

    join(spec)
    add_up(spec, 0)
    dist.barrier()
    if spec.rank == 1:
        outcome.value = cut_own()
    begin = time.monotonic()
    dist.destroy_process_group()
    outcome.seconds = time.monotonic() - begin


def add_up_while_cut(spec: RankSpec, outcome: Outcome) -> None:
    join(spec)
    stop = threading.Event()

    def cut() -> None:
        while not stop.wait(0.05):
            outcome.value += cut_own()

    cutter = threading.Thread(target=cut)
    if spec.rank == 0:
        cutter.start()
    for step in range(60):
        add_up(spec, step)
        time.sleep(0.01)
    stop.set()
    if spec.rank == 0:
        cutter.join()
    leave()


def be_stopped(spec: RankSpec, outcome: Outcome) -> None:
    """Rank 0 loses the connection while the test has stopped rank 1."""
    folder = Path(spec.variables["FOLDER"])
    join(spec)
    (folder / f"pid-{spec.rank}.new").write_text(str(os.getpid()))
    (folder / f"pid-{spec.rank}.new").rename(folder / f"pid-{spec.rank}")
    if spec.rank == 0:
        wait_until((folder / "stopped").exists, "the test")
        outcome.value = cut_own()
    else:
        wait_until((folder / "goes-on").exists, "the test")
    begin = time.monotonic()
    for step in range(10):
        add_up(spec, step)
    outcome.seconds = time.monotonic() - begin
    leave()


# The tests.


def ranks(folder: Path, body: str, world: int = 2, **variables: str) -> list[RankSpec]:
    variables = {"RINGDP_TRANSPORT": "tcp", "FOLDER": str(folder)} | variables
    method = f"file://{folder}/store"
    return [RankSpec(rank, world, variables=variables, method=method, body=f"{HERE}:{body}") for rank in range(world)]


def test_forks_while_connections_heal(server: RankServer, tmp_path: Path) -> None:
    for it in server.run(ranks(tmp_path, "fork_while_it_heals", 3), tmp_path):
        assert it.text == ""
        assert it.value >= 6
        assert it.seconds < 2


def test_the_end_while_a_connection_heals(server: RankServer, tmp_path: Path) -> None:
    outcomes = server.run(ranks(tmp_path, "end_while_it_heals"), tmp_path)
    assert [it.text for it in outcomes] == ["", ""]
    assert outcomes[1].value > 0
    assert max(it.seconds for it in outcomes) < 5


def test_with_a_secret_checksums_and_several_connections(server: RankServer, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(os.urandom(32).hex())
    secret.chmod(0o600)
    variables = {"RINGDP_SECRET_FILE": str(secret), "RINGDP_CHECKSUM": "1", "RINGDP_STREAMS": "3"}
    outcomes = server.run(ranks(tmp_path, "add_up_while_cut", 3, **variables), tmp_path)
    assert [it.text for it in outcomes] == ["", "", ""]
    assert outcomes[0].value >= 6


def test_a_peer_that_is_stopped_meanwhile(server: RankServer, tmp_path: Path) -> None:
    server.start(ranks(tmp_path, "be_stopped"), tmp_path)
    for rank in range(2):
        wait_until((tmp_path / f"pid-{rank}").exists, f"rank {rank}")
    pid = int((tmp_path / "pid-1").read_text())
    os.kill(pid, signal.SIGSTOP)
    (tmp_path / "stopped").touch()
    time.sleep(2.5)
    (tmp_path / "goes-on").touch()
    os.kill(pid, signal.SIGCONT)
    outcomes = server.finish()
    assert [it.text for it in outcomes] == ["", ""]
    assert outcomes[0].value > 0
