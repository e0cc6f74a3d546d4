"""What the tests in which ranks die, hang or disagree share; the functions run on the ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from tests.fault.launch_jobs import wait_until

BOUND_S = 1.0  # how soon everybody knows of a dead rank


@dataclass
class Story:
    """What one rank went through: an error, and what it left behind once the process group was destroyed."""

    error: str = ""
    text: str = ""
    at: float = 0.0  # time.monotonic(), which all processes of a host share
    fields: dict[str, Any] = field(default_factory=dict)
    later: list[tuple[str, str, float]] = field(default_factory=list)  # class, cause, seconds of calls made afterwards
    leftovers: list[str] = field(default_factory=list)


def me() -> tuple[int, int]:
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


@contextmanager
def job(folder: str, name: str = "store", timeout_s: float = 60.0) -> Iterator[Story]:
    """The default process group of this rank; its story gets what is left of it afterwards."""
    rank, world = me()
    before = descriptors()
    story = Story()
    # The ranks of a busy machine may come some seconds apart.
    first = timedelta(seconds=max(timeout_s, 20.0))
    dist.init_process_group("ring", init_method=f"file://{folder}/{name}", rank=rank, world_size=world, timeout=first)
    dist.distributed_c10d._get_default_group().set_timeout(timedelta(seconds=timeout_s))
    try:
        dist.barrier()  # a rank with nothing to do could leave while another still connects to it
        yield story
    finally:
        dist.destroy_process_group()
    story.leftovers = leftovers(before)


def leftovers(before: list[str]) -> list[str]:
    """What of ringdp this process still has, besides the `descriptors` of before."""
    found = [f"descriptor: {it}" for it in descriptors() if it not in before]
    # A thread that was joined is still in /proc for a moment: the kernel wakes who joins it before it takes it away.
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not ringdp_threads(), "the end of ringdp's threads", 0.2)
    return [*ringdp_threads(), *found, *(f"mapping: {it}" for it in shared_memory())]


def shared_memory() -> list[str]:
    """The parts of ringdp's shared memory that this process has mapped."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:ringdp" in line]


def descriptors() -> list[str]:
    """The sockets, pollers and shared memory of this process."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the one that listed the folder
            continue
        if target.startswith("/memfd:ringdp-stacks"):  # one for the process, for as long as it lives
            continue
        if target.startswith(("socket:", "anon_inode:", "/memfd:")):
            found.append(f"{name} {target}")
    return found


def ringdp_threads() -> list[str]:
    tasks = Path("/proc/self/task").iterdir()
    return [name for name in (thread_name(task) for task in tasks) if name.startswith("ringdp")]


def thread_name(task: Path) -> str:
    try:
        return (task / "comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def tell(folder: str, what: str, text: str = "") -> None:
    """Let the other ranks know, by a file that appears whole."""
    path = Path(folder, f"{what}-{me()[0]}")
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    new.rename(path)


def told(folder: str, what: str, rank: int) -> str:
    """Wait for what a rank tells."""
    path = Path(folder, f"{what}-{rank}")
    wait_until(path.exists, f"{what} of rank {rank}")
    return path.read_text()


def die(folder: str) -> NoReturn:
    """Be killed, as by the kernel when memory is short, and leave the time of it."""
    Path(folder, "died").write_text(f"{time.monotonic()} {os.getpid()}")
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still alive")


def suffer(story: Story, action: Callable[[], Any]) -> None:
    """Call until it fails; then everything else must fail at once."""
    try:
        while True:
            action()
    except Exception as error:
        story.at = time.monotonic()
        record(story, error)
    ones = torch.ones(4)
    for call in (
        lambda: dist.all_reduce(ones),
        lambda: dist.all_reduce(ones, async_op=True),
        lambda: dist.broadcast(ones, src=0),
        lambda: dist.all_gather([ones.clone() for _ in range(me()[1])], ones),
        lambda: dist.barrier(),
    ):
        start = time.monotonic()
        try:
            call()
        except Exception as error:
            story.later.append((type(error).__name__, str(error), time.monotonic() - start))
        else:
            story.later.append(("nothing", "", time.monotonic() - start))


def record(story: Story, error: BaseException) -> None:
    story.error, story.text = type(error).__name__, str(error)
    names = ("rank", "host", "peer", "peer_host", "peer_pid", "operation", "sequence", "name", "cause", "advice")
    story.fields = {name: getattr(error, name, None) for name in names}


def expect_peer_lost(story: Story, folder: Path, victim: int, operation: str) -> None:
    """Type, who, where, what, when; and nothing left."""
    died_at, pid = (folder / "died").read_text().split()
    host = socket.gethostname()
    assert story.error == "PeerLostError", story.text
    assert story.at - float(died_at) < BOUND_S, story.text
    assert f"rank {victim} (host {host}, pid {pid})" in story.text
    assert operation in story.text
    fields = story.fields
    assert (fields["peer"], fields["peer_host"], fields["peer_pid"]) == (victim, host, int(pid)), fields
    assert fields["operation"].startswith(operation), fields
    assert fields["cause"], fields
    assert [error for error, _, _ in story.later] == ["PeerLostError"] * 5, story.later
    assert {text for _, text, _ in story.later} == {story.text}
    assert max(seconds for _, _, seconds in story.later) < 0.25, story.later
    assert story.leftovers == []
