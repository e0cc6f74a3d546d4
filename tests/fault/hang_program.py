"""Ranks of a job that comes to a stop in one way or another, for test_hangs.py. As a script under ringrun: the way."""

from __future__ import annotations

import ctypes
import datetime
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist


def stuck_in_sleep() -> None:
    time.sleep(60)


def stuck_in_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def stuck_in_c_code() -> None:
    mutex = ctypes.create_string_buffer(64)
    library = ctypes.PyDLL(None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)  # with Python's lock


def stuck_in_python() -> None:
    while True:
        sum(range(1000))


STUCK = {
    "sleep": stuck_in_sleep,
    "lock": stuck_in_lock,
    "c_code": stuck_in_c_code,
    "python": stuck_in_python,
}


def main(rank: int, world: int, way: str, folder: str) -> None:
    """A rank. `folder`: of the job's store, and of what the test asks about and puts there; LIMIT_S: the timeout."""
    limit = datetime.timedelta(seconds=float(os.environ.get("LIMIT_S", "60")))
    own_signals: list[int] = []
    if way == "own_handler":
        signal.signal(signal.SIGUSR1, lambda number, _: own_signals.append(number))
    dist.init_process_group("ring", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=limit)
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    if way in STUCK:
        if rank == 1:
            STUCK[way]()
        dist.all_reduce(tensor)
    elif way == "other_group":
        pair = dist.new_group([1, 2], timeout=limit)
        if rank == 1:
            dist.barrier(group=pair)  # rank 2 never comes
        dist.all_reduce(tensor)
    elif way == "crossed":
        first, second = (dist.new_group(list(range(world)), timeout=limit) for _ in range(2))
        for group in (first, second) if rank == 0 else (second, first):
            dist.all_reduce(tensor, group=group)
    elif way == "shapes":
        dist.all_reduce(tensor if rank != 1 else torch.ones(7))
    elif way == "dies":
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(tensor)
    else:
        wait_for_the_test(rank, Path(folder), fork=way == "forks")
        dist.all_reduce(tensor)
    print(f"rank {rank} ended well, {len(own_signals)} signals of its own", flush=True)
    dist.destroy_process_group()


def wait_for_the_test(rank: int, folder: Path, *, fork: bool) -> None:
    child = os.fork() if fork else -1
    if child == 0:
        time.sleep(60)
        os._exit(0)
    (folder / f"ready_{rank}").write_text(str(child))
    while not (folder / "go").exists():
        time.sleep(0.01)


if __name__ == "__main__":
    main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), sys.argv[1], sys.argv[2])
