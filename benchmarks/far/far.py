"""How much of a long or lossy line two hosts get, by ring and by gloo, and what a pause costs.

    ringrun -H one,two -m benchmarks far --rate 100mbit
                                    one rank on each of two hosts: all-reduces of 25 MiB through ring and gloo, sends in
                                    one direction, and the first all-reduce after a rest of 5 s beside the next one
    ringrun -H one,two -m benchmarks far --settings cubic:1,cubic:16,bbr:8
                                    with these values of RINGDP_CONGESTION and RINGDP_STREAMS, one after the other
    ringrun -H one,two,three,four -m benchmarks far --small --delay 50
                                    one rank on each of several hosts: exact all-reduces of 4 to 512 KiB, also in
                                    one-way delays of so many ms
    ringrun -H one,two,three,four -m benchmarks far --minutes 30
                                    all-reduces of all sizes with rests between, every sum checked, for so long:
                                    fails at the first wrong sum, lost peer or other error

Times are those of the slowest rank, each call by itself: the median, and all of them in the order in which they came.
An all-reduce of n ranks carries 2 (n - 1) / n times its size in each direction of each rank. `of the line` is against
--rate. `python -m benchmarks long_line --rate 100mbit --delay 25ms -- python -m benchmarks far ...` makes the hosts.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

import ringdp
from benchmarks.lib import session
from benchmarks.lib.measure import format_size, format_time, parse_size, table
from benchmarks.lib.ranks import Unavailable
from ringdp import config

SMALL_SIZES = tuple(size << 10 for size in (4, 64, 256, 512))
MIXED_COUNTS = (1, 1000, 20_000, 300_000, 1_000_000)  # of --minutes, float32
LONGEST_REST_S = 5.0


def timed(call: Callable[[], object], group: dist.ProcessGroup) -> float:
    return session.block(call, 1, group)


def one_way(buffer: torch.Tensor, group: dist.ProcessGroup) -> None:
    """From rank 0 to rank 1, and an empty answer."""
    done = torch.zeros(1)
    if dist.get_rank() == 0:
        dist.send(buffer, 1, group=group)
        dist.recv(done, 1, group=group)
    else:
        dist.recv(buffer, 0, group=group)
        dist.send(done, 0, group=group)


def row(name: str, times: Sequence[float], size: int, rate: float, carried: float = 1.0) -> list[str]:
    """`carried`: how many times its size an operation sends in each direction."""
    if not times:
        return [name, format_size(size), "", "", "", ""]
    median = statistics.median(times)
    sent = size * carried
    share = f"{100 * sent / median / rate:.0f} %" if rate else ""
    words = " ".join(f"{it:.3g}" for it in times)
    return [name, format_size(size), format_time(median), f"{sent * 8 / median / 1e6:.1f} Mbit/s", share, words]


def small_ones(group: dist.ProcessGroup, calls: int, delay_s: float) -> list[list[str]]:
    rows = []
    for size in SMALL_SIZES:
        x = torch.zeros(size // 4)
        dist.all_reduce(x, group=group)
        times = [timed(lambda x=x: dist.all_reduce(x, group=group), group) for _ in range(calls)]  # type: ignore[misc]
        median = statistics.median(times)
        delays = f"{median / delay_s:.2f}" if delay_s else ""
        rows.append([format_size(size), format_time(median), delays, " ".join(f"{it:.3g}" for it in times)])
    return rows


def soak(group: dist.ProcessGroup, minutes: float, seed: int) -> dict[str, float]:
    """All ranks draw the same sizes, and rests of their own. Raises what operations raise, and AssertionError."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    shared, own = random.Random(seed), random.Random(seed * 1000 + rank)
    calls, slowest_s, end = 0, 0.0, time.monotonic() + 60 * minutes
    more = torch.ones(1)
    while more.item() > 0:
        for _ in range(10):
            x = torch.full((shared.choice(MIXED_COUNTS),), float(rank + 1))
            if own.random() < 0.1:
                time.sleep(own.random() * LONGEST_REST_S)
            began = time.monotonic()
            dist.all_reduce(x, group=group)
            slowest_s = max(slowest_s, time.monotonic() - began)
            wanted = ranks * (ranks + 1) / 2
            assert x.min().item() == x.max().item() == wanted, f"a sum of {x.numel()}: {x.min()} to {x.max()}"
            calls += 1
        more[0] = 1.0 if time.monotonic() < end else 0.0
        dist.broadcast(more, group_src=0, group=group)
    return {"calls": calls, "slowest_s": session.slowest(slowest_s, group)}


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """On each rank of somebody's launcher, for each setting; rank 0 prints. Through gloo only with the last: it has
    none."""
    settings = args.settings.split(",")
    for number, setting in enumerate(settings):
        if setting:
            os.environ["RINGDP_CONGESTION"], _, os.environ["RINGDP_STREAMS"] = setting.partition(":")
        if number:  # the last store's port may not be free yet
            os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
        yield _one_job(args, last=number + 1 == len(settings))


