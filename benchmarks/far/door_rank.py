"""A rank of `python -m benchmarks door`, and the strangers at its door."""

from __future__ import annotations

import collections
import json
import os
import socket
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import ringdp

STRANGERS_PER_S = 500


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def since_launcher_s() -> float:
    """When this rank's launcher began, as time.time() says it."""
    started = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19])
    uptime_s = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime_s + started / os.sysconf("SC_CLK_TCK")


def strangers(where: str, secret: str, seconds: float) -> None:
    """Connect to the door in each odd second of the clock.

    Args:
        secret: of the job, for a hello that is authentic, as one that was overheard.
    """
    host, _, port = where.rpartition(":")
    from ringdp import _C

    hello = _C.seal_door_message(bytes.fromhex(secret), b"", 1, 1 << 48, 0)
    made = closed = 0
    held: collections.deque[socket.socket] = collections.deque()
    end = time.time() + seconds

    while time.time() < end:
        if not is_beside(time.time()):
            time.sleep(0.005)
            continue
        began = time.monotonic()
        one = socket.socket()
        one.setblocking(False)
        try:
            one.connect_ex((host, int(port)))
            held.append(one)
            made += 1
            if len(held) > 100:  # what has connected by now says something
                held.popleft().close()
                if made % 4:
                    held[50].send((b"", b"GET / HTTP/1.1\r\n\r\n", hello, hello[: made % len(hello)])[made % 4])
        except OSError:
            closed += 1
        time.sleep(max(0.0, 1 / STRANGERS_PER_S - (time.monotonic() - began)))
    print(json.dumps({"connections": made, "closed": closed}), flush=True)


def is_beside(now: float) -> bool:
    return int(now) % 2 == 1


def beside(seconds: float, core: int) -> None:
    """Steps of a training, in seconds with strangers and without: rank 0 says what they took."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    net = ringdp.RingDP(torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    x = torch.randn(64, 512)
    took: dict[int, list[float]] = collections.defaultdict(list)  # by second
    cores: dict[int, float] = {}
    second, cpu = 0, 0.0
    end = torch.tensor(time.time() + 3 + seconds, dtype=torch.float64)
    dist.broadcast(end, 0)
    while True:
        now = time.time()
        if int(now) != second:
            used = cpu_s(os.getppid())
            if second:
                cores[second] = used - cpu
            second, cpu = int(now), used
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(torch.ones(1))
        if int(time.time()) == second:
            took[second].append(time.time() - now)
        over = torch.tensor(time.time() >= end.item())
        dist.broadcast(over, 0)
        if over:
            break
    if ringdp.rank() != 0:
        return
    whole = sorted(took)[2:-1]
    medians = {it: statistics.median(took[it]) for it in whole}
    with_them, without = ([it for it in whole if is_beside(it) == which] for which in (True, False))
    pairs = [medians[it] / medians[it + 1] for it in with_them if it + 1 in medians]
    said = {
        "beside_s": statistics.median(medians[it] for it in with_them),
        "alone_s": statistics.median(medians[it] for it in without),
        "least": min(pairs),
        "most": max(pairs),
        "door_cores": statistics.median(cores[it] for it in with_them),
        "door_cores_alone": statistics.median(cores[it] for it in without),
    }
    print(json.dumps(said), flush=True)


def main() -> None:
    mode, *words = sys.argv[1:]
    if mode == "strangers":
        strangers(words[0], words[1], float(words[2]))
        return
    began_s = time.time()
    ringdp.init(device="cpu")
    if mode == "start":
        print(json.dumps({"since": since_launcher_s(), "began": began_s, "until": time.time()}), flush=True)
        dist.barrier()
        return
    if mode == "beside":
        beside(float(words[0]), int(words[1]))
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
