"""Ranks that are killed, raise, are silent, are interrupted or fork: who hears of it, how soon, in which words."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

import pytest

from tests.helpers import need

torch: Any = need("torch")
import torch.distributed as dist  # noqa: E402

from tests.fault.rank_jobs import Story, die, expect_peer_lost, job, me, record, suffer, tell, told  # noqa: E402
from tests.forked import Program  # noqa: E402
from tests.train import harness  # noqa: E402

pytestmark = pytest.mark.skipif(not harness.ring_is_built(), reason="ringdp is not built (make build)")

LARGE = 8 * 1024 * 1024  # elements


def stories(outcomes: list[harness.Outcome], victim: int | None = None) -> list[Story]:
    """What the survivors told; the victim died as it was meant to."""
    for outcome in outcomes:
        if outcome.rank == victim:
            assert outcome.text is not None
            assert "code -9" in outcome.text, outcome.text
        else:
            assert outcome.text is None, outcome.text
    return [outcome.value for outcome in outcomes if outcome.rank != victim]


def run_outcomes(function: Callable[..., Any], *args: Any, world_size: int = 2) -> list[harness.Outcome]:
    """On ranks without a process group: the functions make one and destroy it."""
    return harness.run_outcomes(function, *args, world_size=world_size, backend=None, timeout_s=20.0)


# Killed.


def in_a_large_all_reduce(folder: str, victim: int) -> Story:
    buffer = torch.ones(LARGE)
    turns = 0
    third = threading.Event()

    def reduce() -> None:
        nonlocal turns
        turns += 1
        if turns == 3:
            third.set()
        dist.all_reduce(buffer)

    with job(folder) as story:
        if me()[0] == victim:
            # The event wakes this thread when the other one has left Python for the all-reduce.
            threading.Thread(target=lambda: (third.wait(), die(folder)), daemon=True).start()
        suffer(story, reduce)
    return story


@pytest.mark.parametrize(("world_size", "victim"), ((2, 1), (2, 0), (4, 2)))
def test_killed_in_a_large_all_reduce(world_size: int, victim: int, tmp_path: Path) -> None:
    outcomes = run_outcomes(in_a_large_all_reduce, str(tmp_path), victim, world_size=world_size)
    for story in stories(outcomes, victim):
        expect_peer_lost(story, tmp_path, victim, "all_reduce #")


def in_two_levels(folder: str, victim: int, hosts: str) -> Story:
    with mock.patch.dict(os.environ, RINGDP_HOST_ID=hosts[me()[0]]):
        return in_a_large_all_reduce(folder, victim)


@pytest.mark.parametrize(
    ("hosts", "victim"),
    [("aabb", 1), *(pytest.param(*it, marks=pytest.mark.slow) for it in (("abab", 2), ("abbb", 0)))],
)
def test_killed_in_a_large_all_reduce_of_several_hosts(hosts: str, victim: int, tmp_path: Path) -> None:
    """The others hear of it whether they share its host, carry the same shares, or have no bytes to or from it."""
    outcomes = run_outcomes(in_two_levels, str(tmp_path), victim, hosts, world_size=4)
    for story in stories(outcomes, victim):
        expect_peer_lost(story, tmp_path, victim, "all_reduce #")


def along_a_tree(folder: str, victim: int, table: str) -> Story:
    with mock.patch.dict(os.environ, RINGDP_TUNING=table):
        return in_a_large_all_reduce(folder, victim)


@pytest.mark.parametrize("victim", (0, *(pytest.param(it, marks=pytest.mark.slow) for it in (2, 3))))
def test_killed_in_an_all_reduce_along_a_tree(victim: int, tmp_path: Path) -> None:
    """The root, a rank inside or one at the end; three ranks and more count as a large group here."""
    table = tmp_path / "tuning.json"
    limits = {"direct_ranks": 2, "fold_sent_bytes": 2**40}
    table.write_text(json.dumps({"ringdp_tuning": 1, "layouts": {"one_host": limits}}))
    outcomes = run_outcomes(along_a_tree, str(tmp_path), victim, str(table), world_size=4)
    for story in stories(outcomes, victim):
        expect_peer_lost(story, tmp_path, victim, "all_reduce #")


def held_back(folder: str, victim: int) -> Story:
    with mock.patch.dict(os.environ, RINGDP_RATE="2gbit", RINGDP_TRANSPORT="tcp"):
        return in_a_large_all_reduce(folder, victim)


def test_killed_while_a_rate_holds_everybody_back(tmp_path: Path) -> None:
    outcomes = run_outcomes(held_back, str(tmp_path), 2, world_size=4)
    for story in stories(outcomes, 2):
        expect_peer_lost(story, tmp_path, 2, "all_reduce #")


def in_a_compressed_all_reduce(folder: str, victim: int, hosts: str) -> Story:
    """As above; the codes of whole parts of the buffer are under way."""
    from ringdp import _C

    buffer, old, new = torch.ones(LARGE), torch.zeros(LARGE), torch.zeros(LARGE)
    turns = 0
    third = threading.Event()

    def reduce() -> None:
        nonlocal turns
        turns += 1
        if turns == 3:
            third.set()
        world = me()[1]
        _C.all_reduce_compressed(harness.default_group(), buffer, [0], [LARGE], [0], [old], [new], "int8", 1.0, world)[
            0
        ].wait()

    with mock.patch.dict(os.environ, RINGDP_HOST_ID=hosts[me()[0]]), job(folder) as story:
        if me()[0] == victim:
            threading.Thread(target=lambda: (third.wait(), die(folder)), daemon=True).start()
        suffer(story, reduce)
    return story


@pytest.mark.parametrize(("hosts", "victim"), (("aa", 1), ("aabb", 2), ("abcd", 0)))
def test_killed_in_a_compressed_all_reduce(hosts: str, victim: int, tmp_path: Path) -> None:
    outcomes = run_outcomes(in_a_compressed_all_reduce, str(tmp_path), victim, hosts, world_size=len(hosts))
    for story in stories(outcomes, victim):
        expect_peer_lost(story, tmp_path, victim, "all_reduce #")


def while_the_others_wait(folder: str, victim: int) -> Story:
    rank, world = me()
    with job(folder) as story:
        dist.all_reduce(torch.ones(3))
        if rank == victim:
            for other in set(range(world)) - {victim}:
                told(folder, "waiting", other)
            die(folder)
        tell(folder, "waiting")
        suffer(story, lambda: dist.all_reduce(torch.ones(3)))
    return story


@pytest.mark.parametrize(("world_size", "victim"), ((2, 1), (4, 1)))
def test_killed_while_the_others_wait_in_a_small_one(world_size: int, victim: int, tmp_path: Path) -> None:
    outcomes = run_outcomes(while_the_others_wait, str(tmp_path), victim, world_size=world_size)
    for story in stories(outcomes, victim):
        expect_peer_lost(story, tmp_path, victim, "all_reduce #")


def ends_otherwise(folder: str, how: str) -> Story:
    with job(folder) as story:
        dist.all_reduce(torch.ones(3))
        if me()[0] == 1:
            told(folder, "waiting", 0)
            Path(folder, "died").write_text(f"{time.monotonic()} {os.getpid()}")
            if how == "exit":
                os._exit(3)
            signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # pytest and the harness would write their stacks first
            os.kill(os.getpid(), signal.SIGSEGV)
        tell(folder, "waiting")
        suffer(story, lambda: dist.all_reduce(torch.ones(3)))
    return story


@pytest.mark.parametrize(("how", "code"), (("crash", "-11"), ("exit", "3")))
def test_crashes_and_sudden_exits_are_no_different(how: str, code: str, tmp_path: Path) -> None:
    survivor, victim = run_outcomes(ends_otherwise, str(tmp_path), how)
    assert victim.text is not None
    assert f"code {code}" in victim.text
    assert survivor.text is None, survivor.text
    expect_peer_lost(survivor.value, tmp_path, 1, "all_reduce #")


def with_works_pending(folder: str, victim: int) -> Story:
    rank, world = me()
    with job(folder) as story:
        if rank == victim:
            for other in set(range(world)) - {victim}:
                told(folder, "waiting", other)
            die(folder)
        suffer_pending(story, folder, victim)
    return story


def suffer_pending(story: Story, folder: str, victim: int) -> None:
    """Every work and every future fails, and callbacks are called all the same, in order."""
    buffers = [torch.ones(size) for size in (10, 300_000, 1, 70_000) * 5]
    works = [dist.all_reduce(buffer, async_op=True) for buffer in buffers]
    futures = [work.get_future() for work in works]
    called: list[int] = []

    def follow(index: int, done: Any) -> Any:
        called.append(index)
        return done.value()

    chained = [future.then(lambda done, index=index: follow(index, done)) for index, future in enumerate(futures)]
    tell(folder, "waiting")
    suffer(story, works[0].wait)
    for work in works:
        with pytest.raises(ConnectionError, match=f"rank {victim}"):
            work.wait()
        assert not work.is_success()
        assert work.is_completed()
    for future in [*futures, *chained]:
        with pytest.raises(Exception, match=f"rank {victim}"):
            future.wait()
    assert called == list(range(len(works)))


@pytest.mark.parametrize("world_size", (2, 3))
def test_killed_while_works_are_pending(world_size: int, tmp_path: Path) -> None:
    outcomes = run_outcomes(with_works_pending, str(tmp_path), 1, world_size=world_size)
    for story in stories(outcomes, victim=1):
        expect_peer_lost(story, tmp_path, 1, "all_reduce #")


def in_other_collectives(folder: str, which: str) -> Story:
    rank, world = me()
    one, all_ = torch.ones(1000), torch.ones(1000 * world)
    calls: dict[str, Callable[[], Any]] = {
        "broadcast": lambda: dist.broadcast(all_, src=1),
        "all_gather": lambda: dist.all_gather_into_tensor(all_, one),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(one, all_),
        "barrier": dist.barrier,
    }
    with job(folder) as story:
        if rank == 1:
            calls[which]()
            die(folder)
        suffer(story, calls[which])
    return story


@pytest.mark.parametrize("which", ("broadcast", "all_gather", "reduce_scatter", "barrier"))
def test_killed_between_other_collectives(which: str, tmp_path: Path) -> None:
    for story in stories(run_outcomes(in_other_collectives, str(tmp_path), which), victim=1):
        expect_peer_lost(story, tmp_path, 1, which)


def one_way(folder: str) -> Story:
    """The root only sends, and so may not notice; then the next operation says it."""
    with job(folder) as story:
        if me()[0] == 1:
            die(folder)
        suffer(story, lambda: dist.broadcast(torch.ones(1000), src=0))
    return story


def test_a_sender_hears_of_it_too(tmp_path: Path) -> None:
    for story in stories(run_outcomes(one_way, str(tmp_path)), victim=1):
        expect_peer_lost(story, tmp_path, 1, "broadcast #")


def only_its_groups(folder: str) -> Story:
    """Groups without the dead rank go on."""
    rank, _ = me()
    with job(folder) as story:
        pair = dist.new_group([0, 2])
        dist.barrier()
        if rank == 1:
            die(folder)
        suffer(story, lambda: dist.all_reduce(torch.ones(3)))
        x = torch.ones(100_000)
        dist.all_reduce(x, group=pair)
        assert x[-1].item() == 2
    return story


def test_groups_without_the_dead_rank_go_on(tmp_path: Path) -> None:
    for story in stories(run_outcomes(only_its_groups, str(tmp_path), world_size=3), victim=1):
        expect_peer_lost(story, tmp_path, 1, "all_reduce #")


# A child of the dead rank that lives on.


def child_outlives_it(folder: str) -> Story:
    with job(folder) as story:
        if me()[0] == 1:
            child = os.fork()
            if child == 0:
                live_on(folder)
            told(folder, "child", 1)
            die(folder)
        suffer(story, lambda: dist.all_reduce(torch.ones(3)))
    return story


def live_on(folder: str) -> NoReturn:
    """In the child: tell which connections it has, let the pipe to the test go, and stay."""
    connections = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as it:
            if it.family == socket.AF_UNIX:
                os.close(int(name))
            else:
                connections += 1
    tell(folder, "child", f"{os.getpid()} {connections}")
    while True:
        signal.pause()


def test_a_child_that_outlives_its_rank_delays_nothing(tmp_path: Path) -> None:
    try:
        outcomes = run_outcomes(child_outlives_it, str(tmp_path))
        child, connections = (tmp_path / "child-1").read_text().split()
        assert Path(f"/proc/{child}").exists()
        assert connections == "0"
        for story in stories(outcomes, victim=1):
            expect_peer_lost(story, tmp_path, 1, "all_reduce #")
    finally:
        if (tmp_path / "child-1").exists():
            os.kill(int((tmp_path / "child-1").read_text().split()[0]), signal.SIGKILL)


class Asks(torch.utils.data.Dataset[str]):
    """What a data loader's worker gets from the process group it was forked with."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> str:
        calls = (
            lambda: dist.all_reduce(torch.ones(3)),
            lambda: dist.barrier(async_op=True),
            lambda: dist.broadcast(torch.ones(3), src=0),
        )
        try:
            calls[index]()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"


