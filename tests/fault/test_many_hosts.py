"""One launcher that starts those of several hosts: what the user sees, and that nothing outlives it on any of them.

The connection is a shell on this host, and at the end real ssh to an sshd of the test's own.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.fault.launch_jobs import Job, script, wait_until

SHELL = "env NAMED={host} sh -c"
TRAIN = """
    import os, pathlib, sys, time
    import torch
    import ringdp

    ringdp.init()
    total = torch.ones(3)
    torch.distributed.all_reduce(total)
    print(f"rank {ringdp.rank()} of {int(total[0])} has {os.environ.get('FOO')}", flush=True)
    pathlib.Path(f"ready-{ringdp.rank()}").touch()
    if sys.argv[1:] == [str(ringdp.rank())]:
        raise ValueError("no labels")
    if sys.argv[1:]:
        time.sleep(600)
    ringdp.shutdown()
"""
# The same without torch, which takes seconds to import, and without a collective.
ALONE = """
    import os, pathlib, sys, time

    rank = os.environ["RANK"]
    print(f"rank {rank} of {os.environ['WORLD_SIZE']} has {os.environ.get('FOO')}", flush=True)
    pathlib.Path(f"ready-{rank}").touch()
    if sys.argv[1:] == [rank]:
        raise ValueError("no labels")
    if sys.argv[1:]:
        time.sleep(600)
"""

pytestmark = pytest.mark.timeout(120)


def start(jobs: list[Job], folder: Path, *arguments: str | Path, ssh: str = SHELL, **environ: str) -> Job:
    jobs.append(Job(folder, "--ssh", ssh, *arguments, environ=environ))
    return jobs[-1]


def assert_gone(job: Job, limit_s: float = 10.0) -> None:
    wait_until(lambda: job.processes() == [], "the end of all processes", limit_s)


def wait_until_ready(folder: Path, ranks: int) -> None:
    wait_until(lambda: len(list(folder.glob("ready-*"))) == ranks, "all ranks", 60)


def test_ranks_on_two_hosts(tmp_path: Path, jobs: list[Job]) -> None:
    secret = tmp_path / "secret"
    secret.write_text("5e" * 32)
    secret.chmod(0o600)
    path = script(tmp_path, TRAIN)
    job = start(
        jobs,
        tmp_path,
        "-H",
        "n1:1,n2:2",
        "-x",
        "FOO",
        "--console",
        "all",
        "--secret-file",
        secret,
        path,
        "stay",
        FOO="7",
    )
    wait_until_ready(tmp_path, 3)
    for pid in job.processes():  # the secret is in a file alone
        for what in ("cmdline", "environ"):
            assert b"5e5e5e5e" not in Path(f"/proc/{pid}/{what}").read_bytes()
    job.process.send_signal(signal.SIGTERM)
    assert job.wait() == 128 + signal.SIGTERM
    assert_gone(job, 1.0)
    assert sorted(job.out.splitlines()) == [f"[rank {rank}] rank {rank} of 3 has 7" for rank in range(3)]
    lines = job.err.splitlines()
    assert re.fullmatch(r"ringrun: starting on 2 hosts \(n1:1, n2:2\), which meet at 127\.0\.0\.1 port \d+", lines[0])
    assert re.fullmatch(r"ringrun: stopped by SIGTERM after [\d.]+ s on all 2 hosts", lines[-1])


def test_a_good_end_is_one_line(tmp_path: Path, jobs: list[Job]) -> None:
    (tmp_path / "hosts").write_text("n1 slots=1\nn2 slots=1\n")
    job = start(jobs, tmp_path, "--hostfile", tmp_path / "hosts", script(tmp_path, ALONE))
    assert job.wait() == 0, job.err
    assert job.out == "rank 0 of 2 has None\n"
    last = job.err.splitlines()[-1]
    assert re.fullmatch(r"ringrun: finished after [\d.]+ s on 2 hosts, logs in logs/\S+ on n1, logs/\S+ on n2", last)
    assert_gone(job, 1.0)


def test_one_verdict_for_the_job(tmp_path: Path, jobs: list[Job]) -> None:
    job = start(jobs, tmp_path, "-H", "n1:1,n2:2", script(tmp_path, ALONE), "2")
    assert job.wait() == 1
    assert_gone(job, 1.0)
    lines = job.err.splitlines()
    (begin,) = [number for number, line in enumerate(lines) if "FAILED" in line]
    assert re.match(r"ringrun: FAILED after [\d.]+ s: rank 2 on host \S+ raised ValueError: no labels", lines[begin])
    assert any(re.fullmatch(rf"  full log: \S+ on {socket.gethostname()}", line) for line in lines[begin:])
    assert any("also: host n1: " in line for line in lines[begin:])
    assert len(lines) - begin <= 15
    assert "[rank 2] ValueError: no labels" in lines


def test_nothing_starts_unless_all_can(tmp_path: Path, jobs: list[Job]) -> None:
    path = script(tmp_path, ALONE)
    job = start(jobs, tmp_path, "-H", "n1:1,n2:1", tmp_path / "nowhere.py")
    assert job.wait() == 1
    for host in ("n1", "n2"):
        assert f"{host}: the script {tmp_path}/nowhere.py is not there (in {tmp_path})" in job.err
    assert job.err.endswith("ringrun: nothing was started\n")
    assert not (tmp_path / "logs").exists()
    refuses = shlex.quote("if [ {host} = n2 ]; then echo 'no such pod' >&2; exit 7; fi; eval \"$0\"")
    job = start(jobs, tmp_path, "-H", "n1:1,n2:1", path, ssh=f"sh -c {refuses}")
    assert job.wait() == 1
    assert "FAILED: n2: no such pod" in job.err
    assert_gone(job, 3.0)
    job = start(jobs, tmp_path, "-H", "n1:1", path, ssh="no-such-command")
    assert job.wait() == 1
    assert "cannot start no-such-command: No such file or directory; see --ssh" in job.err
    job = start(jobs, tmp_path, "-H", "n1:1", "-x", "MISSING", path)
    assert job.wait() == 2
    assert "-x MISSING: there is no such variable here" in job.err


@pytest.mark.ci
def test_a_host_that_hangs_at_login(tmp_path: Path, jobs: list[Job]) -> None:
    hangs = shlex.quote('if [ {host} = n2 ]; then exec sleep 600; fi; eval "$0"')
    job = start(jobs, tmp_path, "-H", "n1:1,n2:1", script(tmp_path, ALONE), ssh=f"sh -c {hangs}")
    said = r"ringrun: waiting for an answer of n2, since \d+ s of at most 60 s"
    wait_until(lambda: re.search(said, job.err) is not None, "a word", 60)
    job.process.send_signal(signal.SIGINT)
    assert job.wait() == -signal.SIGINT
    assert_gone(job, 3.0)


@pytest.mark.ci
def test_a_signal_sent_twice_at_once_is_one(tmp_path: Path, jobs: list[Job]) -> None:
    """timeout(1) sends it to the process and to its group: the ranks still have their time."""
    text = """
        import pathlib, signal, sys, time
        def leave(number, frame):
            time.sleep(1.0)
            pathlib.Path("saved").touch()
            sys.exit(0)
        signal.signal(signal.SIGTERM, leave)
        pathlib.Path("ready-0").touch()
        time.sleep(600)
    """
    job = start(jobs, tmp_path, "-H", "n1:1", script(tmp_path, text))
    wait_until_ready(tmp_path, 1)
    for _ in range(2):
        job.process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
    assert job.wait() == 128 + signal.SIGTERM
    assert (tmp_path / "saved").exists()


def test_ctrl_c_and_sigkill_end_all_hosts(tmp_path: Path, jobs: list[Job]) -> None:
    path = script(tmp_path, ALONE)
    job = start(jobs, tmp_path, "-H", "n1:1,n2:1", path, "stay")
    wait_until_ready(tmp_path, 2)
    job.process.send_signal(signal.SIGINT)
    begin = time.monotonic()
    assert job.wait() == -signal.SIGINT  # as if there were no handler
    assert time.monotonic() - begin < 8
    assert_gone(job, 1.0)
    for ready in tmp_path.glob("ready-*"):
        ready.unlink()
    job = start(jobs, tmp_path, "-H", "n1:1,n2:1", path, "stay")
    wait_until_ready(tmp_path, 2)
    job.process.kill()
    assert_gone(job)


def test_a_host_that_cannot_reach_the_first_one_is_named_before_anything_starts(
    tmp_path: Path, jobs: list[Job]
) -> None:
    """192.0.2.1 is nobody's (RFC 5737): no answer, or no route."""
    elsewhere = ("--master-addr", "192.0.2.1", "--master-port", "29871")
    job = start(jobs, tmp_path, "-H", "n1:1,n2:1", *elsewhere, script(tmp_path, ALONE))
    job.wait()
    assert job.process.returncode == 1
    assert "ringrun: FAILED: n2 cannot reach n1 at 192.0.2.1 port 29871: " in job.err
    assert "open TCP port 29871 of n1 to the other hosts" in job.err
    assert "ringrun: nothing was started" in job.err
    assert not list(tmp_path.glob("ready-*"))


