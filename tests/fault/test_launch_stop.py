"""Ctrl-C, SIGTERM and SIGKILL at several moments: the prompt is back in time and no process is left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import socket
import struct
import termios
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fault.launch_jobs import LAUNCH, Job, script, wait_until

LIMIT_S = 5.0
# Where the moment is one in which Python loads torch: beside a compiler that alone takes tens of seconds.
LOADING_LIMIT_S = 60.0

# Each rank leaves a file when it runs, and has a child in a session of its own, as a daemon would be.
STUBBORN = """
    import os, pathlib, signal, subprocess, sys, time
    rank = os.environ["RANK"]
    if "ignore" in sys.argv:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    subprocess.Popen(["sleep", "600"], start_new_session=True)
    pathlib.Path("ready" + rank).touch()
    time.sleep(600)
"""


def ready(folder: Path, ranks: int = 2) -> bool:
    return all((folder / f"ready{rank}").exists() for rank in range(ranks))


def assert_gone(job: Job) -> None:
    """Nothing is left: no process, no secret."""
    assert job.processes() == []
    temporary = job.folder / "tmp"
    assert [p for p in temporary.iterdir() if p.name.startswith("ringdp-")] == []


def start(
    jobs: list[Job], folder: Path, *arguments: str | Path, grace: str = "", command: Sequence[str] | None = None
) -> Job:
    (folder / "tmp").mkdir(exist_ok=True)
    environ = {"TMPDIR": str(folder / "tmp"), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": grace}
    job = Job(folder, *arguments, command=command, environ=environ)
    jobs.append(job)
    return job


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_running_ranks_end_with_their_children(tmp_path: Path, jobs: list[Job], number: signal.Signals) -> None:
    job = start(jobs, tmp_path, "--nproc-per-node", "2", script(tmp_path, STUBBORN))
    wait_until(lambda: ready(tmp_path), "both ranks")
    wait_until(lambda: len(job.processes()) == 2 + 2 * 3, "their children")
    job.process.send_signal(number)
    assert job.seconds_to_end() < LIMIT_S
    assert_gone(job)
    assert job.process.returncode == (-signal.SIGINT if number == signal.SIGINT else 128 + number)
    assert f"stopped by {number.name}" in job.err
    assert "[rank 1]" not in job.err  # its KeyboardInterrupt is no news


def test_ranks_that_ignore_signals_are_killed(tmp_path: Path, jobs: list[Job]) -> None:
    job = start(jobs, tmp_path, "--nproc-per-node", "2", script(tmp_path, STUBBORN), "ignore")
    wait_until(lambda: ready(tmp_path), "both ranks")
    job.process.send_signal(signal.SIGINT)
    assert job.seconds_to_end() < LIMIT_S
    assert_gone(job)


@pytest.mark.parametrize(("number", "flags"), [(signal.SIGINT, ()), (signal.SIGTERM, ("--elastic",))], ids=str)
def test_a_second_signal_ends_at_once(
    tmp_path: Path, jobs: list[Job], number: signal.Signals, flags: tuple[str, ...]
) -> None:
    job = start(jobs, tmp_path, *flags, "--nproc-per-node", "2", script(tmp_path, STUBBORN), "ignore", grace="60")
    wait_until(lambda: ready(tmp_path), "both ranks")
    begin = time.monotonic()
    while job.process.poll() is None:  # a very quick second one counts as the first
        job.process.send_signal(number)
        time.sleep(0.02)
        assert time.monotonic() - begin < 2.0
    assert_gone(job)
    assert f"ringrun: stopped by {number.name}: all processes were killed\n" in job.err


def test_while_importing(tmp_path: Path, jobs: list[Job]) -> None:
    job = start(jobs, tmp_path, "--nproc-per-node", "2", script(tmp_path, STUBBORN), command=LAUNCH)
    wait_until(
        lambda: "torch" in Path(f"/proc/{job.process.pid}/maps").read_text(), "torch being loaded", LOADING_LIMIT_S
    )
    job.process.send_signal(signal.SIGINT)
    assert job.seconds_to_end(LOADING_LIMIT_S) < LOADING_LIMIT_S
    assert job.process.returncode in (-signal.SIGINT, 130)
    assert_gone(job)
    assert "Traceback" not in job.err


def test_while_waiting_for_other_hosts(tmp_path: Path, jobs: list[Job]) -> None:
    """torch's agent waits in C++ then, here for a first host that answers nothing, and hears no signal."""
    with socket.create_server(("127.0.0.1", 0)) as first_host:
        first_host.settimeout(30)
        address, port = first_host.getsockname()
        flags = ("--nnodes", "2", "--node-rank", "1", "--master-addr", address, "--master-port", str(port))
        job = start(jobs, tmp_path, *flags, script(tmp_path, STUBBORN))
        connection, _ = first_host.accept()
        with connection:
            job.process.send_signal(signal.SIGINT)
            assert job.seconds_to_end() < 2.0  # there is no rank to wait for
    assert_gone(job)


