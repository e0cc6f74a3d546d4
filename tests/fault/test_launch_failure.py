"""A run that fails ends with at most fifteen lines that name the rank, the host, the cause and the log."""

from __future__ import annotations

import re
import socket
from pathlib import Path

from tests.fault.launch_jobs import Job, script

ENDLESS = """
    import os, pathlib, signal, sys, time
    rank = os.environ["RANK"]
    if rank == "0":
        print("rank 0 begins")
        pathlib.Path("ready").touch()
        time.sleep(600)
    while not pathlib.Path("ready").exists():
        time.sleep(0.01)
"""


def run(jobs: list[Job], folder: Path, *arguments: str | Path, environ: dict[str, str] | None = None) -> Job:
    job = Job(folder, *arguments, environ=environ)
    jobs.append(job)
    job.wait()
    assert job.processes() == []
    return job


def summary_of(job: Job) -> list[str]:
    lines = job.err.splitlines()
    (start,) = [index for index, line in enumerate(lines) if line.startswith("ringrun: FAILED")]
    assert len(lines) - start <= 15
    return lines[start:]


def log_named_in(job: Job, summary: list[str]) -> Path:
    (name,) = [line.partition("full log: ")[2] for line in summary if "full log: " in line]
    return job.folder / name


def test_a_rank_with_fewer_batches(tmp_path: Path, jobs: list[Job]) -> None:
    """In a whole job: the goodbye, the reducer's error and the launcher's verdict come from three places."""
    text = """
    import torch, ringdp
    ringdp.init()
    model = ringdp.RingDP(torch.nn.Linear(2, 1))
    for _ in range(12 if ringdp.rank() == 1 else 13):
        model(torch.randn(4, 2)).sum().backward()
    """
    job = run(jobs, tmp_path, "--nproc-per-node", "2", script(tmp_path, text))
    words = (
        "rank 1 finished its script after 12 steps (exit code 0) while rank 0 makes step 13: the ranks have different"
        " numbers of batches. Use DistributedSampler, drop_last=True, or `with model.join():`"
    )
    assert summary_of(job)[0].endswith(words)
    assert "rank 1's program ended after 12 steps while rank 0 makes step 13: " in job.err  # of rank 0, by itself
    (verdict,) = tmp_path.rglob("verdict.json")
    assert words in verdict.read_text()


def test_an_exception(tmp_path: Path, jobs: list[Job]) -> None:
    text = (
        ENDLESS
        + """
    def deep(n):
        if n == 0:
            raise ValueError("batch 7 has no labels")
        deep(n - 1)
    deep(30)
    """
    )
    job = run(jobs, tmp_path, "--nproc-per-node", "2", script(tmp_path, text))
    assert job.process.returncode == 1
    summary = summary_of(job)
    expected = f"rank 1 on host {re.escape(socket.gethostname())} raised ValueError: batch 7 has no labels"
    assert re.match(rf"ringrun: FAILED after [\d.]+ s: {expected}$", summary[0])
    assert any("raise ValueError" in line for line in summary)
    assert any("rank 0 stopped" in line for line in summary)
    assert "ValueError: batch 7 has no labels" in log_named_in(job, summary).read_text()
    before = job.err.split("ringrun: FAILED")[0]
    assert before.count("[rank 1] ValueError: batch 7 has no labels") == 1
    assert before.count("Traceback") == 1  # the rank's, not torch's
    assert job.out == "rank 0 begins\n"


