"""Does a running job notice connection attempts at its port? All-reduce alone against all-reduce under attempts.

    python benchmarks/strangers.py [--size 1m] [--blocks 10] [--rate 1000]

Two ranks on this host, which use TCP; a third process connects to the port on which rank 0 listens, `--rate` times a
second, in every other block, and says 128 bytes that are no handshake. Prints the median time of both and their ratio.
No attempt may get a byte: if one does, the benchmark fails.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import queue
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from benchmarks.lib.measure import format_time, parse_size

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # ringdp may be built where it lies

BLOCK_S = 0.5


def attempt(port: int, rate: float, running: Event, ended: Event, refused: Any) -> None:
    """Come while `running` is set, until `ended`; counts in `refused`, which is -1 when it was answered."""
    while not ended.is_set():
        if not running.wait(0.1):
            continue
        with socket.socket() as stranger:
            stranger.settimeout(5)
            with contextlib.suppress(OSError):  # refused, or closed
                stranger.connect(("127.0.0.1", port))
                stranger.sendall(bytes(128))
                if stranger.recv(1) != b"":
                    refused.value = -1
                    return
        refused.value += 1
        time.sleep(1 / rate)


def timed(call: Callable[[], None], seconds: float) -> list[float]:
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def rank_main(rank: int, method: str, size_bytes: int, blocks: int, running: Event, results: Any) -> None:
    import torch
    import torch.distributed as dist

    import ringdp  # noqa: F401  registers the backend

    torch.set_num_threads(1)
    dist.init_process_group("ring", init_method=method, rank=rank, world_size=2)
    buffer, go_on = torch.ones(size_bytes // 4), torch.zeros(1)
    times: dict[bool, list[float]] = {False: [], True: []}

    def once() -> None:
        dist.all_reduce(buffer)
        buffer.fill_(1.0)

    def follow() -> None:
        """Rank 1 does what rank 0 does until that says stop."""
        while True:
            dist.broadcast(go_on, src=0)
            if go_on[0] == 0:
                return
            once()

    def lead() -> None:
        go_on.fill_(1.0)
        dist.broadcast(go_on, src=0)
        once()

    for block in range(2 * blocks):
        attacked = block % 2 == 1
        if rank == 0:
            running.set() if attacked else running.clear()
            times[attacked] += timed(lead, BLOCK_S)
            go_on.zero_()
            dist.broadcast(go_on, src=0)
        else:
            follow()
    dist.destroy_process_group()
    if rank == 0:
        results.put({attacked: statistics.median(values) for attacked, values in times.items()})


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", default="1m", help="of the all-reduce (default 1m)")
    parser.add_argument(
        "--blocks", type=int, default=10, help="with and without attempts each, half a second (default 10)"
    )
    parser.add_argument("--rate", type=float, default=1000.0, help="attempts a second (default 1000)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [one.getsockname()[1], other.getsockname()[1]]
    spawn = multiprocessing.get_context("spawn")
    running, ended, refused, results = spawn.Event(), spawn.Event(), spawn.Value("l", 0), spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        method = f"file://{Path(folder, 'store')}"
        ranks = []
        for rank in range(2):
            os.environ["RINGDP_PORT_RANGE"] = str(ports[rank])
            os.environ["RINGDP_TRANSPORT"] = "tcp"
            words = (rank, method, parse_size(args.size), args.blocks, running, results)
            ranks.append(spawn.Process(target=rank_main, args=words))
            ranks[-1].start()
        stranger = spawn.Process(target=attempt, args=(ports[0], args.rate, running, ended, refused), daemon=True)
        stranger.start()
        medians = None
        while medians is None and all(it.exitcode in (None, 0) for it in ranks):
            with contextlib.suppress(queue.Empty):
                medians = results.get(timeout=0.5)
        for it in ranks:
            it.join(30 if medians is not None else 1)
            it.kill()
        ended.set()
        stranger.join(10)
    if medians is None:
        sys.stdout.write("a rank failed\n")
        return 1
    sys.stdout.write(
        f"all-reduce of {args.size}, 2 ranks: alone {format_time(medians[False])}, under {refused.value} attempts"
        f" {format_time(medians[True])}, ratio {medians[True] / medians[False]:.3f}\n"
    )
    if refused.value <= 0:
        sys.stdout.write("an attempt got an answer\n" if refused.value < 0 else "nobody tried\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