def test_while_ranks_are_being_started(tmp_path: Path, jobs: list[Job]) -> None:
    """torch loses track of the ranks it has started when it is interrupted before the last one."""
    job = start(jobs, tmp_path, "--nproc-per-node", "12", "--no-python", script_without_python(tmp_path))
    wait_until(lambda: any(tmp_path.glob("ready*")), "the first rank")
    job.process.send_signal(signal.SIGINT)
    assert job.seconds_to_end() < LIMIT_S
    assert_gone(job)


def test_while_the_others_are_being_ended_after_a_failure(tmp_path: Path, jobs: list[Job]) -> None:
    """torch waits thirty seconds for a rank that takes its time after another one has failed."""
    path = script(
        tmp_path,
        """
        import os, pathlib, signal, sys, time
        if os.environ["RANK"] == "1":
            while not pathlib.Path("ready0").exists():
                time.sleep(0.01)
            sys.exit(3)
        signal.signal(signal.SIGTERM, lambda *_: pathlib.Path("told").touch())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        pathlib.Path("ready0").touch()
        while True:
            time.sleep(600)
        """,
    )
    job = start(jobs, tmp_path, "--nproc-per-node", "2", path, grace="1")
    wait_until((tmp_path / "told").exists, "rank 0 being asked to end")
    job.process.send_signal(signal.SIGINT)
    assert job.seconds_to_end() < LIMIT_S
    assert_gone(job)


def test_a_killed_launcher_leaves_no_rank(tmp_path: Path, jobs: list[Job]) -> None:
    job = start(jobs, tmp_path, "--nproc-per-node", "2", script(tmp_path, STUBBORN), "ignore")
    wait_until(lambda: ready(tmp_path), "both ranks")
    job.process.kill()
    job.process.wait()
    wait_until(lambda: not job.processes(), "all processes to be gone", limit_s=LIMIT_S)
    assert_gone(job)


def test_a_killed_agent_is_told_of_and_leaves_no_rank(tmp_path: Path, jobs: list[Job]) -> None:
    job = start(jobs, tmp_path, "--nproc-per-node", "2", script(tmp_path, STUBBORN))
    wait_until(lambda: ready(tmp_path), "both ranks")
    os.kill(job.agent(), signal.SIGKILL)
    assert job.seconds_to_end() < LIMIT_S
    assert job.process.returncode == 1
    assert "agent" in job.err
    assert "SIGKILL" in job.err
    assert_gone(job)


def test_on_a_terminal_rank_0_sees_one_and_ctrl_c_is_typed(tmp_path: Path) -> None:
    """The whole way: a controlling terminal, a progress bar, and the key."""
    path = script(
        tmp_path,
        """
        import os, pathlib, signal, sys, time
        def save(*_):
            signal.signal(signal.SIGINT, lambda *_: pathlib.Path("told twice").touch())
            time.sleep(0.5)  # the work of saving
            pathlib.Path("saved" + os.environ["RANK"]).touch()
            sys.exit(0)
        signal.signal(signal.SIGINT, save)
        assert os.environ["RANK"] != "0" or (sys.stdout.isatty() and sys.stderr.isatty())
        pathlib.Path("ready" + os.environ["RANK"]).touch()
        if os.environ["RANK"] == "0":
            print("\\rbar 10%", end="", file=sys.stderr, flush=True)
            print("\\rbar 20%", end="", file=sys.stderr, flush=True)
            print("columns", os.get_terminal_size().columns, flush=True)
        time.sleep(600)
        """,
    )
    pid, master = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execv(LAUNCH[0], [*LAUNCH, "--nproc-per-node", "2", str(path)])
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("4H", 40, 123, 0, 0))
    os.set_blocking(master, False)
    seen = b""

    def said(text: bytes) -> bool:
        nonlocal seen
        with contextlib.suppress(OSError):
            seen += os.read(master, 65536)
        return text in seen

    wait_until(lambda: said(b"\rbar 10%\rbar 20%columns 123"), "the progress bar, and stdout in its place")
    wait_until(lambda: ready(tmp_path), "both ranks")
    os.write(master, b"\x03")
    begin = time.monotonic()
    wait_until(lambda: os.waitpid(pid, os.WNOHANG)[0] == pid, "the end", limit_s=LIMIT_S)
    assert time.monotonic() - begin < LIMIT_S
    said(b"")
    assert b"stopped by SIGINT" in seen
    assert all((tmp_path / f"saved{rank}").exists() for rank in range(2))
    assert not (tmp_path / "told twice").exists()
    (log,) = tmp_path.glob("logs/*/attempt_0/0/stderr.log")
    assert log.read_bytes().startswith(b"\rbar 10%\rbar 20%columns 123\n")
    os.close(master)


def script_without_python(folder: Path) -> Path:
    path = script(folder, "#!/bin/sh\n: > ready$RANK\nsleep 600 & wait\n", name="rank.sh")
    path.chmod(0o755)
    return path
