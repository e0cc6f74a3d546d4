"""Measure this machine and write the file of RINGDP_TUNING: from which size on which algorithm is faster.

    python -m benchmarks tune --output tuning.json                            one host: 2 and 4 ranks
    sudo python -m benchmarks tune --hosts 2 --rate 1gbit --output tuning.json    namespaces, one rank on each
    ringrun --nproc-per-node 4 -m benchmarks tune --output tuning.json   on a launcher's ranks, also several hosts

The layout of the ranks over hosts says which section of the file is measured; what the file says of the others stays.
Two ranks decide `fold_two_ranks_bytes`, more the other limits; any number on several hosts `exact_bucket_bytes`, where
`below` is an exact all-reduce and `above` one of int8 codes. For each size both algorithms run in the same processes;
the limit is the size at which going over costs least, summed over all sizes measured. The constants of the cost model
come from a message of 4 bytes, from 16 MiB, and from adding in the cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy
import torch
import torch.distributed as dist

from benchmarks.collectives.core import make_runtime
from benchmarks.lib import session
from benchmarks.lib.measure import format_size, format_time, machine, parse_size, table
from benchmarks.lib.ranks import Unavailable
from ringdp.costs import DIRECT_RANKS, HostLayout, work
from ringdp.tools import algorithm_table

MIN_CALLS, MAX_CALLS = 5, 400  # of one algorithm in one block
ALWAYS, NEVER = 2**40, 0
LARGE_BYTES = 16 << 20  # for the costs per byte

Block = Callable[[str, int, int], list[float]]  # (which of the two, bytes, calls) -> seconds of each call
SIZES = "1k,2k,4k,8k,16k,32k,64k,128k,256k,512k,1m,2m"


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", metavar="FILE", help="write it there; without it, print it")
    parser.add_argument("--sizes", default=SIZES, help=f"sizes at which a limit may lie ({SIZES})")
    parser.add_argument("--rounds", type=int, default=3, help="blocks of calls for each algorithm and size (3)")
    parser.add_argument("--block-seconds", type=float, default=0.03, help="about how long a block lasts (0.03)")


def check(args: argparse.Namespace) -> None:
    args.size_bytes = sorted(parse_size(word) for word in args.sizes.split(","))
    counts = [args.ranks] if args.ranks is not None else [args.hosts] if args.hosts else [2, 4]
    args.places = [session.Place(count, args.hosts, args.rate) for count in counts]
    session.at_least(1, rounds=args.rounds)
    session.at_least(2, ranks=min(counts))
    if any(size < 4 or size % 4 for size in args.size_bytes):
        raise ValueError("sizes must be multiples of 4 bytes")


def settings(args: argparse.Namespace) -> dict[str, Any]:
    return {"size_bytes": args.size_bytes, "rounds": args.rounds, "block_s": args.block_seconds}


def layout_of(hosts: Sequence[str]) -> str:
    """The section of the file that ranks on these hosts belong to."""
    return algorithm_table.layout(HostLayout(tuple(Counter(hosts).values()), cores=1))


def best_limit(times: Mapping[str, Sequence[float]]) -> int:
    """Up to which size (a key, in bytes) the first of both times is to be taken; 0 for never."""
    return algorithm_table.best_limit({int(size): pair for size, pair in times.items()})


def limits_of(result: Mapping[str, Any]) -> dict[str, int]:
    """The limits that one run decides."""
    ranks = len(result["hosts"])
    found = {name: best_limit(times) for name, times in result["limits"].items()}
    if "fold_sent_bytes" in found:
        direct = ranks <= DIRECT_RANKS
        found["fold_sent_bytes"] = algorithm_table.fold_limit(found["fold_sent_bytes"], ranks, direct=direct)
    return found


def costs_of(result: Mapping[str, Any]) -> dict[str, float]:
    """The model's constants (ringdp/costs.py) from a run of two ranks; none from others."""
    hosts, costs = result["hosts"], result["costs"]
    if len(hosts) != 2:
        return {}
    kind = "local" if hosts[0] == hosts[1] else "remote"
    large = work("ring", HostLayout((2,) if kind == "local" else (1, 1), cores=2), result["large_bytes"])
    messages = large.local_messages + large.remote_messages
    rest_s = costs["large_s"] - messages * costs["message_s"] - large.added_bytes * costs["add_s_per_byte"]
    found = {
        f"alpha_{kind}_us": costs["message_s"] * 1e6,
        f"beta_{kind}_ns_per_byte": max(0.0, rest_s) / large.rank_bytes * 1e9,
        "gamma_ns_per_byte": costs["add_s_per_byte"] * 1e9,
    }
    return {name: float(f"{value:.3g}") for name, value in found.items()}


def merged(before: Mapping[str, Any], results: Sequence[Mapping[str, Any]], words: str) -> dict[str, Any]:
    """The file's new contents: what was measured over what it said before."""
    layouts = {name: dict(limits) for name, limits in before.get("layouts", {}).items()}
    costs = dict(before.get("costs", {}))
    for result in results:
        layouts.setdefault(layout_of(result["hosts"]), {}).update(limits_of(result))
        costs |= costs_of(result)
    return {"ringdp_tuning": 1, "machine": words, "layouts": layouts, "costs": costs}


