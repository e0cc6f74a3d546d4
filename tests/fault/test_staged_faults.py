"""Ranks that are killed, stopped or cut off from their device while tensors are on their way between device and host
(`tests.core.staging`): named in time, and no copy writes to memory that is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.helpers import need

torch: Any = need("torch")
need("tests.core._core", "ringdp's extension, built with `make build`,")
import torch.distributed as dist  # noqa: E402

from tests.core.staging import staged  # noqa: E402
from tests.fault.rank_jobs import Story, die, expect_peer_lost, job, me, record, suffer, tell  # noqa: E402
from tests.fault.test_rank_death import run_outcomes, stories  # noqa: E402
from tests.train import harness  # noqa: E402

pytestmark = pytest.mark.skipif(not harness.ring_is_built(), reason="ringdp is not built (make build)")

LARGE = 2 * 1024 * 1024  # elements


def killed(folder: str, victim: int, hosts: str) -> Story:
    buffer = torch.ones(LARGE)
    turns = 0
    third = threading.Event()

    def reduce() -> None:
        nonlocal turns
        turns += 1
        if turns == 3:
            third.set()
        dist.all_reduce(buffer)

    with mock.patch.dict(os.environ, RINGDP_HOST_ID=hosts[me()[0]]), job(folder) as story, staged(me()[0]):
        if me()[0] == victim:
            threading.Thread(target=lambda: (third.wait(), die(folder)), daemon=True).start()
        suffer(story, reduce)
    return story


@pytest.mark.parametrize(("hosts", "victim"), [("aa", 1), ("aabb", 2)])
def test_killed_while_copies_are_under_way(hosts: str, victim: int, tmp_path: Path) -> None:
    outcomes = run_outcomes(killed, str(tmp_path), victim, hosts, world_size=len(hosts))
    for story in stories(outcomes, victim):
        expect_peer_lost(story, tmp_path, victim, "all_reduce #")


def killed_while_others_copy(folder: str, victim: int) -> Story:
    """The survivors' own input is still on its way, so they have not begun."""
    with job(folder) as story, staged(me()[0]) as device:
        device.hold(True)
        works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(3)]
        if me()[0] == victim:
            die(folder)
        call: Callable[[], Any] = works[0].wait
        try:
            call()
        except Exception as error:
            record(story, error)
    return story


def test_killed_while_the_others_have_not_begun(tmp_path: Path) -> None:
    outcomes = run_outcomes(killed_while_others_copy, str(tmp_path), 1, world_size=3)
    for story in stories(outcomes, 1):
        assert story.error == "PeerLostError", story.text
        assert "rank 1 (host " in story.text
        assert story.leftovers == []


def stopped(folder: str) -> Story:
    with job(folder, timeout_s=2.0) as story, staged(me()[0]):
        buffer = torch.ones(LARGE)
        dist.all_reduce(buffer)
        works = [dist.all_reduce(buffer, async_op=True) for _ in range(2)]
        if me()[0] == 1:
            # Who continues it: a shell, since this process cannot.
            script = f'until [ -e "{folder}/told-0" ] && [ -e "{folder}/told-2" ]; do sleep 0.05; done'
            helper = subprocess.Popen(["sh", "-c", f"{script}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
            helper.wait()
        try:
            works[-1].wait()
            dist.barrier()
        except Exception as error:
            record(story, error)
        tell(folder, "told")
    return story


def test_stopped_while_copies_are_under_way(tmp_path: Path) -> None:
    for story in stories(run_outcomes(stopped, str(tmp_path), world_size=3)):
        assert story.error == "RingTimeoutError", story.text
        assert "rank 1 (host " in story.text, story.text
        assert story.leftovers == []
