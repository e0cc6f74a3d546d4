#!/usr/bin/env python3
"""How much of a long or lossy line two hosts get, by ring and by gloo, and what a pause costs.

    ringrun -H one,two benchmarks/far.py --rate 100mbit
                                    one rank on each of two hosts: all-reduces of 25 MiB through ring and gloo, sends in
                                    one direction, the first all-reduce after a rest of 5 s beside the next one, and
                                    4 KiB alone and beside a bulk operation
    ringrun -H one,two benchmarks/far.py --settings cubic:1,cubic:16,bbr:8
                                    with these values of RINGDP_CONGESTION and RINGDP_STREAMS, one after the other

Times are those of the slower rank, each call by itself: the median, and all of them in the order in which they came. An
all-reduce of two ranks carries its size once in each direction. `of the line` is against --rate.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence

import checkout  # noqa: F401
import torch
import torch.distributed as dist
from measure import table

import ringdp
from ringdp import config
from ringdp.ddp.words import parse_size

SMALL_BYTES = 4096


def slower(seconds: float, group: dist.ProcessGroup) -> float:
    """The same on both ranks."""
    told = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(told, op=dist.ReduceOp.MAX, group=group)
    return told.item()


def timed(call: Callable[[], object], group: dist.ProcessGroup) -> float:
    dist.barrier(group)
    began = time.perf_counter()
    call()
    return slower(time.perf_counter() - began, group)


def one_way(buffer: torch.Tensor, group: dist.ProcessGroup) -> None:
    """From rank 0 to rank 1, and an empty answer."""
    done = torch.zeros(1)
    if dist.get_rank() == 0:
        dist.send(buffer, 1, group=group)
        dist.recv(done, 1, group=group)
    else:
        dist.recv(buffer, 0, group=group)
        dist.send(done, 0, group=group)


def row(name: str, times: Sequence[float], size: int, rate: float) -> list[str]:
    if not times:
        return [name, f"{size / 2**20:g} MiB", "", "", "", ""]
    median = statistics.median(times)
    share = f"{100 * size / median / rate:.0f} %" if rate else ""
    words = " ".join(f"{it:.3g}" for it in times)
    return [name, f"{size / 2**20:g} MiB", f"{median:.3f} s", f"{size * 8 / median / 1e6:.1f} Mbit/s", share, words]


def beside_bulk(group: dist.ProcessGroup, size: int, calls: int) -> tuple[list[float], list[float]]:
    """Seconds of 4 KiB alone, and while an operation of `size` bytes is under way that gives way to others."""
    other = dist.new_group(backend="ring")
    assert isinstance(other, dist.ProcessGroup)
    small = torch.zeros(SMALL_BYTES // 4)
    alone = [timed(lambda: dist.all_reduce(small, group=other), other) for _ in range(calls)]
    with ringdp.named("far.py: bulk", bulk=True):
        work = dist.all_reduce(torch.zeros(size // 4), group=group, async_op=True)
    assert work is not None
    beside = [timed(lambda: dist.all_reduce(small, group=other), other) for _ in range(calls)]
    if work.is_completed():
        beside = []  # it was too short
    work.wait()
    return alone, beside


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    for number, setting in enumerate(args.settings or [""]):
        if setting:
            os.environ["RINGDP_CONGESTION"], _, os.environ["RINGDP_STREAMS"] = setting.partition(":")
        if number:  # the last store's port may not be free yet
            os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
        measure(args, last=number + 1 >= len(args.settings))
    return 0


def measure(args: argparse.Namespace, last: bool) -> None:
    """Join a job, measure, print on rank 0, leave it. Through gloo only with the last setting: it has none."""
    ringdp.init()
    if ringdp.world_size() != 2:
        raise SystemExit("far.py is for two ranks, one on each of two hosts")
    ring = dist.new_group(backend="ring")
    assert isinstance(ring, dist.ProcessGroup)
    size, rate = args.size // 4 * 4, args.rate / 8
    buffer = torch.zeros(size // 4)
    rows = []
    timed(lambda: dist.all_reduce(torch.zeros(1), group=ring), ring)
    times = [timed(lambda: dist.all_reduce(buffer, group=ring), ring) for _ in range(args.calls)]
    rows.append(row("all-reduce, ring", times, size, rate))
    if args.sends:
        times = [timed(lambda: one_way(buffer, ring), ring) for _ in range(args.sends)]
        rows.append(row("one way, ring", times, size, rate))
    for _ in range(args.idle):
        time.sleep(5)
        pair = [timed(lambda: dist.all_reduce(buffer, group=ring), ring) for _ in range(2)]
        rows.append(row(f"after 5 s, and the next: {pair[0] / pair[1]:.2f}", pair, size, rate))
    if args.beside:
        for name, times in zip(("4 KiB alone", "4 KiB beside bulk"), beside_bulk(ring, size, args.beside), strict=True):
            rows.append(row(name, times, SMALL_BYTES, 0.0))
    if args.gloo and last:
        gloo = dist.new_group(backend="gloo")
        assert isinstance(gloo, dist.ProcessGroup)
        few = torch.zeros(args.gloo_size // 4)
        times = [timed(lambda: dist.all_reduce(few, group=gloo), ring) for _ in range(args.gloo)]
        rows.append(row("all-reduce, gloo", times, args.gloo_size, rate))
    if ringdp.rank() == 0:
        used = " ".join(f"{it}={os.environ[it]}" for it in ("RINGDP_STREAMS", "RINGDP_CONGESTION") if it in os.environ)
        print(f"{ringdp.transports()} {used}", flush=True)
        print(table(["", "size", "median", "", "of the line", "each, s"], rows), flush=True)
    ringdp.shutdown()


def _rate(text: str) -> float:
    return 8 * config.parse_rate(text)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=_rate, default=0.0, help="of the line, for `of the line`: 100mbit")
    parser.add_argument(
        "--settings",
        type=lambda text: text.split(","),
        default=[],
        help="one after the other: cubic:16,bbr:8",
    )
    parser.add_argument("--size", type=parse_size, default=25 << 20, help="bytes of an all-reduce (25m)")
    parser.add_argument("--calls", type=int, default=5, help="all-reduces through ring (5)")
    parser.add_argument("--sends", type=int, default=3, help="messages in one direction through ring (3)")
    parser.add_argument("--idle", type=int, default=0, help="rests of 5 s (0)")
    parser.add_argument("--beside", type=int, default=0, help="messages of 4 KiB beside a bulk operation (0)")
    parser.add_argument("--gloo", type=int, default=3, help="all-reduces through gloo (3)")
    parser.add_argument("--gloo-size", type=parse_size, default=4 << 20, help="bytes of one: it is slow (4m)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
