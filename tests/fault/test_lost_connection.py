"""`ssh host ringrun …` whose client is killed: the ranks end, and those that the user has detached go on."""

from __future__ import annotations

import os
import pty
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fault.launch_jobs import LAUNCH, ROOT, Job, wait_until

RUN = shlex.join(LAUNCH) + " -n 1 --no-python sh -c 'echo begin; touch ready; exec sleep 600'"
pytestmark = pytest.mark.timeout(120)


def start(jobs: list[Job], folder: Path, ssh: str, command: str, stdio: int | None = None) -> Job:
    """The client of a connection that runs a command in `folder`."""
    folder.mkdir()
    there = f"cd {folder}; {command}"
    jobs.append(Job(folder, "127.0.0.1", there, command=shlex.split(ssh), stdio=stdio))
    return jobs[-1]


def lose(job: Job) -> None:
    """Kill the client when the rank runs."""
    wait_until(lambda: (job.folder / "ready").exists(), f"the rank; {job.err}", 60)
    job.process.kill()
    job.process.wait()


def ended(job: Job) -> bool:
    return job.processes() == []


def test_the_ranks_end_with_the_connection(tmp_path: Path, jobs: list[Job], ssh: str) -> None:
    job = start(jobs, tmp_path / "plain", ssh, RUN)
    lose(job)
    wait_until(lambda: ended(job), "the end of the ranks", 8)
    assert "the ssh connection was lost after" in (job.run_folder() / "launcher.log").read_text()


@pytest.mark.ci
def test_with_a_terminal_without_input_or_behind_a_pipe(tmp_path: Path, jobs: list[Job], ssh: str) -> None:
    outer, inner = pty.openpty()
    mux = f"-o ControlPath={tmp_path}/mux"
    jobs.append(Job(tmp_path, "-N", "-M", "127.0.0.1", command=shlex.split(f"{ssh} {mux}")))
    master = jobs[-1].process
    wait_until(lambda: Path(f"{tmp_path}/mux").exists(), "the shared connection")
    several = [
        start(jobs, tmp_path / "terminal", f"{ssh} -tt", RUN, stdio=inner),
        start(jobs, tmp_path / "no-input", f"{ssh} -n", RUN),
        start(jobs, tmp_path / "log", ssh, f"{RUN} > log 2>&1"),
        start(jobs, tmp_path / "tee", ssh, f"{RUN} 2>&1 | tee log"),
        start(jobs, tmp_path / "shell", ssh, f"{RUN}; echo $?"),
        start(jobs, tmp_path / "shared", f"{ssh} -T {mux}", RUN, stdio=inner),
    ]
    for job in several:
        lose(job)
    for job in several:
        wait_until(lambda job=job: ended(job), f"the end of {job.folder.name}", 10)  # type: ignore[misc]
    assert master.poll() is None
    os.close(outer)
    os.close(inner)


@pytest.mark.ci
def test_what_is_detached_goes_on(tmp_path: Path, jobs: list[Job], ssh: str) -> None:
    detached = [
        start(jobs, tmp_path / "nohup", ssh, f"nohup {RUN}"),
        start(jobs, tmp_path / "setsid", ssh, f"setsid {RUN}"),
        start(jobs, tmp_path / "background", ssh, f"{RUN} > log 2>&1 & wait"),
        start(jobs, tmp_path / "elsewhere", ssh, f"{RUN} < /dev/null > log 2>&1"),
        start(jobs, tmp_path / "pipe", ssh, f"nohup {RUN} 2>&1 | head -n 1"),
    ]
    for job in detached:
        lose(job)
    plain = start(jobs, tmp_path / "plain", ssh, RUN)  # for as long as this takes, no sleep
    lose(plain)
    wait_until(lambda: ended(plain), "the end of the one that is not", 10)
    assert [job.folder.name for job in detached if ended(job)] == []


@pytest.mark.ci
def test_a_reader_that_leaves_ends_nothing(tmp_path: Path, jobs: list[Job], ssh: str) -> None:
    """`| head` here and there, /dev/null as input, and no terminal anywhere: the run ends well."""
    run = RUN.replace("exec sleep 600", "sleep 1; for i in 1 2 3 4 5 6; do echo $i; sleep 0.2; done; touch done")
    (tmp_path / "head").mkdir()
    here = ["sh", "-c", f"cd {tmp_path}/head; {run} 2>&1 | head -n 1"]
    subprocess.run(here, env={**os.environ, "SSH_CONNECTION": "1.2.3.4 5 6.7.8.9 22"}, check=True, timeout=60)
    job = start(jobs, tmp_path / "there", ssh, f"{run} 2>&1 | head -n 1")
    assert job.wait() == 0
    reader = shlex.quote(f'{ssh} "$@" | head -n 1')
    piped = start(jobs, tmp_path / "client", f"sh -c {reader} sh", run)
    merged = start(jobs, tmp_path / "merged", f"sh -c {reader} sh", f"{run} 2>&1")
    assert piped.wait() == 0
    assert merged.wait() == 0
    for name in ("head", "there", "client", "merged"):
        wait_until(lambda name=name: (tmp_path / name / "done").exists(), f"the end of {name}", 20)  # type: ignore[misc]


@pytest.mark.ci
def test_the_launcher_of_several_hosts(tmp_path: Path, jobs: list[Job], ssh: str) -> None:
    words = [sys.executable, str(ROOT / "launch.py"), "-H", "a:1,b:1", "--ssh", "env NAMED={host} sh -c"]
    program = "touch ready; exec sleep 600"
    job = start(jobs, tmp_path / "many", ssh, shlex.join([*words, "--no-python", "sh", "-c", program]))
    lose(job)
    wait_until(lambda: ended(job), "the end on all hosts", 15)


def test_a_launcher_under_a_terminal_or_a_batch_system_belongs_to_none() -> None:
    code = "from ringdp.launcher.connection import Connection; print(Connection.of_this_process())"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "None\n"