@pytest.mark.slow  # two hosts are examined
def test_the_doctor_goes_on_with_what_it_sees_over_ssh(tmp_path: Path, jobs: list[Job]) -> None:
    elsewhere = ("--master-addr", "192.0.2.1", "--master-port", "29871")
    job = start(jobs, tmp_path, "-H", "n1:1,n2:1", *elsewhere, "--log-dir", "/dev/null", "-m", "ringdp", "doctor")
    job.wait(90)
    assert job.process.returncode == 1
    assert "ringrun: n2 cannot reach n1 at 192.0.2.1 port 29871: " in job.err
    assert "ringdp doctor on " in job.out
    assert "[n2] ringdp doctor on " in job.out


def test_over_ssh(tmp_path: Path, jobs: list[Job], ssh: str) -> None:
    sshd = f"{ssh} -T"
    path = script(tmp_path, TRAIN)
    job = start(jobs, tmp_path, "-H", "localhost:1,127.0.0.1:1", path, ssh=sshd)
    assert job.wait() == 0, job.err
    assert job.out == "rank 0 of 2 has None\n"
    for ready in tmp_path.glob("ready-*"):
        ready.unlink()
    path = script(tmp_path, ALONE)
    job = start(jobs, tmp_path, "-H", "localhost:1,127.0.0.1:1", path, "stay", ssh=sshd)
    wait_until_ready(tmp_path, 2)
    clients = {pid: Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in job.processes()}
    (connection,) = [pid for pid, words in clients.items() if words[0] == "ssh" and "127.0.0.1" in words]
    os.kill(connection, signal.SIGKILL)
    assert job.wait() == 1
    assert "the connection to 127.0.0.1 was lost" in job.err
    assert_gone(job)
