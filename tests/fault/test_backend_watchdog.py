"""Another backend reduces the buckets beside ring: gloo for CPU tensors, in the place that NCCL has for device tensors.

What must hold is the same: the averages are exact, a lost rank or a disagreement is named by ring within seconds, and
the other backend is aborted.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.fault.launch_jobs import wait_until
from tests.fault.rank_jobs import die, me, ringdp_threads, tell, told
from tests.helpers import need
from tests.train import harness

torch: Any = need("torch")
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

pytestmark = pytest.mark.skipif(not harness.ring_is_built(), reason="ringdp is not built (make build)")

BESIDE = "cpu:gloo,cuda:ring"  # nobody has a tensor on cuda: ring only watches
NAMED_WITHIN_S = 2.0


@contextmanager
def job(folder: str, timeout_s: float = 60.0) -> Iterator[list[str]]:
    """The default group with gloo beside ring; gives the names of the backends that are guarded."""
    from ringdp.job.backend_watchdog import watch_backends

    rank, world = me()
    method, timeout = f"file://{folder}/store", timedelta(seconds=timeout_s)
    dist.init_process_group(BESIDE, init_method=method, rank=rank, world_size=world, timeout=timeout)
    try:
        yield watch_backends()
    finally:
        dist.destroy_process_group()


def run(function: Any, *args: Any, world_size: int = 2) -> list[harness.Outcome]:
    return harness.run_outcomes(function, *args, world_size=world_size, backend=None, timeout_s=40.0)


def values(outcomes: list[harness.Outcome], dead: int | None = None) -> list[Any]:
    for outcome in outcomes:
        assert outcome.rank == dead or outcome.text is None, outcome.text
    return [outcome.value for outcome in outcomes if outcome.rank != dead]


def wrapped(**options: Any) -> Any:
    from ringdp.ddp.wrapper import RingDP

    torch.manual_seed(0)
    return RingDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), bucket_cap_mb=0.00001, **options)


def gradients(folder: str) -> tuple[list[str], list[Any], list[str]]:
    with job(folder) as guarded:
        model = wrapped()
        for step in range(5):
            model.zero_grad()
            model(torch.full((2, 4), float(me()[0] + step))).sum().backward()
        found = [parameter.grad.clone() for parameter in model.parameters()]
    return guarded, found, ringdp_threads()


@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_are_gloos(world_size: int, tmp_path: Path) -> None:
    stories = values(run(gradients, str(tmp_path), world_size=world_size))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    for rank in range(world_size):
        (model(torch.full((2, 4), float(rank + 4))).sum() / world_size).backward()
    for guarded, found, threads in stories:
        assert guarded == ["gloo"]
        assert threads == []
        for mine, parameter in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(mine, parameter.grad)


def a_rank_dies(folder: str, victim: int) -> dict[str, Any]:
    """`victim` is killed with its first bucket under way; the others say what they hear, and when."""
    with job(folder):
        model = wrapped()
        model(torch.ones(2, 4)).sum().backward()
        if me()[0] == victim:
            tell(folder, "ready")
            die(folder)
        loss = model(torch.ones(2, 4)).sum()
        told(folder, "ready", victim)
        with pytest.raises(Exception, match="rank") as caught:
            loss.backward()
        at, error = time.monotonic(), caught.value
        with pytest.raises(Exception, match="rank") as next_forward:
            model(torch.ones(2, 4))
        [watchdog] = watchdogs()
        wait_until(lambda: watchdog.aborted, "the abort of gloo")
        return {
            "type": type(error).__name__,
            "text": str(error),
            "at": at,
            "peer": getattr(error, "peer", None),
            "name": getattr(error, "name", None),
            "later": str(next_forward.value),
        }


def group() -> Any:
    return dist.group.WORLD


def watchdogs() -> list[Any]:
    from ringdp import _C

    return list(_C.watch_group(group()))


@pytest.mark.parametrize(("world_size", "victim"), [(2, 1), (3, 0)])
def test_a_rank_that_is_killed_is_named(world_size: int, victim: int, tmp_path: Path) -> None:
    stories = values(run(a_rank_dies, str(tmp_path), victim, world_size=world_size), dead=victim)
    died_at, pid = (tmp_path / "died").read_text().split()
    for story in stories:
        assert story["type"] == "PeerLostError", story["text"]
        assert story["peer"] == victim
        assert f"pid {pid}" in story["text"]
        assert "bucket 0: 1.bias" in story["text"]
        assert story["at"] - float(died_at) < NAMED_WITHIN_S
        assert "PeerLost" in story["later"] or f"rank {victim}" in story["later"]


def died_between_steps(folder: str) -> tuple[str, str]:
    """Nothing is under way; the next forward knows."""
    with job(folder):
        model = wrapped()
        model(torch.ones(2, 4)).sum().backward()
        if me()[0] == 1:
            die(folder)
        [watchdog] = watchdogs()
        wait_until(lambda: watchdog.aborted, "the abort of gloo")
        with pytest.raises(Exception, match="rank") as caught:
            model(torch.ones(2, 4))
        return type(caught.value).__name__, str(caught.value)


def test_a_rank_that_is_killed_between_steps_is_named_by_forward(tmp_path: Path) -> None:
    [(kind, text)] = values(run(died_between_steps, str(tmp_path)), dead=1)
    assert kind == "PeerLostError"
    assert "rank 1" in text


def other_model(folder: str) -> tuple[str, str]:
    """Parameters of other names and the same sizes (gloo ends the process for others); nobody has compared them."""
    with job(folder):
        model = wrapped(init_sync=False) if me()[0] == 0 else other(init_sync=False)
        with pytest.raises(Exception, match="all_reduce") as caught:
            train(model, steps=4)
        return type(caught.value).__name__, str(caught.value)


def train(model: Any, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()


def other(**options: Any) -> Any:
    from ringdp.ddp.wrapper import RingDP

    layers: OrderedDict[str, nn.Module] = OrderedDict(first=nn.Linear(4, 4), last=nn.Linear(4, 2))
    return RingDP(nn.Sequential(layers), bucket_cap_mb=0.00001, **options)


def test_buckets_that_differ_are_told_with_both_sides(tmp_path: Path) -> None:
    for kind, text in values(run(other_model, str(tmp_path))):
        assert kind == "MismatchError", text
        assert "by gloo" in text
        assert "ranks disagree about operation #" in text
        assert "bucket 0: 1.bias" in text
        assert "bucket 0: last.bias" in text


def a_rank_is_stopped(folder: str) -> tuple[list[str], bool]:
    with mock.patch.dict(os.environ, RINGDP_STALL_NOTICE="0.5"), job(folder):
        model = wrapped()
        model(torch.ones(2, 4)).sum().backward()
        lines: list[str] = []
        if me()[0] == 1:
            tell(folder, "pid", str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            handler = logging.Handler()
            handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
            logger = logging.getLogger("ringdp.core")
            logger.addHandler(handler)
            logger.setLevel(logging.INFO)
            pid = int(told(folder, "pid", 1))
            import threading

            def wake() -> None:
                try:
                    wait_until(lambda: bool(lines), "the notice")
                finally:
                    os.kill(pid, signal.SIGCONT)

            threading.Thread(target=wake, daemon=True).start()
        model(torch.ones(2, 4)).sum().backward()
        return lines, watchdogs()[0].aborted


def test_a_stopped_rank_gets_a_notice_and_no_error(tmp_path: Path) -> None:
    (lines, aborted), (_, aborted_there) = values(run(a_rank_is_stopped, str(tmp_path)))
    assert not aborted
    assert not aborted_there
    assert any("rank 1" in line and "by gloo" in line for line in lines), lines


def aborts_what_hangs(folder: str) -> tuple[str, float]:
    """The guarded backend waits for a message that nobody sends, as a kernel of NCCL's does for a rank that is gone."""
    from ringdp import _C
    from ringdp.config import RingConfig

    rank, world = me()
    store = torch.distributed.FileStore(f"{folder}/foreign", world - 1)
    with job(folder):
        ring = group()._get_backend(torch.device("cuda"))
        dist.barrier()
        if rank == world - 1:
            tell(folder, "ready")
            told(folder, "waits", 0)
            die(folder)
        foreign: Any = _C.create_process_group(
            store=store,
            rank=rank,
            size=world - 1,
            timeout=timedelta(seconds=60),
            group_id="foreign",
            global_ranks=[],
            config=RingConfig.from_environment().as_dict(),
        )
        watchdog = _C.watch_backend(ring, foreign)
        try:
            work = foreign.recv([torch.zeros(4)], (rank + 1) % (world - 1), 0)
            if rank == 0:
                tell(folder, "waits")
            with pytest.raises(Exception, match="aborted") as caught:
                work.wait()
            at = time.monotonic()
            wait_until(lambda: watchdog.aborted, "the end of the abort")
            return str(caught.value), at
        finally:
            foreign.shutdown()


