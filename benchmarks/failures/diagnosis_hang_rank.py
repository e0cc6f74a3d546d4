"""One rank of diagnosis.py that comes to a stop: its settings are the cause and the folder of the job's store."""

from __future__ import annotations

import datetime
import json
import os
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist


def spin() -> None:
    while True:
        sum(range(1000))


def wait_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def main(settings: dict[str, Any]) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    limit = datetime.timedelta(seconds=120)
    store = f"file://{settings['folder']}/store"
    dist.init_process_group("ring", init_method=store, rank=rank, world_size=world, timeout=limit)
    groups = [dist.new_group(list(range(world)), timeout=limit) for _ in range(2)]
    pair = dist.new_group([0, 1], timeout=limit)
    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    cause, slow = settings["cause"], rank == settings["slow"]
    if slow and cause == "stuck":
        spin()
    elif slow and cause == "asleep":
        time.sleep(600)
    elif slow and cause == "lock":
        wait_for_a_lock()
    elif slow and cause == "other_group":
        dist.barrier(group=pair)  # rank 0 never comes
    elif cause == "crossed":
        for group in reversed(groups) if slow else groups:
            dist.all_reduce(tensor, group=group)
    dist.all_reduce(tensor)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
