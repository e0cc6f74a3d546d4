"""SIGUSR1 and SIGUSR2 to the launcher: they reach the ranks that handle them, and end nobody."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.fault.launch_jobs import LAUNCH, Job, script, wait_until
from tests.helpers import free_port
from tests.train.harness import ring_is_built

# "late": the handler is set when the file `set` is there. Ends when it has got the signal, or when the file `end` is
# there.
PROGRAM = """
    import os, pathlib, signal, sys, time
    got = []
    rank, attempt = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    def handle():
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda number, _: got.append(number))
    if sys.argv[1] == "handler":
        handle()
    if sys.argv[1] == "worker":
        if os.fork() == 0:
            time.sleep(60)
        handle()
    pathlib.Path(f"ready{rank}-{attempt}").touch()
    while not got and not pathlib.Path("end").exists():
        if sys.argv[1] == "late" and pathlib.Path("set").exists():
            handle()
        if sys.argv[1] == "again" and attempt == "0" and pathlib.Path("fail").exists():
            sys.exit(1)
        if sys.argv[1] == "again" and attempt == "1":
            handle()
        time.sleep(0.02)
    print("GOT", *map(int, got), flush=True)
"""


def start(jobs: list[Job], folder: Path, kind: str, *flags: str, ready: bool = True) -> Job:
    job = Job(folder, "-n", "2", "--console", "all", *flags, script(folder, PROGRAM), kind)
    jobs.append(job)
    if ready:
        wait_until(lambda: all((folder / f"ready{rank}-0").exists() for rank in range(2)), "the ranks")
    return job


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_ranks_with_a_handler_get_it(tmp_path: Path, jobs: list[Job], number: signal.Signals) -> None:
    job = start(jobs, tmp_path, "handler")
    job.process.send_signal(number)
    assert job.wait() == 0
    assert job.out.count(f"GOT {int(number)}\n") == 2, job.out + job.err
    assert f"ringrun: {number.name} was passed on to ranks 0-1" in job.err


def test_ranks_without_one_go_on_and_the_user_is_told(tmp_path: Path, jobs: list[Job]) -> None:
    job = start(jobs, tmp_path, "none")
    job.process.send_signal(signal.SIGUSR1)
    job.process.send_signal(signal.SIGUSR2)
    wait_until(lambda: job.err.count("no handler for it") == 2, "the lines")
    (tmp_path / "end").touch()
    assert job.wait() == 0
    assert job.out.count("GOT\n") == 2


def test_a_handler_that_is_set_later_gets_it(tmp_path: Path, jobs: list[Job]) -> None:
    job = start(jobs, tmp_path, "late")
    job.process.send_signal(signal.SIGUSR1)
    wait_until(lambda: "no handler for it" in job.err, "the line")
    (tmp_path / "set").touch()
    assert job.wait() == 0
    assert job.out.count(f"GOT {int(signal.SIGUSR1)}\n") == 2


def test_before_there_are_ranks(tmp_path: Path, jobs: list[Job]) -> None:
    """While the launcher itself imports torch."""
    path = script(tmp_path, PROGRAM)
    job = Job(tmp_path, "-n", "2", "--console", "all", path, "handler", command=LAUNCH)
    jobs.append(job)
    maps = Path(f"/proc/{job.process.pid}/maps")
    wait_until(lambda: "libtorch" in maps.read_text() or "libc10" in maps.read_text(), "torch")
    job.process.send_signal(signal.SIGUSR1)
    assert job.wait() == 0
    assert job.out.count(f"GOT {int(signal.SIGUSR1)}\n") == 2, job.err


def test_what_has_not_reached_all_is_for_the_ranks_that_are_started_again(tmp_path: Path, jobs: list[Job]) -> None:
    job = start(jobs, tmp_path, "again", "--max-restarts", "1")
    job.process.send_signal(signal.SIGUSR1)
    wait_until(lambda: "no handler for it" in job.err, "the line")
    (tmp_path / "fail").touch()
    assert job.wait() == 0
    assert job.out.count(f"GOT {int(signal.SIGUSR1)}\n") == 2


def test_what_a_rank_has_started_gets_none(tmp_path: Path, jobs: list[Job]) -> None:
    """A worker of a data loader, for example, which has no handler."""
    job = start(jobs, tmp_path, "worker")
    ranks = {int(pid) for pid in Path(f"/proc/{job.agent()}/task/{job.agent()}/children").read_text().split()}
    workers = [
        pid for rank in ranks for pid in map(int, Path(f"/proc/{rank}/task/{rank}/children").read_text().split())
    ]
    job.process.send_signal(signal.SIGUSR1)
    assert job.wait() == 0
    assert len(workers) == 2
    for worker in workers:  # left alone after a good end
        os.kill(worker, signal.SIGKILL)


def test_a_shell_script_around_the_rank(tmp_path: Path, jobs: list[Job]) -> None:
    path = script(tmp_path, PROGRAM)
    shell = tmp_path / "wrapper.sh"
    shell.write_text(f"#!/bin/sh\ntrap 'echo over' EXIT\npython {path} handler | cat\n")
    shell.chmod(0o755)
    job = Job(tmp_path, "-n", "1", "--no-python", "--console", "all", shell)
    jobs.append(job)
    wait_until(lambda: (tmp_path / "ready0-0").exists(), "the rank")
    job.process.send_signal(signal.SIGUSR1)
    assert job.wait() == 0
    assert f"GOT {int(signal.SIGUSR1)}\n" in job.out


def test_a_signal_that_every_process_gets_is_not_passed_on(tmp_path: Path, jobs: list[Job]) -> None:
    """As Slurm sends it to a step without `B:`; the agent survives it."""
    job = start(jobs, tmp_path, "late")
    for pid in (job.process.pid, job.agent()):
        os.kill(pid, signal.SIGUSR1)
    (tmp_path / "set").touch()
    time.sleep(1.5)
    assert job.process.poll() is None
    (tmp_path / "end").touch()
    assert job.wait() == 0
    assert job.out.count("GOT\n") == 2
    assert "SIGUSR1" not in job.err


def test_on_all_hosts_that_one_launcher_has_started(tmp_path: Path, jobs: list[Job]) -> None:
    path = script(tmp_path, PROGRAM)
    job = Job(tmp_path, "-H", "localhost:1,127.0.0.1:1", "--console", "all", path, "handler")
    jobs.append(job)
    wait_until(lambda: all((tmp_path / f"ready{rank}-0").exists() for rank in range(2)), "the ranks", 60)
    job.process.send_signal(signal.SIGUSR2)
    assert job.wait() == 0
    assert (job.out + job.err).count(f"GOT {int(signal.SIGUSR2)}") == 2, job.out + job.err


@pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")
def test_a_rank_of_ring_without_a_handler_writes_a_dump(tmp_path: Path, jobs: list[Job]) -> None:
    text = """
    import pathlib, ringdp, time
    ringdp.init()
    pathlib.Path("ready").touch()
    while not pathlib.Path("end").exists():
        time.sleep(0.02)
    """
    job = Job(tmp_path, "-n", "1", script(tmp_path, text), environ={"MASTER_PORT": str(free_port())})
    jobs.append(job)
    wait_until(lambda: (tmp_path / "ready").exists(), "the rank")
    job.process.send_signal(signal.SIGUSR1)
    wait_until(lambda: bool(list(job.run_folder().rglob("dump_rank0_*.json"))), "the dump")
    (tmp_path / "end").touch()
    assert job.wait() == 0
    assert re.search("SIGUSR1 was passed on to rank 0", job.err)
