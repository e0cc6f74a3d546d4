"""How long ranks of one host take to start: joining the job, then wrapping a model and its first steps.

    python -m benchmarks startup                       # ring and gloo with 2 to 64 ranks, in turns
    python -m benchmarks startup --ranks 128 --peers ring --rounds 3

All ranks are forked from one process that has imported everything, so that imports do not count, and start together.
Times are of the slowest rank, medians over the rounds, which alternate between the backends. CPU seconds are of all
ranks together. Descriptors and private memory are the most that a rank has more of at the end than before it joined.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import statistics
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ringdp
from benchmarks.lib import session
from benchmarks.lib.ranks import Failed

STEPS = 3
PEERS = ("ring", "gloo")
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Start:
    """One start of all ranks.

    Attributes:
        join_s: `ringdp.init` or `init_process_group`, the slowest rank.
        train_s: wrapping the model and three steps, the slowest rank.
        join_cpu_s: of all ranks together.
        descriptors, memory_kib: the most of any rank.
    """

    join_s: float
    train_s: float
    join_cpu_s: float
    descriptors: int
    memory_kib: int


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def private_kib() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))


def rank_main(peer: str, rank: int, world: int, port: int, together: Any, results: Any) -> None:
    try:
        torch.set_num_threads(1)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
        before, before_kib, cpu = descriptors(), private_kib(), time.process_time()
        address = f"tcp://127.0.0.1:{port}"
        together.wait()
        began = time.perf_counter()
        if peer == "ring":
            ringdp.init(rank=rank, world_size=world, init_method=address, timeout=TIMEOUT_S)
        else:
            dist.init_process_group(peer, rank=rank, world_size=world, init_method=address)
        joined, cpu = time.perf_counter(), time.process_time() - cpu
        wrapper = ringdp.RingDP if peer == "ring" else DistributedDataParallel
        wrapped = wrapper(model)
        for _ in range(STEPS):
            wrapped(torch.ones(4, 64)).sum().backward()
        done = time.perf_counter()
        results.put((joined - began, done - joined, cpu, descriptors() - before, private_kib() - before_kib))
        together.wait()
        dist.destroy_process_group()
    except BaseException:
        results.put(f"{peer}, rank {rank} of {world}:\n{traceback.format_exc()}")
        raise


def import_all() -> None:
    """What joining and wrapping import, which the ranks get by fork; starts no thread."""
    ours = ("_build", "_C", "config", "job.devices", "job.process_group", "ddp.wrapper")
    for name in ("torch._dynamo", *(f"ringdp.{it}" for it in ours)):
        importlib.import_module(name)


def start(peer: str, world: int) -> Start:
    """Raises Failed."""
    fork = multiprocessing.get_context("fork")
    together, results, port = fork.Barrier(world), fork.SimpleQueue(), session.free_port()
    ranks = [fork.Process(target=rank_main, args=(peer, r, world, port, together, results)) for r in range(world)]
    for process in ranks:
        process.start()
    told = []
    try:
        for _ in ranks:
            told.append(results.get())
            if isinstance(told[-1], str):
                raise Failed(told[-1])
    finally:
        for process in ranks:
            if len(told) < world:
                process.kill()
            process.join()
    join_s, train_s, cpu_s, gained, memory_kib = zip(*told, strict=True)
    return Start(max(join_s), max(train_s), sum(cpu_s), max(gained), max(memory_kib))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    import_all()
    rows = []
    for world in args.ranks:
        starts: dict[str, list[Start]] = {peer: [] for peer in args.peers}
        for _ in range(args.rounds):
            for peer in args.peers:
                starts[peer].append(start(peer, world))
        for peer, all_of in starts.items():
            figures = {key: statistics.median(getattr(one, key) for one in all_of) for key in asdict(all_of[0])}
            rows.append({"ranks": world, "peer": peer} | figures)
            print(line(rows[-1]), flush=True)
    return session.result_of("startup", None, load=os.getloadavg()[0], rows=rows)


def line(row: dict[str, Any]) -> str:
    return (
        f"{row['ranks']:>5} ranks  {row['peer']:<5} join {row['join_s'] * 1e3:8.1f} ms  "
        f"wrap and {STEPS} steps {row['train_s'] * 1e3:8.1f} ms  CPU to join {row['join_cpu_s'] * 1e3:8.0f} ms  "
        f"{row['descriptors']:4.0f} descriptors  {row['memory_kib'] / 1024:6.1f} MiB"
    )


def report(result: dict[str, Any]) -> str:
    by = {(row["ranks"], row["peer"]): row for row in result["rows"]}
    lines = []
    for ranks in sorted({row["ranks"] for row in result["rows"]}):
        ring, gloo = by.get((ranks, "ring")), by.get((ranks, "gloo"))
        if ring and gloo:
            ratios = [ring[key] / gloo[key] for key in ("join_s", "train_s", "join_cpu_s")]
            lines.append(
                f"{ranks:>5} ranks  ring / gloo: join {ratios[0]:.2f}, train {ratios[1]:.2f}, CPU {ratios[2]:.2f}"
            )
    return session.text(result, f"start of ranks of one host, load {result['load']:.1f} at the end", "\n".join(lines))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", default="2,4,8,16,32,64", help="numbers of ranks: 2,4,8")
    parser.add_argument("--peers", default=",".join(PEERS), help=",".join(PEERS))
    parser.add_argument("--rounds", type=int, default=5)


def check(args: argparse.Namespace) -> None:
    args.ranks, args.peers = [int(word) for word in args.ranks.split(",")], session.chosen(args.peers, PEERS)
    session.at_least(1, ranks=min(args.ranks), rounds=args.rounds)