def forked_calls(folder: str) -> list[str]:
    with job(folder) as story:
        pending = dist.all_reduce(torch.ones(3), async_op=True) if me()[0] == 0 else None
        loader = torch.utils.data.DataLoader(Asks(), num_workers=1, multiprocessing_context="fork", collate_fn=list)
        answers = [answer for batch in loader for answer in batch]
        if pending is None:
            dist.all_reduce(torch.ones(3))
        else:
            pending.wait()
        dist.barrier()  # the parent's own connections are as they were
    assert story.leftovers == []
    return answers


def test_calls_in_a_forked_child_are_refused(tmp_path: Path) -> None:
    for outcome in run_outcomes(forked_calls, str(tmp_path)):
        assert outcome.text is None, outcome.text
        assert len(outcome.value) == 3
        for answer in outcome.value:
            assert answer.startswith("InvalidStateError"), answer
            assert "forked" in answer


# Silent, interrupted.


def silent(folder: str) -> Story:
    from datetime import timedelta

    rank, world = me()
    with job(folder) as story:
        group = dist.new_group(list(range(world)), timeout=timedelta(seconds=1))
        if rank == 1:
            for other in (0, 2):
                told(folder, "gave up", other)
        start = time.monotonic()
        try:
            for _ in range(2):  # the silent rank's first call may still find all it needs
                dist.all_reduce(torch.ones(3), group=group)
        except Exception as error:
            record(story, error)
            story.at = time.monotonic() - start
        if rank != 1:
            tell(folder, "gave up")
        dist.barrier()  # the default group is well
    return story