def test_a_rank_killed_by_a_signal(tmp_path: Path, jobs: list[Job]) -> None:
    text = (
        ENDLESS
        + """
    print("loading the data", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    )
    job = run(jobs, tmp_path, "--nproc-per-node", "2", script(tmp_path, text))
    assert job.process.returncode == 1
    summary = summary_of(job)
    assert "rank 1 on host" in summary[0]
    assert "was killed by SIGKILL (often: out of memory" in summary[0]
    assert any("loading the data" in line for line in summary)
    assert log_named_in(job, summary).read_text() == "loading the data\n"


def test_a_rank_that_exits_without_a_word_and_is_started_again(tmp_path: Path, jobs: list[Job]) -> None:
    text = (
        ENDLESS
        + """
    sys.exit(3)
    """
    )
    job = run(jobs, tmp_path, "--nproc-per-node", "2", "--max-restarts", "1", script(tmp_path, text))
    assert job.process.returncode == 1
    summary = summary_of(job)
    assert re.match(
        r"ringrun: FAILED after [\d.]+ s and 1 restart: rank 1 on host \S+ ended with exit code 3$", summary[0]
    )
    log = f"{job.run_folder().relative_to(tmp_path)}/attempt_0/1/stderr.log"
    verdict = f"attempt 0: rank 1 on host {socket.gethostname()} ended with exit code 3; log: {log}"
    before = job.err.split("ringrun: FAILED")[0].splitlines()
    assert (
        before[1:]
        == [
            "rank 0 begins",
            f"ringrun: {verdict}",
            "ringrun: starting again: ranks 0-1 of 2, restart 1 of 1",
        ][1:]
    )
    assert f"  before: {verdict}" in summary
    assert "attempt_1/1/" in str(log_named_in(job, summary))
    assert (job.run_folder() / "attempt_0" / "0" / "stdout.log").read_text() == "rank 0 begins\n"


def test_three_verdicts_before_the_last_are_kept(tmp_path: Path, jobs: list[Job]) -> None:
    text = """
        import os
        raise ValueError(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']} had enough")
    """
    job = run(jobs, tmp_path, "-n", "1", "--max-restarts", "5", script(tmp_path, text))
    summary = summary_of(job)
    assert "raised ValueError: attempt 5 had enough" in summary[0]
    before = [line for line in summary if line.startswith("  before: ")]
    assert [
        re.findall(r"ValueError: attempt (\d) had enough; log: logs/.*/attempt_(\d)/0/stderr.log", it) for it in before
    ] == [[(number, number)] for number in "234"]


def test_the_log_that_is_named_has_the_lines(tmp_path: Path, jobs: list[Job]) -> None:
    job = run(jobs, tmp_path, "-n", "1", script(tmp_path, "import sys; print('only here'); sys.exit(4)"))
    summary = summary_of(job)
    assert "    | only here" in summary
    assert "only here" in log_named_in(job, summary).read_text()


def test_a_port_in_use_and_a_gpu_that_is_not_there(tmp_path: Path, jobs: list[Job]) -> None:
    path = script(tmp_path, ENDLESS)
    with socket.create_server(("", 0)) as other:
        port = str(other.getsockname()[1])
        flags = ("--nnodes", "2", "--node-rank", "0", "--master-addr", "127.0.0.1", "--master-port", port)
        job = run(jobs, tmp_path, *flags, path)
    assert f"port {port} of this host is in use, perhaps by another job: choose another --master-port" in job.err
    job = run(jobs, tmp_path, "--nproc-per-node", "gpu", path, environ={"CUDA_VISIBLE_DEVICES": "-1"})
    assert "--nproc-per-node gpu: torch finds no such device on this host: give a number" in job.err


def test_the_launcher_cannot_start_the_ranks(tmp_path: Path, jobs: list[Job]) -> None:
    job = run(jobs, tmp_path, "--nproc-per-node", "plenty", script(tmp_path, ENDLESS))
    assert job.process.returncode == 1
    summary = summary_of(job)
    assert "Unsupported nproc_per_node value: plenty" in summary[0]
    assert "Traceback" not in job.err
    assert "Traceback" in log_named_in(job, summary).read_text()


def test_all_ranks_fail_alike(tmp_path: Path, jobs: list[Job]) -> None:
    """Rank 0's stack, as its output is shown as it is, at most one other, and a line for each further rank."""
    text = """
    import os, pathlib, time
    rank = os.environ["RANK"]
    pathlib.Path("ready" + rank).touch()
    while not all(pathlib.Path(f"ready{r}").exists() for r in range(3)):
        time.sleep(0.01)
    raise ValueError("no data for rank " + rank)
    """
    job = run(jobs, tmp_path, "--nproc-per-node", "3", "--monitor-interval", "2", script(tmp_path, text))
    before = job.err.split("ringrun: FAILED")[0]
    assert 1 <= before.count("Traceback") <= 2
    for rank in range(3):
        assert before.count(f"ValueError: no data for rank {rank}\n") == 1
    assert any("ValueError" in line and "then:" in line for line in summary_of(job))
