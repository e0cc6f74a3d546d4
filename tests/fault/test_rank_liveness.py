"""Ranks that are stopped, stuck or cut off: what the log says meanwhile, who is blamed in the end, who is not."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import need

torch: Any = need("torch")
import torch.distributed as dist  # noqa: E402

from benchmarks.lib import hosts  # noqa: E402
from tests.fault.launch_jobs import ROOT, wait_until  # noqa: E402
from tests.fault.rank_jobs import Story, job, me, record, tell, told  # noqa: E402
from tests.train import harness  # noqa: E402

pytestmark = pytest.mark.skipif(not harness.ring_is_built(), reason="ringdp is not built (make build)")


class Notices(logging.Handler):
    """What the core logs in this process while the test's function runs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        assert (record.name, record.levelno) == ("ringdp.core", logging.WARNING)
        self.lines.append(record.getMessage())

    def __enter__(self) -> Notices:
        logging.getLogger("ringdp.core").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("ringdp.core").removeHandler(self)


def run_stories(function: Callable[..., Any], *args: Any, world_size: int = 3) -> list[tuple[Story, list[str]]]:
    """On ranks without a process group, which notice after half a second."""
    outcomes = harness.run_outcomes(with_notices, function, *args, world_size=world_size, backend=None, timeout_s=30.0)
    assert [outcome.text for outcome in outcomes] == [None] * world_size
    return [outcome.value for outcome in outcomes]


def with_notices(function: Callable[..., Story], *args: Any) -> tuple[Story, list[str]]:
    os.environ["RINGDP_STALL_NOTICE"] = "0.5"
    try:
        with Notices() as notices:
            story = function(*args)
    finally:
        del os.environ["RINGDP_STALL_NOTICE"]
    return story, notices.lines


def stopped_and_continued(folder: str) -> Story:
    rank, _ = me()
    with job(folder) as story:
        if rank == 1:
            # Who continues it: a shell, since this process cannot.
            script = f'until [ -e "{folder}/noticed-0" ] && [ -e "{folder}/noticed-2" ]; do sleep 0.05; done'
            helper = subprocess.Popen(["sh", "-c", f"{script}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
            helper.wait()
        work = dist.all_reduce(torch.ones(100_000), async_op=True)
        if rank != 1:
            notices = next(it for it in logging.getLogger("ringdp.core").handlers if isinstance(it, Notices))
            wait_until(lambda: len(notices.lines) >= 2, "two notices")
            tell(folder, "noticed")
        work.wait()
        x = torch.ones(3)
        dist.all_reduce(x)
        assert x.tolist() == [3.0, 3.0, 3.0]
    return story


def test_a_stopped_rank_is_told_of_and_waited_for(tmp_path: Path) -> None:
    for rank, (story, notices) in enumerate(run_stories(stopped_and_continued, str(tmp_path))):
        assert story.leftovers == []
        if rank == 1:
            continue
        assert len(notices) >= 2
        for line in notices:
            assert line.startswith(f"rank {rank} (host "), line
            about = line.partition(" for ")[2]
            assert about.startswith("rank 1 (host "), line
            assert "its host answers, its process does not: stopped or overloaded?" in about
            assert "rank 0" not in about
            assert "rank 2" not in about
            assert "all_reduce #2 (float32[100000], SUM)" in line


def stuck(folder: str) -> Story:
    rank, world = me()
    with job(folder) as story:
        group = dist.new_group(list(range(world)), timeout=timedelta(seconds=1.5))
        dist.all_reduce(torch.ones(3), group=group)
        if rank == 1:
            for other in (0, 2, 3):
                # Inside the interpreter, with its lock: nothing of Python runs in this process meanwhile.
                hold_the_lock(1.0)
                told(folder, "gave up", other)
        try:
            start = time.monotonic()
            while True:
                dist.all_reduce(torch.ones(300_000), group=group)
        except Exception as error:
            record(story, error)
            story.at = time.monotonic() - start
        tell(folder, "gave up")
        dist.barrier()
    return story


def hold_the_lock(seconds: float) -> None:
    import ctypes

    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def test_a_stuck_rank_is_the_only_one_blamed(tmp_path: Path) -> None:
    for rank, (story, notices) in enumerate(run_stories(stuck, str(tmp_path), world_size=4)):
        assert story.error == "RingTimeoutError", story.text
        assert story.fields["peer"] == 1
        assert story.leftovers == []
        about = story.text.partition("waiting for ")[2].partition(" (reported by ")[0]
        assert about.startswith("rank 1 (host "), story.text
        assert "it has not called this yet, its last one here was all_reduce #1 (float32[3], SUM)" in about
        assert not any(f"rank {other} " in about for other in (0, 2, 3)), story.text
        if rank != 1:
            assert 1.4 < story.at < 2.5
            assert any("its process answers" in line and " for rank 1 (host " in line for line in notices), notices


# A host that is gone: its link is taken down, so that nobody says goodbye.


LOST_HOST = """
import json, sys, time
from pathlib import Path
import torch, torch.distributed as dist
import ringdp
rank, folder, busy = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "busy"
dist.init_process_group("ring", init_method=f"file://{folder}/store", rank=rank, world_size=3)
x = torch.zeros(1_000_000)
dist.all_reduce(x)
dist.barrier()
(folder / f"met-{rank}").touch()
while not busy and not (folder / "cut-long-ago").exists():
    time.sleep(0.01)
try:
    start = time.monotonic()
    while True:
        dist.all_reduce(x)
except ringdp.errors.PeerLostError as error:
    said = {"at": time.monotonic(), "start": start, "peer": error.peer, "text": str(error)}
    (folder / f"new-{rank}").write_text(json.dumps(said))
    (folder / f"new-{rank}").rename(folder / f"said-{rank}")
while not (folder / "end").exists():
    time.sleep(0.01)
"""


@pytest.mark.parametrize("state", ("busy", pytest.param("idle", marks=pytest.mark.slow)))
def test_a_lost_host_is_named_within_five_seconds(state: str, tmp_path: Path) -> None:
    if (reason := hosts.why_not()) is not None:
        pytest.skip(reason)
    import json

    with hosts.Hosts(3, rate="none") as lab:
        ranks = []
        try:
            for rank in range(3):
                words = [sys.executable, "-c", LOST_HOST, str(rank), str(tmp_path), state]
                environ = {**lab.rank_env(rank=rank, per_host=1), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
                ranks.append(subprocess.Popen(lab.command(rank, words), env=environ, stderr=subprocess.PIPE, text=True))
            for rank in range(3):
                wait_until((tmp_path / f"met-{rank}").exists, f"rank {rank} in the job")
            hosts.set_link(lab.name, 1, "down")
            cut = time.monotonic()
            if state == "idle":
                wait_until(lambda: time.monotonic() - cut > 5.0, "five seconds")
                (tmp_path / "cut-long-ago").touch()
            for rank in (0, 2):
                wait_until((tmp_path / f"said-{rank}").exists, f"rank {rank} to know", 10.0)
                said = json.loads((tmp_path / f"said-{rank}").read_text())
                assert said["peer"] == 1, said
                assert "rank 1 (host h1" in said["text"]
                assert "its host " in said["text"]
                if state == "busy":
                    assert 3.0 < said["at"] - cut < 5.0, said
                else:
                    assert said["at"] - said["start"] < 0.2, said
            (tmp_path / "end").touch()
            for rank in (0, 2):
                assert "Error" not in ranks[rank].communicate(timeout=20)[1]
                assert ranks[rank].returncode == 0
        finally:
            for it in ranks:
                it.kill()
                it.wait()