def read_before(path: str | None) -> dict[str, Any]:
    """What the file says now, checked; nothing where there is none. Raises Unavailable."""
    from ringdp.config import tuning
    from ringdp.errors import InvalidArgumentError

    if path is None or not Path(path).exists():
        return {}
    try:
        tuning.read(path)
    except InvalidArgumentError as error:  # it is not overwritten
        raise Unavailable(str(error)) from error
    found: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Raises Unavailable, HostsError, RanksFailed."""
    session.need_ringdp()
    before = read_before(args.output)
    results = []
    for place in args.places:
        with session.make_hosts(place) as hosts:
            found, quiet = session.run("tune", settings(args), place, hosts=hosts, timeout_s=args.timeout)
        results.append(found)
        for warning in quiet.warnings():
            print(f"WARNING: {warning}", file=sys.stderr)
    return written(args, results, before)


def written(
    args: argparse.Namespace, results: Sequence[Mapping[str, Any]], before: Mapping[str, Any]
) -> dict[str, Any]:
    about = machine()
    words = f"{about['processor']}, {about['cores']} cores, Linux {about['kernel']}, {date.today().isoformat()}"
    document = json.dumps(merged(before, results, words), indent=2)
    print(measured_words(results), file=sys.stderr)
    if args.output:
        Path(args.output).write_text(document + "\n", encoding="utf-8")
    return {"output": args.output, "document": document}


def report(result: dict[str, Any]) -> str:
    if not result["output"]:
        return str(result["document"])
    return f"written to {result['output']}: set RINGDP_TUNING to it on every rank"


def main(argv: Sequence[str]) -> int:
    if "RANK" not in os.environ or list(argv[:1]) == ["--as-rank"]:
        return session.main(sys.modules[__name__], "tune", argv)
    args = session.parse(sys.modules[__name__], argv)  # a rank of somebody's launcher; rank 0 writes
    dist.init_process_group("gloo")
    before = read_before(args.output)

    def deliver(result: Any) -> None:
        if dist.get_rank() == 0:
            print(report(written(args, [json.loads(json.dumps(result))], before)))
        dist.barrier()

    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    run_rank(session.Joined(settings(args), dist.get_rank(), dist.get_world_size(), local_rank, deliver))
    dist.destroy_process_group()
    return 0


def measured_words(results: Sequence[Mapping[str, Any]]) -> str:
    """What was measured, as text."""
    lines = []
    for result in results:
        limits = limits_of(result)
        for name, times in result["limits"].items():
            ranks = len(result["hosts"])
            lines += [f"{name}, {ranks} ranks, {layout_of(result['hosts'])}: {format_size(limits[name])}", ""]
            rows = [[format_size(int(size)), *map(format_time, both)] for size, both in times.items()]
            lines += [table(["size", "below the limit", "above"], rows), ""]
    return "\n".join(lines)


# What each rank does.


def run_rank(joined: session.Joined) -> None:
    """Deliver ``{"hosts": [...], "limits": {limit: {bytes: [small, large]}}, "costs": {...}}``, times in seconds."""
    from ringdp import config

    runtime, core = make_runtime(joined.rank, joined.world_size, "tune")
    members = list(range(joined.world_size))
    groups = {
        "small": core.Group(runtime, "small", members, table={**_table(ALWAYS), "halving_rank_bytes": 0}),
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

        def from_all() -> None:
            for root in members:
                groups[which].broadcast(x, "float32", root).wait()

        return [seconds / len(members) for seconds in _timed(from_all, calls)]

    def all_gather(which: str, size: int, calls: int) -> list[float]:
        x = numpy.zeros(size // 4, numpy.float32)
        blocks = [numpy.zeros_like(x) for _ in members]
        return _timed(lambda: groups[which].all_gather(x, blocks, "float32").wait(), calls)

    def exactly_or_as_codes(which: str, size: int, calls: int) -> list[float]:
        x = numpy.zeros(size // 4, numpy.float32)
        if which == "small":
            return _timed(lambda: built_in.all_reduce(x, "float32").wait(), calls)
        return _timed(lambda: built_in.all_reduce_compressed([x], [0], "int8")[0].wait(), calls)

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
        joined.say(f"{limit}: {size} bytes")
        found[size] = _medians(joined, block, ("small", "large"), size)
    return found


def _medians(joined: session.Joined, block: Block, names: Sequence[str], size: int) -> list[float]:
    """Of all calls in `rounds` blocks of each, alternating, on the rank where it is largest, in seconds."""
    trial_s = session.slowest(min(min(block(name, size, MIN_CALLS)) for name in names))
    calls = max(MIN_CALLS, min(MAX_CALLS, int(joined.settings["block_s"] / trial_s)))
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(joined.settings["rounds"]):
        for name in names:
            seconds[name] += block(name, size, calls)
    return [session.slowest(statistics.median(seconds[name])) for name in names]


def _add_s_per_byte() -> float:
    """Adding a segment of 256 KiB to another, both in the cache."""
    x, y = torch.zeros(65536), torch.zeros(65536)
    return statistics.median(_timed(lambda: torch.add(x, y, out=x), 200)) / (4 * x.numel())


def _timed(call: Callable[[], object], calls: int) -> list[float]:
    seconds = []
    for _ in range(calls):
        start = perf_counter()
        call()
        seconds.append(perf_counter() - start)
    return seconds