def _one_job(args: argparse.Namespace, *, last: bool) -> dict[str, Any]:
    """Join a job, measure, print on rank 0, leave it."""
    ringdp.init()
    ranks = ringdp.world_size()
    if ranks < 2 or (ranks > 2 and args.sends):
        raise Unavailable("two ranks are needed, one on each of two hosts; more with --sends 0")
    ring = session.ring_group()
    if args.minutes:
        found = soak(ring, args.minutes, args.seed)
        words = f"{args.minutes:g} minutes: {found['calls']} all-reduces, all sums right, no rank lost"
        text = f"{ranks} ranks, {words}; the slowest took {format_time(found['slowest_s'])}"
    elif args.small:
        rows = small_ones(ring, args.calls, args.delay / 1000)
        text = table(["all-reduce", "median", "one-way delays", "each, s"], rows)
        text = f"{ranks} ranks, float32, {ringdp.transports()}\n{text}"
    else:
        text = _table_of_line(args, ring, 2 * (ranks - 1) / ranks, gloo=last)
    if ringdp.rank() == 0:
        print(text, flush=True)
    ringdp.shutdown()
    return {"benchmark": "far", "text": text}


def report(result: dict[str, Any]) -> str:
    """What each job has printed on rank 0 already."""
    return ""


def _table_of_line(args: argparse.Namespace, ring: dist.ProcessGroup, carried: float, *, gloo: bool) -> str:
    size, rate = args.size // 4 * 4, args.rate / 8
    buffer = torch.zeros(size // 4)
    rows = []
    timed(lambda: dist.all_reduce(torch.zeros(1), group=ring), ring)
    times = [timed(lambda: dist.all_reduce(buffer, group=ring), ring) for _ in range(args.calls)]
    rows.append(row("all-reduce, ring", times, size, rate, carried))
    if args.sends:
        times = [timed(lambda: one_way(buffer, ring), ring) for _ in range(args.sends)]
        rows.append(row("one way, ring", times, size, rate))
    for _ in range(args.idle):
        time.sleep(5)
        pair = [timed(lambda: dist.all_reduce(buffer, group=ring), ring) for _ in range(2)]
        rows.append(row(f"after 5 s, and the next: {pair[0] / pair[1]:.2f}", pair, size, rate, carried))
    if args.gloo and gloo:
        other, few = dist.new_group(backend="gloo"), torch.zeros(args.gloo_size // 4)
        times = [timed(lambda: dist.all_reduce(few, group=other), ring) for _ in range(args.gloo)]
        rows.append(row("all-reduce, gloo", times, args.gloo_size, rate, carried))
    used = " ".join(f"{it}={os.environ[it]}" for it in ("RINGDP_STREAMS", "RINGDP_CONGESTION") if it in os.environ)
    return f"{ringdp.transports()} {used}\n{table(['', 'size', 'median', '', 'of the line', 'each, s'], rows)}"


def _rate(text: str) -> float:
    return 8 * config.parse_rate(text)


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", type=_rate, default=0.0, help="of the line, for `of the line`: 100mbit")
    parser.add_argument("--settings", default="", help="one after the other: cubic:16,bbr:8")
    parser.add_argument("--size", type=parse_size, default=25 << 20, help="bytes of an all-reduce (25m)")
    parser.add_argument("--calls", type=int, default=5, help="all-reduces through ring (5)")
    parser.add_argument("--sends", type=int, default=3, help="messages in one direction through ring (3)")
    parser.add_argument("--idle", type=int, default=0, help="rests of 5 s (0)")
    parser.add_argument("--small", action="store_true", help="all-reduces of 4 to 512 KiB instead, --calls of each")
    parser.add_argument("--delay", type=float, default=0.0, help="ms from one host to another, for --small")
    parser.add_argument("--minutes", type=float, default=0.0, help="all sizes and rests, for so long, instead")
    parser.add_argument("--seed", type=int, default=0, help="of sizes and rests (--minutes; 0)")
    parser.add_argument("--gloo", type=int, default=3, help="all-reduces through gloo (3)")
    parser.add_argument("--gloo-size", type=parse_size, default=4 << 20, help="bytes of one: it is slow (4m)")


def check(args: argparse.Namespace) -> None:
    if args.small or args.minutes:
        args.sends = 0
