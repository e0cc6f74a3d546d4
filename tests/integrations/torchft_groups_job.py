"""ProcessGroupRing without torchft's Manager, beside a default group of ring; two ranks, started by ringrun."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torchft.process_group import reconfigure_with_store

import ringdp
from ringdp.errors import RingError
from ringdp.integrations import ProcessGroupRing

QUORUMS = 16
TIMEOUT = timedelta(seconds=30)


def summed(group: ProcessGroupRing, value: float) -> float:
    tensor = torch.tensor([value])
    group.allreduce([tensor], dist.ReduceOp.SUM).wait()
    return tensor.item()


def held() -> tuple[int, int]:
    """Threads and descriptors of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def main() -> None:
    folder = sys.argv[1]
    ringdp.init()
    rank = ringdp.rank()
    address = ["127.0.0.1:0"]
    if rank == 0:
        master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        address = [f"127.0.0.1:{master.port}"]
    dist.broadcast_object_list(address)
    if rank == 1:
        os.environ["TORCHELASTIC_RESTART_COUNT"] = "3"  # its replica group was started again, the other was not
        alone = ProcessGroupRing(TIMEOUT)
        reconfigure_with_store(alone, f"{address[0]}/alone", 0, 1)  # ring counts one group more here
        alone.shutdown()
    group = ProcessGroupRing(TIMEOUT)
    sums, sizes = [], []
    for generation in range(QUORUMS):
        reconfigure_with_store(group, f"{address[0]}/{generation}", 1 - rank, 2)
        sums.append(summed(group, rank + generation))
        sizes.append(held())
    # The default group is as it was, and groups are made from it.
    ones = torch.ones(1)
    dist.all_reduce(ones)
    dist.all_reduce(ones, group=dist.new_group([0, 1]))
    # An abort ends what the other waits for.
    error = ""
    dist.barrier()
    if rank == 0:
        group.abort()
    else:
        try:
            summed(group, 1.0)
        except RingError as lost:
            error = str(lost)
    reconfigure_with_store(group, f"{address[0]}/again", rank, 2)
    again = summed(group, 1.0)
    group.shutdown()
    results = {"sums": sums, "sizes": sizes, "default": ones.item(), "error": error, "again": again}
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    dist.barrier()
    ringdp.shutdown()


if __name__ == "__main__":
    main()
