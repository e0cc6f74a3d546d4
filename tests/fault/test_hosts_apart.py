"""`ringrun -H` between hosts that are apart: network namespaces on a slow cable, with an sshd on each."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fault import hosts
from tests.fault.launch_jobs import LAUNCH, Job, script, wait_until
from tests.fault.sshd import sshd

TRAIN = """
    import pathlib, socket, sys, time
    import torch
    import ringdp

    ringdp.init()
    model = ringdp.RingDP(torch.nn.Linear(100, 100))
    model(torch.ones(2, 100) * (1 + ringdp.rank())).sum().backward()
    mean = model.module.weight.grad[0, 0].item()
    print(f"rank {ringdp.rank()} on {socket.gethostname()}: {mean} over {ringdp.transports()}", flush=True)
    pathlib.Path(f"ready-{ringdp.rank()}").touch()
    if sys.argv[1:]:
        time.sleep(600)
    ringdp.shutdown()
"""
ADDRESSES = {"box1": "10.86.0.1", "box2": "10.86.0.2"}
PORT = 2222

pytestmark = [pytest.mark.ci, pytest.mark.timeout(120)]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[hosts.Lab]:
    """box1, where the user sits, and box2, behind 100 Mbit."""
    if reason := hosts.why_not():
        pytest.skip(reason)
    with hosts.Lab(2) as it:
        it.link("eth0", ["10.86.0.{}/24"])
        for space in it.spaces:
            hosts.run(*f"tc -n {space} qdisc add dev eth0 root handle 1: htb default 1".split())
            hosts.run(*f"tc -n {space} class add dev eth0 parent 1: classid 1:1 htb rate 100mbit".split())
        it.named(tmp_path, ADDRESSES)
        yield it


@pytest.fixture
def ssh(tmp_path: Path, lab: hosts.Lab) -> Iterator[str]:
    with contextlib.ExitStack() as servers:
        for host, address in enumerate(ADDRESSES.values()):
            command = servers.enter_context(sshd(tmp_path / "sshd", address=address, port=PORT, prefix=lab.on(host)))
        yield f"{command} -T"


def start(jobs: list[Job], lab: hosts.Lab, folder: Path, *arguments: str) -> Job:
    jobs.append(Job(folder, *arguments, command=[*lab.on(0), *LAUNCH]))
    return jobs[-1]


@pytest.mark.parametrize("more", [[], ["--tls"]], ids=["plain", "tls"])
def test_four_ranks_on_two_hosts_over_ssh(
    tmp_path: Path, lab: hosts.Lab, ssh: str, jobs: list[Job], more: list[str]
) -> None:
    path = str(script(tmp_path, TRAIN))
    job = start(jobs, lab, tmp_path, "--ssh", ssh, "-H", "box1:2,box2:2", "--console", "all", *more, path)
    assert job.wait(60) == 0, job.err
    assert f"starting on 2 hosts (box1:2, box2:2), which meet at {ADDRESSES['box1']} port" in job.err
    mean = 2 * (1 + 2 + 3 + 4) / 4
    for rank, line in enumerate(sorted(job.out.splitlines())):
        far = "tcp, TLS 1.3" if more else "tcp"
        links = {peer: "shm" if peer // 2 == rank // 2 else far for peer in range(4) if peer != rank}
        assert line == f"[rank {rank}] rank {rank} on box{1 + rank // 2}: {mean} over {links}"


def test_without_ssh_and_with_another_first_host(tmp_path: Path, lab: hosts.Lab, jobs: list[Job]) -> None:
    """Something like `kubectl exec`: no host says where ssh reached it, so the first one's name is where they meet."""
    words = {name: shlex.join(lab.on(host)) for host, name in enumerate(ADDRESSES)}
    cases = "".join(f'{name}) exec {command} sh -c "$2";; ' for name, command in words.items())
    connect = script(tmp_path, f'case "$1" in {cases} esac', "connect.sh")
    path = str(script(tmp_path, TRAIN))
    job = start(jobs, lab, tmp_path, "--ssh", f"sh {connect}", "-H", "box2:1,box1:1", "--console", "all", path)
    assert job.wait(60) == 0, job.err
    assert "which meet at box2 port" in job.err
    assert "rank 0 on box2" in job.out
    assert "rank 1 on box1" in job.out


@pytest.mark.slow
def test_a_cable_that_is_pulled_ends_both(tmp_path: Path, lab: hosts.Lab, ssh: str, jobs: list[Job]) -> None:
    job = start(jobs, lab, tmp_path, "--ssh", ssh, "-H", "box1:1,box2:1", str(script(tmp_path, TRAIN)), "stay")
    wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == 2, "both ranks", 60)
    lab.ip(1, "link set eth0 down")
    begin = time.monotonic()
    assert job.wait(60) == 1
    wait_until(lambda: job.processes() == [], "the end on the host that is cut off", 40)
    assert time.monotonic() - begin < 45
    assert "the connection to box2 was lost" in job.err