def test_a_timeout_names_who_was_missing(tmp_path: Path) -> None:
    for rank, story in enumerate(stories(run_outcomes(silent, str(tmp_path), world_size=3))):
        assert story.error == "RingTimeoutError", story.text
        assert " Timed out " in story.text
        assert "rank 1 (host " in story.text
        assert story.fields["peer"] == 1
        assert story.leftovers == []
        if rank != 1:
            assert 0.95 < story.at < 2.5
            assert story.fields["operation"] == "all_reduce #1 (float32[3], SUM)"


def interrupted(folder: str, how: str) -> Story:
    with job(folder) as story:
        if me()[0] == 1:
            told(folder, "interrupted", 0)
            return story
        signal.signal(signal.SIGINT, signal.default_int_handler)
        x = torch.ones(3)
        calls = {
            "all_reduce": lambda: dist.all_reduce(x),
            "wait": lambda: dist.all_reduce(x, async_op=True).wait(),
            "barrier": dist.barrier,
        }
        sent = 0.0

        def interrupt() -> None:
            nonlocal sent
            time.sleep(0.2)  # the main thread cannot say from inside the call that it is there
            sent = time.monotonic()
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt, daemon=True).start()
        try:
            calls[how]()
        except KeyboardInterrupt as error:
            story.at = time.monotonic() - sent
            record(story, error)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        tell(folder, "interrupted")
    return story


