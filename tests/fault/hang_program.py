"""Ranks of a job that comes to a stop in one way or another; run by test_hangs.py. Arguments: the way."""

from __future__ import annotations

import ctypes
import datetime
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

import ringdp

WAY = sys.argv[1]
LIMIT_S = float(os.environ.get("LIMIT_S", "20"))


def stuck_in_sleep() -> None:
    time.sleep(60)  # stuck


def stuck_in_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()  # stuck


def stuck_in_c_code() -> None:
    mutex = ctypes.create_string_buffer(64)
    library = ctypes.PyDLL(None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)  # stuck, with the lock of Python held


def stuck_in_python() -> None:
    while True:  # stuck
        sum(range(1000))


STUCK = {
    "sleep": stuck_in_sleep,
    "lock": stuck_in_lock,
    "c_code": stuck_in_c_code,
    "python": stuck_in_python,
}


def main() -> None:
    dist.init_process_group("ring", timeout=datetime.timedelta(seconds=LIMIT_S))
    rank, world = dist.get_rank(), dist.get_world_size()
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    if WAY in STUCK:
        if rank == 1:
            STUCK[WAY]()
        dist.all_reduce(tensor)
    elif WAY == "other_group":
        pair = dist.new_group([1, 2])
        if rank == 1:
            dist.barrier(group=pair)  # rank 2 never comes
        dist.all_reduce(tensor)
    elif WAY == "crossed":
        first, second = dist.new_group(list(range(world))), dist.new_group(list(range(world)))
        for group in (first, second) if rank == 0 else (second, first):
            dist.all_reduce(tensor, group=group)  # crossed
    elif WAY == "shapes":
        dist.all_reduce(tensor if rank != 1 else torch.ones(7))
    elif WAY == "dies":
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(tensor)
    elif WAY == "quiet":
        print(f"rank {rank} pid {os.getpid()} waits", flush=True)
        sys.stdin.read()
    ringdp.shutdown() if hasattr(ringdp, "shutdown") else dist.destroy_process_group()


if __name__ == "__main__":
    main()
