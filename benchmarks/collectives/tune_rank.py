"""What each rank of `tune.py` does: times both algorithms of every limit of the table at a ladder of sizes."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import numpy
from benchmarks.lib import session
import torch
import torch.distributed as dist
from benchmarks.collectives.allreduce_rank import make_core_runtime

MIN_CALLS, MAX_CALLS = 5, 400  # of one algorithm in one block
ALWAYS, NEVER = 2**40, 0
LARGE_BYTES = 16 << 20  # for the costs per byte

Block = Callable[[str, int, int], list[float]]  # (which of the two, bytes, calls) -> seconds of each call


def run_rank(path: str) -> None:
    measure(session.join(path))


def measure(joined: session.Joined) -> None:
    """Deliver ``{"hosts": [...], "limits": {limit: {bytes: [small, large]}}, "costs": {...}}``, times in seconds."""
    from ringdp import config

    runtime, core = make_core_runtime(joined, "tune")
    members = list(range(joined.world_size))
    groups = {
        "small": core.Group(runtime, "small", members, table=_table(ALWAYS)),
        "large": core.Group(runtime, "large", members, table=_table(NEVER)),
    }
    built_in = core.Group(runtime, "built in", members)
    hosts: list[Any] = [None] * joined.world_size
    dist.all_gather_object(hosts, config.host_identity(config.RingConfig.from_environment().host_id))

    def all_reduce(which: str, size: int, calls: int) -> list[float]:
        x = numpy.zeros(size // 4, numpy.float32)
        seconds: list[float] = groups[which].time_all_reduce(x, "float32", calls)
        return seconds

    def broadcast(which: str, size: int, calls: int) -> list[float]:
        """From every rank in turn, so that no root runs ahead."""
        x = numpy.zeros(size // 4, numpy.float32)
        seconds = []
        for _ in range(calls):
            start = perf_counter()
            for root in members:
                groups[which].broadcast(x, "float32", root).wait()
            seconds.append((perf_counter() - start) / len(members))
        return seconds

    def all_gather(which: str, size: int, calls: int) -> list[float]:
        x = numpy.zeros(size // 4, numpy.float32)
        blocks = [numpy.zeros_like(x) for _ in members]
        seconds = []
        for _ in range(calls):
            start = perf_counter()
            groups[which].all_gather(x, blocks, "float32").wait()
            seconds.append(perf_counter() - start)
        return seconds

    def exactly_or_as_codes(which: str, size: int, calls: int) -> list[float]:
        x = numpy.zeros(size // 4, numpy.float32)
        seconds = []
        for _ in range(calls):
            start = perf_counter()
            if which == "small":
                built_in.all_reduce(x, "float32").wait()
            else:
                built_in.all_reduce_compressed([x], [0], "int8")[0].wait()
            seconds.append(perf_counter() - start)
        return seconds

    of_limit: dict[str, Block] = {"fold_two_ranks_bytes": all_reduce}
    if joined.world_size > 2:
        of_limit = {
            "fold_sent_bytes": all_reduce,
            "flat_broadcast_bytes": broadcast,
            "direct_gather_bytes": all_gather,
        }
    if len(set(hosts)) > 1:
        of_limit["exact_bucket_bytes"] = exactly_or_as_codes
    limits = {name: _ladder(joined, name, block) for name, block in of_limit.items()}
    costs = {
        "message_s": _medians(joined, all_reduce, ("small",), 4)[0],
        "large_s": _medians(joined, all_reduce, ("large",), LARGE_BYTES)[0],
        "add_s_per_byte": _add_s_per_byte(),
    }
    for group in (*groups.values(), built_in):
        group.close()
    joined.deliver({"hosts": hosts, "limits": limits, "costs": costs, "large_bytes": LARGE_BYTES})
    runtime.shut_down()


def _table(limit_bytes: int) -> Mapping[str, int]:
    from ringdp.config.tuning import MEASURED_LIMITS

    return dict.fromkeys(MEASURED_LIMITS, limit_bytes)


def _ladder(joined: session.Joined, limit: str, block: Block) -> dict[int, list[float]]:
    found = {}
    for size in joined.settings["size_bytes"]:
        if joined.rank == 0:
            print(f"… {limit}: {size} bytes", file=sys.stderr, flush=True)
        found[size] = _medians(joined, block, ("small", "large"), size)
    return found


def _medians(joined: session.Joined, block: Block, names: Sequence[str], size: int) -> list[float]:
    """Of all calls in `rounds` blocks of each, alternating, on the rank where it is largest, in seconds."""
    trial = torch.tensor([min(min(block(name, size, MIN_CALLS)) for name in names)], dtype=torch.float64)
    dist.all_reduce(trial, op=dist.ReduceOp.MAX)
    calls = max(MIN_CALLS, min(MAX_CALLS, int(joined.settings["block_s"] / trial.item())))
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(joined.settings["rounds"]):
        for name in names:
            seconds[name] += block(name, size, calls)
    mine = torch.tensor([statistics.median(seconds[name]) for name in names], dtype=torch.float64)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    found: list[float] = mine.tolist()
    return found


def _add_s_per_byte() -> float:
    """Adding a segment of 256 KiB to another, both in the cache."""
    x, y = torch.zeros(65536), torch.zeros(65536)
    seconds = []
    for _ in range(200):
        start = perf_counter()
        torch.add(x, y, out=x)
        seconds.append(perf_counter() - start)
    return statistics.median(seconds) / (4 * x.numel())
