"""Ranks that are stopped, stuck or cut off: what the log says meanwhile, who is blamed in the end, who is not."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import need

torch: Any = need("torch")
import torch.distributed as dist  # noqa: E402

from tests.fault.hosts import Lab, Outcome, RankServer, RankSpec, one_on_each, run, why_not  # noqa: E402
from tests.fault.launch_jobs import wait_until  # noqa: E402
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
            about = line.partition("\nfor ")[2]
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
            assert any("its process answers" in line and "\nfor rank 1 (host " in line for line in notices), notices


# A host that is gone: its link is taken down, so that nobody says goodbye.


def reduce_until_it_fails(spec: RankSpec, outcome: Outcome) -> None:
    dist.init_process_group("ring", init_method=spec.method, rank=spec.rank, world_size=spec.world)
    folder, x = Path(spec.variables["FOLDER"]), torch.zeros(1_000_000)
    dist.all_reduce(x)
    dist.barrier()
    (folder / f"met-{spec.rank}").touch()
    while spec.variables["STATE"] == "idle" and not (folder / "cut-long-ago").exists():
        time.sleep(0.01)
    outcome.at = time.monotonic()
    while True:
        dist.all_reduce(x)


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("state", ("busy", pytest.param("idle", marks=pytest.mark.slow)))
def test_a_lost_host_is_named_within_five_seconds(server: RankServer, state: str, tmp_path: Path) -> None:
    with Lab(3) as lab:
        lab.switch("10.1.0.{}/24")
        variables = {"FOLDER": str(tmp_path), "STATE": state}
        server.start(one_on_each(lab, tmp_path, f"{__name__}:reduce_until_it_fails", variables), tmp_path)
        for rank in range(3):
            wait_until((tmp_path / f"met-{rank}").exists, f"rank {rank} in the job")
        run("ip", "-n", lab.middle, "link", "set", "up1", "down")
        cut = time.monotonic()
        if state == "idle":
            time.sleep(5.0)
            (tmp_path / "cut-long-ago").touch()
        outcomes = server.finish()
    for it in (outcomes[0], outcomes[2]):
        assert (it.error, it.peer) == ("PeerLostError", 1), it.text
        assert "rank 1 (host h1" in it.text
        assert "its host " in it.text
        if state == "busy":
            assert 3.0 < it.at - cut < 5.0, it
        else:
            assert it.seconds < 0.2, it
