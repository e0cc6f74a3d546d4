"""The end of a job on several nodes, each with a launcher of its own: who waits for whom, and the job's exit code."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fault.launch_jobs import Job, script, wait_until
from tests.helpers import free_port

# Rank r does what its argument says: "well" ends at once, "kill", "raise" and "exit" fail, "slow" waits for a file,
# "again" fails in the first attempt alone.
PROGRAM = """
    import os, pathlib, signal, sys, time
    rank = int(os.environ["RANK"])
    part = sys.argv[1 + rank]
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    pathlib.Path(f"../rank{rank}-{attempt}").touch()
    def await_file(name):
        while not pathlib.Path("..", name).exists():
            time.sleep(0.02)
    if part != "well":
        await_file("go")
    if part == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if part == "raise" or (part == "again" and attempt == "0"):
        raise ValueError("no space for results")
    if part == "exit":
        sys.exit(3)
"""


def start(jobs: list[Job], folder: Path, parts: Sequence[str], *flags: str, backend: str = "static") -> list[Job]:
    """A launcher for each node of one rank."""
    path, port, nodes = script(folder, PROGRAM), str(free_port()), len(parts)
    for node in range(nodes):
        own = folder / f"node{node}"
        own.mkdir()
        where = ["--nnodes", str(nodes), "--nproc-per-node", "1", *flags]
        if backend == "static":
            where += ["--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", port]
        else:
            where += ["--rdzv-backend", "c10d", "--rdzv-id", "job", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        jobs.append(Job(own, *where, path, *parts))
    return jobs[-nodes:]


def rank_of(job: Job) -> int:
    """Of the rank that this launcher started: the c10d rendezvous numbers nodes by itself."""
    found = re.search(r"ringrun: rank (\d+) of", job.err)
    assert found, job.err
    return int(found[1])


def by_rank(started: Sequence[Job]) -> dict[int, Job]:
    """The launchers by their rank, once the ranks run."""
    wait_until(lambda: all("ringrun: rank " in job.err for job in started), "the ranks")
    return {rank_of(job): job for job in started}


def fails_within(job: Job, limit_s: float) -> None:
    """The launcher says so in time. That its interpreter ends takes seconds more on a busy machine."""
    wait_until(lambda: "ringrun: FAILED" in job.err, "the last words", limit_s)
    assert job.wait() == 1


def go(folder: Path) -> None:
    (folder / "go").touch()


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("kill", r"rank 1 on host \S+ was killed by SIGKILL"),
        ("raise", r"rank 1 on host \S+ raised ValueError: no space for results"),
        ("exit", r"rank 1 on host \S+ ended with exit code 3"),
    ],
)
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_a_rank_fails_when_those_of_the_other_node_have_ended(
    tmp_path: Path, jobs: list[Job], part: str, said: str, backend: str
) -> None:
    nodes = by_rank(start(jobs, tmp_path, ["well", part], backend=backend))
    time.sleep(1.0)
    assert nodes[0].process.poll() is None
    go(tmp_path)
    fails_within(nodes[0], 5)
    assert re.search(rf"ringrun: FAILED after .*: {said}.*; the ranks here had ended well\n", nodes[0].err), nodes[
        0
    ].err
    assert "finished" not in nodes[0].err
    assert nodes[1].wait() == 1
    assert "ringrun: FAILED" in nodes[1].err


def test_three_nodes_have_one_exit_code(tmp_path: Path, jobs: list[Job]) -> None:
    """Also where the first one, which keeps the store, fails itself, and where another still runs."""
    nodes = by_rank(start(jobs, tmp_path, ["raise", "well", "slow"]))
    go(tmp_path)
    assert [node.wait() for node in nodes.values()] == [1, 1, 1]
    for other in (1, 2):
        assert re.search(r"FAILED .*: rank 0 on host \S+ raised ValueError", nodes[other].err), nodes[other].err


def test_a_slow_node_is_waited_for_and_named(tmp_path: Path, jobs: list[Job]) -> None:
    nodes = by_rank(start(jobs, tmp_path, ["well", "slow"]))
    wait_until(lambda: "waits for node 1" in nodes[0].err, "the line")
    assert re.search(
        r"ringrun: node 0 of 2 waits for node 1 \(\S+\), whose ranks have not ended, since 3\.", nodes[0].err
    )
    go(tmp_path)
    assert [node.wait() for node in nodes.values()] == [0, 0]
    assert all("ringrun: finished" in node.err for node in nodes.values())


def test_a_launcher_is_killed_at_the_end(tmp_path: Path, jobs: list[Job]) -> None:
    nodes = by_rank(start(jobs, tmp_path, ["well", "slow"]))
    os.kill(nodes[1].process.pid, signal.SIGKILL)
    fails_within(nodes[0], 5)
    assert re.search(r"FAILED after .*: the launcher on host \S+ was killed", nodes[0].err), nodes[0].err


@pytest.mark.ci
def test_a_launcher_that_is_not_heard_of_any_more(tmp_path: Path, jobs: list[Job]) -> None:
    """With all its processes, as when its host is gone."""
    nodes = by_rank(start(jobs, tmp_path, ["well", "slow"]))
    for pid in (nodes[1].process.pid, *nodes[1].processes()):
        with contextlib.suppress(ProcessLookupError):  # it has ended with its launcher
            os.kill(pid, signal.SIGKILL)
    fails_within(nodes[0], 15)
    assert re.search(r"FAILED after .*: node 1( \(\S+\))?: no beat .* 10 s", nodes[0].err), nodes[0].err


def test_the_node_that_keeps_the_store_is_gone(tmp_path: Path, jobs: list[Job]) -> None:
    nodes = by_rank(start(jobs, tmp_path, ["slow", "well"]))
    wait_until(lambda: nodes[0].agent() > 0, "the agent")
    for pid in (nodes[0].process.pid, *nodes[0].processes()):
        os.kill(pid, signal.SIGKILL)
    fails_within(nodes[1], 15)
    assert "how it ended is not known" in nodes[1].err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_who_waits_can_be_stopped(tmp_path: Path, jobs: list[Job], number: signal.Signals) -> None:
    nodes = by_rank(start(jobs, tmp_path, ["well", "slow"]))
    wait_until((tmp_path / "rank0-0").exists, "the rank that ends well")
    time.sleep(1.0)
    nodes[0].process.send_signal(number)
    wait_until(lambda: "ringrun: stopped by" in nodes[0].err, "the last words", 2)
    assert nodes[0].wait() == (-number if number == signal.SIGINT else 128 + number)
    assert nodes[1].process.poll() is None
    go(tmp_path)
    assert nodes[1].wait() == 0  # all ranks of the job have ended well


def test_who_is_stopped_while_others_wait_for_it_tells_them(tmp_path: Path, jobs: list[Job]) -> None:
    nodes = by_rank(start(jobs, tmp_path, ["well", "slow"]))
    wait_until(lambda: all((tmp_path / f"rank{rank}-0").exists() for rank in nodes), "the ranks' scripts")
    nodes[1].process.send_signal(signal.SIGTERM)
    fails_within(nodes[0], 5)
    assert re.search(r"FAILED after .*: the launcher on host \S+ was stopped by SIGTERM", nodes[0].err), nodes[0].err


@pytest.mark.parametrize("flags", [(), ("--elastic",)], ids=str)
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_a_restart_is_one_of_all_nodes(tmp_path: Path, jobs: list[Job], backend: str, flags: tuple[str, ...]) -> None:
    """As on one host, where torch starts ranks again that had ended well."""
    nodes = by_rank(start(jobs, tmp_path, ["well", "again"], "--max-restarts", "2", *flags, backend=backend))
    time.sleep(1.0)
    go(tmp_path)
    assert [node.wait() for node in nodes.values()] == [0, 0], nodes[0].err
    assert sorted(path.name for path in tmp_path.glob("rank*")) == ["rank0-0", "rank0-1", "rank1-0", "rank1-1"]
    assert "restart 1 of 2" in nodes[0].err


def test_without_a_restart_left_here_the_failure_there_ends_the_job(tmp_path: Path, jobs: list[Job]) -> None:
    nodes = by_rank(start(jobs, tmp_path, ["well", "raise"], "--max-restarts", "1"))
    go(tmp_path)
    assert [node.wait() for node in nodes.values()] == [1, 1]
    assert re.search(r"FAILED after .*: rank 1 on host \S+ raised ValueError", nodes[0].err), nodes[0].err
