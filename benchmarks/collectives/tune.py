#!/usr/bin/env python3
"""Measure this machine and write the file of RINGDP_TUNING: from which size on which algorithm is faster.

    python benchmarks/tune.py --output tuning.json                            one host: 2 and 4 ranks
    sudo python benchmarks/tune.py --hosts 2 --rate 1gbit --output tuning.json    namespaces, one rank on each
    ringrun --nproc-per-node 4 benchmarks/tune.py --output tuning.json        on a launcher's ranks, also several hosts

The layout of the ranks over hosts says which section of the file is measured; what the file says of the others stays.
Two ranks decide `fold_two_ranks_bytes`, more the other limits; any number on several hosts `exact_bucket_bytes`, where
`below` is an exact all-reduce and `above` one of int8 codes. For each size both algorithms run in the same processes;
the limit is the size at which going over costs least, summed over all sizes measured. The constants of the cost model
come from a message of 4 bytes, from 16 MiB, and from adding in the cache.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.lib import session
from benchmarks.lib.hosts import HostsError
from benchmarks.lib.measure import format_size, format_time, machine, parse_size, table
from benchmarks.lib.ranks import RanksFailed

SIZES = "1k,2k,4k,8k,16k,32k,64k,128k,256k,512k,1m,2m"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", metavar="FILE", help="write it there; without it, print it")
    parser.add_argument("--ranks", help="numbers of ranks to measure (default 2,4; between hosts, one on each)")
    parser.add_argument("--hosts", type=int, default=0, help="spread them over N network namespaces (needs root)")
    parser.add_argument("--rate", default="1gbit", help="speed of each host's link, tc's words, or none (1gbit)")
    parser.add_argument("--sizes", default=SIZES, help=f"sizes at which a limit may lie ({SIZES})")
    parser.add_argument("--rounds", type=int, default=3, help="blocks of calls for each algorithm and size (3)")
    parser.add_argument("--block-seconds", type=float, default=0.03, help="about how long a block lasts (0.03)")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds before a run is given up (900)")
    parser.add_argument("--as-rank", metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    try:
        args.size_bytes = sorted(parse_size(word) for word in args.sizes.split(","))
        counts = [int(word) for word in (args.ranks or (str(args.hosts) if args.hosts else "2,4")).split(",")]
        args.places = [session.Place(ranks=count, hosts=args.hosts, rate=args.rate) for count in counts]
    except ValueError as error:
        parser.error(str(error))
    if args.rounds < 1 or any(size < 4 or size % 4 for size in args.size_bytes) or min(counts) < 2:
        parser.error("at least one round, two ranks, and sizes that are multiples of 4 bytes are needed")
    return args


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    return {"size_bytes": args.size_bytes, "rounds": args.rounds, "block_s": args.block_seconds}


def layout_of(hosts: Sequence[str]) -> str:
    """The section of the file that ranks on these hosts belong to."""
    distinct = len(set(hosts))
    if distinct == 1:
        return "one_host"
    return "one_rank_per_host" if distinct == len(hosts) else "several_ranks_per_host"


def best_limit(times: Mapping[str, Sequence[float]]) -> int:
    """Up to which size (a key, in bytes) the first of both times is to be taken; 0 for never.

    The one that costs least: with t the time taken and b the better of both, the sum of log(t / b) over all sizes.
    """
    sizes = sorted(map(int, times))

    def regret(limit: int) -> float:
        return sum(math.log(times[str(s)][0 if s <= limit else 1] / min(times[str(s)])) for s in sizes)

    return min([0, *sizes], key=regret)


DIRECT_RANKS = 16  # of AlgorithmTable, as it is built in: above, a small all-reduce is a tree and not a fold


def limits_of(result: Mapping[str, Any]) -> dict[str, int]:
    """The limits that one run decides; that of a fold is (n-1) times the size, which a rank sends, of a tree 64/n."""
    ranks = len(result["hosts"])
    found = {name: best_limit(times) for name, times in result["limits"].items()}
    if "fold_sent_bytes" in found:
        largest = found["fold_sent_bytes"]
        found["fold_sent_bytes"] = largest * (ranks - 1) if ranks <= DIRECT_RANKS else -(-largest // ranks) * 64
    return found


def costs_of(result: Mapping[str, Any]) -> dict[str, float]:
    """The model's constants (ringdp/costs.py) from a run of two ranks; none from others."""
    from ringdp.costs import HostLayout, work

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
    """What the file says now, checked; nothing where there is none. Raises ringdp's InvalidArgumentError."""
    from ringdp.config import tuning

    if path is None or not Path(path).exists():
        return {}
    tuning.read(path)
    found: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
    return found


def report(results: Sequence[Mapping[str, Any]]) -> str:
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


def write(args: argparse.Namespace, results: Sequence[Mapping[str, Any]], before: Mapping[str, Any]) -> None:
    about = machine()
    words = f"{about['processor']}, {about['cores']} cores, Linux {about['kernel']}, {date.today().isoformat()}"
    document = json.dumps(merged(before, results, words), indent=2)
    print(report(results), file=sys.stderr)
    if args.output:
        Path(args.output).write_text(document + "\n", encoding="utf-8")
        print(f"written to {args.output}: set RINGDP_TUNING to it on every rank", file=sys.stderr)
    else:
        print(document)


def run_under_launcher(args: argparse.Namespace) -> None:
    """Be a rank of somebody's launcher; rank 0 writes."""
    import torch.distributed as dist
    from benchmarks.collectives.tune_rank import measure

    dist.init_process_group("gloo")
    before = read_before(args.output)

    def deliver(result: Any) -> None:
        if dist.get_rank() == 0:
            write(args, [json.loads(json.dumps(result))], before)
        dist.barrier()

    rank, world_size = dist.get_rank(), dist.get_world_size()
    measure(session.Joined(settings_of(args), rank, world_size, int(os.environ.get("LOCAL_RANK", "0")), deliver))
    dist.destroy_process_group()


def run_here(args: argparse.Namespace) -> None:
    before = read_before(args.output)
    results = []
    for place in args.places:
        with session.make_hosts(place) as hosts:
            result, quiet = session.run(__file__, settings_of(args), place, hosts=hosts, timeout_s=args.timeout)
        results.append(result)
        for warning in quiet.warnings():
            print(f"WARNING: {warning}", file=sys.stderr)
    write(args, results, before)


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.as_rank:
        from benchmarks.collectives.tune_rank import run_rank

        run_rank(args.as_rank)
        return 0
    if reason := session.why_no_ringdp():
        print(f"tune.py: {reason}", file=sys.stderr)
        return 2
    from ringdp.errors import RingError

    try:
        if "RANK" in os.environ:
            run_under_launcher(args)
        else:
            run_here(args)
    except (HostsError, RingError) as error:
        print(f"tune.py: {error}", file=sys.stderr)
        return 2
    except RanksFailed as error:
        print(f"tune.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