def test_what_hangs_is_aborted(tmp_path: Path) -> None:
    stories = values(run(aborts_what_hangs, str(tmp_path), world_size=3), dead=2)
    died_at = float((tmp_path / "died").read_text().split()[0])
    for text, at in stories:
        assert "the process group was aborted" in text
        assert at - died_at < NAMED_WITHIN_S


def one_is_far_ahead(folder: str) -> None:
    """Leaves while the other has not announced its last step; neither may hear of an error."""
    with job(folder):
        model = wrapped()
        model(torch.ones(2, 4)).sum().backward()
        if me()[0] == 1:
            time.sleep(0.3)
        model(torch.ones(2, 4)).sum().backward()


def test_a_good_end_aborts_nothing(tmp_path: Path) -> None:
    values(run(one_is_far_ahead, str(tmp_path)))


def left_while_busy(folder: str) -> None:
    """The wrapper has the last reference to gloo, whose thread is about to let go of a tensor of Python's.

    torch keeps a process's first group: it is the second one that goes with its wrapper.
    """
    for number in range(2):
        with job(f"{folder}/{number}"):
            model = wrapped()
            model(torch.ones(2, 4)).sum().backward()
            if me()[0] == 1:
                time.sleep(0.5)
            work = dist.all_reduce(torch.ones(3), async_op=True)
            if me()[0] == 1:
                work.wait()
        del work
        del model


def test_the_last_reference_to_a_busy_backend_does_not_keep_pythons_lock(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / str(number)).mkdir()
    values(run(left_while_busy, str(tmp_path)))
