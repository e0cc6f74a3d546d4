# mypy: disable-error-code="attr-defined"
"""How long a process group takes to get new members by torch's reconfigure (2.14 and newer), on ring and on gloo.

    python benchmarks/reconfigure.py
    python benchmarks/reconfigure.py --ranks 8 --rounds 40

Ranks of one host. `same` has the members it had before, `shrink` leaves the last one out, `grow` takes it back. Each
time is the slowest rank's, from the call to the end of the Work's wait, with all ranks ready to begin; the backends
take turns, and an all-reduce after each change is checked.
"""

from __future__ import annotations

import argparse
import datetime
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

import ringdp  # noqa: F401

CHANGES = ("same", "shrink", "grow")
PEERS = ("ring", "gloo")


def run_rank(rank: int, ranks: int, backend: str, rounds: int, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port, ranks, is_master=rank == 0, timeout=timeout)
    options: Any = {"enable_reconfigure": True}
    dist.init_process_group(backend, rank=rank, world_size=ranks, store=store, timeout=timeout, **options)
    c10d: Any = dist
    count = iter(range(1_000_000))

    def gather(text: str) -> list[str]:
        name = f"gather {next(count)}"
        store.set(f"{name} {rank}", text)
        return [store.get(f"{name} {other}").decode() for other in range(ranks)]

    def change(uuid: int, members: int) -> float:
        """To the first `members` ranks; the slowest one's milliseconds."""
        handles = gather(c10d._get_reconfigure_handle())[:members]
        gather("")  # all are ready
        begin = time.perf_counter()
        if rank < members:
            c10d._reconfigure(uuid, handles, timeout=timeout).wait()
        took = time.perf_counter() - begin
        if rank < members:
            total = torch.full((1000,), rank + 1.0)
            dist.all_reduce(total)
            assert (total == members * (members + 1) / 2).all()
        return 1e3 * max(map(float, gather(str(took))))

    change(1, ranks)
    times: dict[str, list[float]] = {name: [] for name in CHANGES}
    for uuid in range(10, 10 + 3 * rounds, 3):
        for offset, name in enumerate(CHANGES):
            times[name].append(change(uuid + offset, ranks - (name == "shrink")))
    if rank == 0:
        results.put(times)
    gather("")
    dist.destroy_process_group()


def measure(ranks: int, backend: str, rounds: int) -> dict[str, list[float]]:
    results = multiprocessing.get_context("spawn").SimpleQueue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = multiprocessing.spawn(run_rank, (ranks, backend, rounds, port, results), nprocs=ranks, join=False)
    times: dict[str, list[float]] = results.get()
    while not started.join():
        pass
    return times


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="default: 2 and 4")
    parser.add_argument("--rounds", type=int, default=20, help="changes of each kind in a turn (20)")
    parser.add_argument("--turns", type=int, default=3, help="of each backend (3)")
    arguments = parser.parse_args(argv)
    if min(*arguments.ranks, arguments.rounds, arguments.turns) < 1 or min(arguments.ranks) < 2:
        parser.error("at least two ranks, one round and one turn are needed")
    return arguments


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    if not hasattr(dist, "_reconfigure"):
        sys.exit(f"torch {torch.__version__} has no reconfigure: it came with 2.14")
    print("| ranks | change | ring: median, least, most | gloo | ring / gloo |\n|---|---|---|---|---|")
    for ranks in arguments.ranks:
        times: dict[str, dict[str, list[float]]] = {peer: {name: [] for name in CHANGES} for peer in PEERS}
        for _ in range(arguments.turns):
            for peer in PEERS:
                for name, some in measure(ranks, peer, arguments.rounds).items():
                    times[peer][name] += some
        for name in CHANGES:
            ring, gloo = (times[peer][name] for peer in PEERS)
            cells = [f"{statistics.median(it):.1f}, {min(it):.1f}, {max(it):.1f} ms" for it in (ring, gloo)]
            ratio = statistics.median(ring) / statistics.median(gloo)
            print(f"| {ranks} | {name} | {cells[0]} | {cells[1]} | {ratio:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
