# mypy: disable-error-code="arg-type, attr-defined, union-attr, func-returns-value"
"""Process groups that are aborted, destroyed with work in flight, given other timeouts, and made anew."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import need
from tests.train.harness import ring_is_built, run_ranks

torch: Any = need("torch")
import torch.distributed as dist  # noqa: E402

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built (make build)")


def me() -> tuple[int, int]:
    import os

    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def join(folder: str, name: str) -> None:
    rank, world = me()
    dist.init_process_group("ring", init_method=f"file://{folder}/{name}", rank=rank, world_size=world)


def failure(call: Any) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def check_alive(folder: str, name: str) -> None:
    join(folder, name)
    ones = torch.ones(3)
    dist.all_reduce(ones)
    assert ones.tolist() == [me()[1]] * 3
    dist.destroy_process_group()


def aborted(folder: str) -> tuple[str, str]:
    join(folder, "first")
    rank, _ = me()
    dist.barrier()
    if rank == 0:
        works = [dist.irecv(torch.zeros(4), 1, tag=5), dist.all_reduce(torch.ones(4), async_op=True)]
        dist.group.WORLD.abort()
        kinds = [failure(work.wait) for work in works]
        assert {kind for kind, _ in kinds} == {"InvalidStateError"}, kinds
        told = failure(lambda: dist.all_reduce(torch.ones(2)))
    else:
        # It waits for rank 0 in something that rank 0 never calls.
        told = failure(lambda: dist.recv(torch.zeros(2), 0, tag=9))
    dist.destroy_process_group()
    check_alive(folder, "second")
    return told


def test_abort_ends_what_waits_everywhere_and_a_new_group_works(tmp_path: Path) -> None:
    start = time.monotonic()
    for kind, text in run_ranks(aborted, str(tmp_path), world_size=2, backend=None):
        assert kind == "InvalidStateError", text
        assert "the process group was aborted on rank 0" in text
    assert time.monotonic() - start < 30


def destroyed(folder: str) -> tuple[str, str]:
    join(folder, "first")
    rank, _ = me()
    some = dist.new_group([0, 1])
    dist.barrier()
    told = ("", "")
    if rank == 0:
        works = [dist.all_reduce(torch.ones(100), group=some, async_op=True)]
        dist.destroy_process_group(some)
        told = failure(works[0].wait)
    elif rank == 1:
        told = failure(lambda: dist.recv(torch.zeros(4), 0, group=some))
    # The other group has not suffered.
    ones = torch.ones(3)
    dist.all_reduce(ones)
    assert ones.tolist() == [3.0] * 3
    dist.destroy_process_group()
    check_alive(folder, "second")
    return told


def test_a_group_destroyed_with_work_in_flight(tmp_path: Path) -> None:
    stories = run_ranks(destroyed, str(tmp_path), world_size=3, backend=None)
    for kind, text in stories[:2]:
        assert kind == "InvalidStateError", text
        assert "destroyed on rank 0 while operations were in flight" in text


def other_timeouts() -> list[float]:
    rank, _ = me()
    group = dist.new_group([0, 1], timeout=timedelta(seconds=40))
    group.set_timeout(timedelta(milliseconds=300))
    waited = []
    if rank == 0:
        start = time.monotonic()
        kind, text = failure(lambda: dist.all_reduce(torch.ones(2), group=group))
        waited.append(time.monotonic() - start)
        assert kind == "RingTimeoutError", text
        assert "Timed out after 300 ms" in text
        # Of one wait: that goes on, and so does the operation.
        work = dist.irecv(torch.zeros(2), 1)
        start = time.monotonic()
        kind, text = failure(lambda: work.wait(timedelta(milliseconds=200)))
        waited.append(time.monotonic() - start)
        assert kind == "RingTimeoutError", text
        assert "the operation goes on" in text
        dist.send(torch.ones(1), 1)
        work.wait()
        assert work.is_completed()
    else:
        dist.recv(torch.zeros(1), 0)
        dist.send(torch.ones(2), 0)
    return waited


def held_beyond_its_end(folder: str) -> None:
    """One rank keeps the first default group alive; the next job's default group is gloo's, with a group of ring."""
    rank, world = me()
    join(folder, "first")
    kept = dist.group.WORLD if rank == 0 else None
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/second", rank=rank, world_size=world)
    ring = dist.new_group(backend="ring")
    ones = torch.ones(3)
    dist.all_reduce(ones, group=ring)
    assert ones.tolist() == [world] * 3
    dist.destroy_process_group()
    del kept


def test_a_group_that_is_held_beyond_its_end_is_not_used_again(tmp_path: Path) -> None:
    run_ranks(held_beyond_its_end, str(tmp_path), world_size=2, backend=None, timeout_s=30)


def joined_again_and_again(port: int) -> None:
    """Rank 0 keeps the store, ends it with each job, and takes its time: the others are back before it."""
    import ringdp

    rank, world = me()
    for _ in range(4):
        ringdp.init(rank=rank, world_size=world, init_method=f"tcp://127.0.0.1:{port}", timeout=20)
        ones = torch.ones(2)
        dist.all_reduce(ones)
        assert ones.tolist() == [world] * 2
        if rank == 0:
            time.sleep(0.2)
        ringdp.shutdown()


def test_jobs_one_after_the_other_at_one_address() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run_ranks(joined_again_and_again, port, world_size=4, backend=None, timeout_s=60)


def test_timeouts_of_a_group_and_of_a_wait() -> None:
    waited = run_ranks(other_timeouts, world_size=2, backend="ring")[0]
    assert all(0.15 < seconds < 2.0 for seconds in waited), waited