@pytest.mark.parametrize("how", ("all_reduce", "wait", "barrier"))
def test_ctrl_c_ends_a_wait(how: str, tmp_path: Path) -> None:
    story, _ = stories(run_outcomes(interrupted, str(tmp_path), how))
    assert story.error == "KeyboardInterrupt"
    assert story.at < 1.0
    assert story.leftovers == []


# Programs that end by an exception of their own.

PROGRAM = """
import sys, time
import torch, torch.distributed as dist
import ringdp
rank, folder = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("ring", init_method=f"file://{folder}/store", rank=rank, world_size=3)
dist.barrier()
work = dist.all_reduce(torch.ones(100_000), async_op=True)
work.get_future().then(lambda future: time.sleep(0.3))  # still running when rank 1 is at its end
work.wait()
if rank == 1:
    raise ValueError("mine")
dist.all_reduce(torch.ones(3))
"""


def test_a_rank_that_raises_is_named_by_the_others(tmp_path: Path) -> None:
    programs = [Program(PROGRAM, str(rank), str(tmp_path), environ=os.environ, origin=rank) for rank in range(3)]
    try:
        errors = [program.communicate(timeout=60)[0] for program in programs]
    finally:
        for program in programs:
            program.kill()
    assert [program.returncode for program in programs] == [1, 1, 1], errors
    assert "ValueError: mine" in errors[1]
    for rank in (0, 2):
        assert "PeerLostError" in errors[rank]
        assert f"lost rank 1 (host {os.uname().nodename}, pid {programs[1].pid})" in errors[rank]
        assert "during all_reduce #3 (float32[3], SUM)" in errors[rank]
        assert "it left the job: its program ended by ValueError: mine" in errors[rank]


