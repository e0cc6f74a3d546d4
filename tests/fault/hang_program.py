"""Ranks of a job that comes to a stop in one way or another, for test_hangs.py. As a script under ringrun: the way."""

from __future__ import annotations

import contextlib
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
    elif way.startswith("crossed"):
        first, second = (dist.new_group(list(range(world)), timeout=limit) for _ in range(2))
        if way.endswith("again"):
            for group in (first, second):
                dist.all_reduce(tensor, group=group)
        for group in (first, second) if rank == 0 else (second, first):
            dist.all_reduce(tensor, group=group)
    elif way.startswith("by_a_"):
        call_in_two_groups(way, rank, *(dist.new_group(list(range(world)), timeout=limit) for _ in range(2)))
    elif way == "consolidated":
        consolidate_on_one_rank(rank)
    elif way == "two_threads":
        call_from_two_threads(rank)
    elif way == "shapes":
        dist.all_reduce(tensor if rank != 1 else torch.ones(7))
    elif way == "dies":
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(tensor)
    elif way == "idle_store":
        idle_store(rank, Path(folder))
    else:
        wait_for_the_test(rank, Path(folder), fork=way == "forks")
        dist.all_reduce(tensor)
    print(f"rank {rank} ended well, {len(own_signals)} signals of its own", flush=True)
    dist.destroy_process_group()


def call_in_two_groups(way: str, rank: int, first: dist.ProcessGroup, second: dist.ProcessGroup) -> None:
    """Rank 0 waits in one group and the others in the other one: what is missing comes later, by another way."""
    for group in (first, second):
        dist.barrier(group=group)
    if rank == 0:
        late = dist.all_reduce(torch.ones(10), group=first, async_op=True) if way == "by_a_handle" else None
        dist.barrier(group=first if late is None else second)
        if late is None:
            dist.barrier(group=second)
        else:
            late.wait()
        return

    def call() -> None:
        time.sleep(1.5)
        dist.all_reduce(torch.ones(10), group=first) if way == "by_a_handle" else dist.barrier(group=first)

    if way == "by_a_handle":
        dist.barrier(group=second)
        call()
        return
    thread = threading.Timer(0.1, call) if way == "by_a_timer" else threading.Thread(target=call)
    thread.start()
    dist.barrier(group=second)
    thread.join()


def consolidate_on_one_rank(rank: int) -> None:
    import ringdp

    net = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    rounds = ringdp.DiLoCo(net, optimizer, every=2)
    for step in range(20):
        net(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step == 5:
            rounds.state_dict(consolidated=True)


def call_from_two_threads(rank: int) -> None:
    """The main thread calls with 1000 elements, the other one with 7: in the same order once, and then in two."""
    turn = [threading.Event() for _ in range(3)]

    def other() -> None:
        for number in (0, 2):
            turn[number].wait()
            with contextlib.suppress(Exception):
                dist.all_reduce(torch.ones(7))
            if number == 0:
                turn[1].set()

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    dist.all_reduce(torch.ones(1000))
    turn[0].set()
    turn[1].wait()
    if rank == 0:
        dist.all_reduce(torch.ones(1000))
    turn[2].set()
    if rank == 1:
        time.sleep(0.2)
    dist.all_reduce(torch.ones(1000))


def idle_store(rank: int, folder: Path) -> None:
    """A dist_async store to which nobody pushes for a while: its receives are pending."""
    from ringdp import kvstore

    kv = kvstore.create("dist_async")
    kv.set_optimizer("sgd", learning_rate=0.1)
    value = torch.zeros(5000)
    kv.init("w", value)
    kv.pushpull("w", torch.ones(5000), out=value)
    kv.barrier()
    wait_for_the_test(rank, folder, fork=False)
    kv.pushpull("w", torch.ones(5000), out=value)
    kv.close()


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
