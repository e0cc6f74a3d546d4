"""Connections between hosts that break in a run: reset again and again, the cable out for a while, and for too long."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fault.hosts import Lab, Outcome, RankServer, RankSpec, one_on_each, why_not
from tests.fault.launch_jobs import wait_until

HERE = "tests.fault.test_healing"
HEAL_S = 4.0
SMALL_S = 0.25  # what a reset may hold an operation up for

pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]


# What runs on the ranks.


def reduce_until_told(spec: RankSpec, outcome: Outcome) -> None:
    """Sums whose bits are known, of several sizes, until the file `stop` is there; the slowest one's seconds."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("ring", init_method=spec.method, rank=spec.rank, world_size=spec.world)
    folder = Path(spec.variables["FOLDER"])
    sizes = [1, 1000, 30_000, 400_000]
    step, stop = 0, torch.zeros(1)
    while stop.item() == 0:
        x = torch.arange(sizes[step % len(sizes)], dtype=torch.float32) % 1000 + spec.rank + step % 7
        begin = time.monotonic()
        dist.all_reduce(x)
        outcome.seconds = max(outcome.seconds, time.monotonic() - begin)
        others = sum(range(spec.world)) + spec.world * (step % 7)
        want = (torch.arange(len(x), dtype=torch.float32) % 1000) * spec.world + others
        assert torch.equal(x, want), f"step {step}"
        if step == 10:
            (folder / f"runs-{spec.rank}").touch()
        step += 1
        if step % 20 == 0:
            stop.fill_(float((folder / "stop").exists()))
            dist.all_reduce(stop)
    outcome.value = float(step)
    dist.barrier()
    dist.destroy_process_group()


# The tests.


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(2) as made:
        made.link("eth0", ["10.1.0.{}/24"])
        yield made


def during(server: RankServer, lab: Lab, folder: Path, harm: Callable[[], Any], **variables: str) -> list[Outcome]:
    """Do harm while the ranks, one on each host, add up; what became of them."""
    specs = one_on_each(lab, folder, f"{HERE}:reduce_until_told", {"FOLDER": str(folder), **variables})
    server.start(specs, folder)
    for rank in range(len(specs)):
        wait_until((folder / f"runs-{rank}").exists, f"rank {rank}")
    harm()
    (folder / "stop").touch()
    return server.finish()


def reset(space: str) -> int:
    """End the ranks' connections on that host, as a router would that has lost its table; how many there were."""
    done = subprocess.run(
        ["ip", "netns", "exec", space, "ss", "-K", "-H", "-t", "state", "established"],
        capture_output=True,
        text=True,
        check=True,
    )
    return len(done.stdout.splitlines())


def can_reset(space: str) -> bool:
    code = (
        "import socket, subprocess; l = socket.create_server(('127.0.0.1', 0));"
        "c = socket.create_connection(l.getsockname()); subprocess.run(['ss', '-K', '-t'], capture_output=True);"
        "c.setblocking(False); c.recv(1)"
    )
    done = subprocess.run(
        ["ip", "netns", "exec", space, "python3", "-c", code], capture_output=True, text=True, check=False
    )
    return "ConnectionAbortedError" in done.stderr


def test_connections_that_are_reset_go_on(server: RankServer, lab: Lab, tmp_path: Path) -> None:
    if not can_reset(lab.spaces[0]):
        pytest.skip("this kernel does not let ss -K end connections (CONFIG_INET_DIAG_DESTROY)")
    cut = 0

    def harm() -> None:
        nonlocal cut
        for i in range(20):
            cut += reset(lab.spaces[i % 2])
            time.sleep(0.1)

    for it in during(server, lab, tmp_path, harm):
        assert it.text == ""
        assert it.value > 10
        assert it.seconds < SMALL_S
    assert cut >= 20


def test_a_cable_that_is_out_for_three_seconds(server: RankServer, lab: Lab, tmp_path: Path) -> None:
    def harm() -> None:
        lab.ip(1, "link set eth0 down")
        time.sleep(3.0)
        lab.ip(1, "link set eth0 up")

    for it in during(server, lab, tmp_path, harm):
        assert it.text == ""
        assert 2.0 < it.seconds < 4.5


def test_a_cable_that_stays_out(server: RankServer, lab: Lab, tmp_path: Path) -> None:
    begin = 0.0

    def harm() -> None:
        nonlocal begin
        begin = time.monotonic()
        lab.ip(1, "link set eth0 down")

    for rank, it in enumerate(during(server, lab, tmp_path, harm)):
        assert it.error == "PeerLostError"
        assert it.peer == 1 - rank
        assert "has not answered for 4000 ms" in it.text or "does not answer any more" in it.text
        assert it.at - begin < HEAL_S + 2.5


def test_as_long_as_the_setting_says(server: RankServer, lab: Lab, tmp_path: Path) -> None:
    def harm() -> None:
        lab.ip(1, "link set eth0 down")
        time.sleep(HEAL_S + 1.0)  # longer than without the setting
        lab.ip(1, "link set eth0 up")

    outcomes = during(server, lab, tmp_path, harm, RINGDP_HEAL="12")
    assert [it.text for it in outcomes] == ["", ""]


def test_without_healing_a_reset_is_the_end(server: RankServer, lab: Lab, tmp_path: Path) -> None:
    if not can_reset(lab.spaces[0]):
        pytest.skip("this kernel does not let ss -K end connections (CONFIG_INET_DIAG_DESTROY)")
    for rank, it in enumerate(during(server, lab, tmp_path, lambda: reset(lab.spaces[0]), RINGDP_HEAL="0")):
        assert it.error == "PeerLostError"
        assert it.peer == 1 - rank