# Ranks that do not do the same: the words of each case are in test_rank_disagreement.py.


def disagree(folder: str, what: str) -> Story:
    import ringdp

    rank, world = me()
    odd = rank == 1
    floats, ints = torch.ones(12), torch.ones(12, dtype=torch.int32)

    def named(name: str) -> None:
        with ringdp.named(name):
            dist.all_reduce(floats)

    calls: dict[str, Callable[[], Any]] = {
        "dtype": lambda: dist.all_reduce(ints if odd else floats),
        "root": lambda: dist.broadcast(floats, src=1 if odd else 0),
        "name": lambda: named("second" if odd else "first"),
    }
    with job(folder) as story:
        tell(folder, "met")
        for other in range(world):
            told(folder, "met", other)
        start = time.monotonic()
        try:
            calls[what]()
            dist.all_reduce(floats)  # an operation that only sends may end before it hears of it
        except Exception as error:
            record(story, error)
        story.at = time.monotonic() - start
        # Nobody leaves before all have heard it: a goodbye would be another reason to fail.
        tell(folder, "heard")
        for other in range(world):
            told(folder, "heard", other)
    return story


WORDS = {
    "dtype": ("all_reduce(float32[12], SUM)", "all_reduce(int32[12], SUM)"),
    "root": ("broadcast(float32[12], root 0)", "broadcast(float32[12], root 1)"),
    "name": ("all_reduce(float32[12], SUM) 'first'", "all_reduce(float32[12], SUM) 'second'"),
}


@pytest.mark.parametrize(("world_size", "what"), ((2, "name"), (3, "dtype"), (3, "root")))
def test_ranks_that_disagree_hear_both_sides(what: str, world_size: int, tmp_path: Path) -> None:
    for rank, story in enumerate(stories(run_outcomes(disagree, str(tmp_path), what, world_size=world_size))):
        assert story.error == "MismatchError", story.text or "nothing was raised"
        assert all(word in story.text for word in WORDS[what]), story.text
        assert "rank 1 (host " in story.text
        assert story.at < 5.0
        assert story.fields["operation"], story.fields
        assert story.leftovers == []
        if what == "name":
            assert story.fields["name"] == ("second" if rank == 1 else "first")
