"""A rank of `python -m benchmarks door`."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ringdp


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def since_launcher_s() -> float:
    """When this rank's launcher began, as time.time() says it."""
    started = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19])
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime_s + started / os.sysconf("SC_CLK_TCK")


def main() -> None:
    mode, *words = sys.argv[1:]
    began_s = time.time()
    ringdp.init(device="cpu")
    if mode == "start":
        print(json.dumps({"since": since_launcher_s(), "began": began_s, "until": time.time()}), flush=True)
        dist.barrier()
        return
    piece = torch.ones(16 << 18)
    pieces = max(1, int(words[0]) * 1_000_000 // piece.nbytes)
    rank = ringdp.rank()
    others = ringdp.transports()
    for warm in (True, False):
        dist.barrier()
        cpu, begin_s = cpu_s(os.getppid()), time.monotonic()
        for _ in range(2 if warm else pieces):
            if rank == 1:
                dist.send(piece, 2)
            elif rank == 2:
                dist.recv(piece, 1)
        took = torch.tensor(time.monotonic() - begin_s if rank == 2 else 0.0, dtype=torch.float64)
        dist.all_reduce(took)
        cores = (cpu_s(os.getppid()) - cpu) / took.item()
    if rank == 0:
        rate = pieces * piece.nbytes / took.item()
        dist.barrier()
        said = [None, None, None]
        dist.all_gather_object(said, others)
        print(json.dumps({"bytes_per_s": rate, "door_cores": cores, "transports": said[1]}), flush=True)
    else:
        dist.barrier()
        dist.all_gather_object([None, None, None], others)


if __name__ == "__main__":
    main()
