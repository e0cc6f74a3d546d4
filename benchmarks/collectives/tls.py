"""What TLS costs: the same all-reduces over TCP as they are and with RINGDP_TLS, in turns.

    python -m benchmarks tls                                    two ranks over loopback, 25 MiB
    sudo python -m benchmarks tls --hosts 2 --rate 1gbit        on two network namespaces

Both groups are in the same processes. Results are compared before anything is timed. Times are of the slowest rank,
the median over the blocks; CPU seconds are of all ranks together, for each GB that a rank sends.
"""

from __future__ import annotations

import argparse
import dataclasses
import secrets
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.lib import session
from benchmarks.lib.measure import format_size, format_time, parse_size
from benchmarks.lib.ranks import Failed
from ringdp.config import RingConfig

NAMES = {False: "plain", True: "TLS 1.3"}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=parse_size, default="25M", help="of an all-reduce (default 25M)")
    parser.add_argument("--blocks", type=int, default=9, help="of each kind (default 9)")
    parser.add_argument("--seconds", type=float, default=1.0, help="that a block takes, about (default 1)")


def check(args: argparse.Namespace) -> None:
    session.at_least(1, blocks=args.blocks)
    if args.place.ranks < 2:
        raise ValueError("--ranks must be 2 or more")


def settings(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "bytes": args.size,
        "blocks": args.blocks,
        "seconds": args.seconds,
        "secret": secrets.token_hex(32),
    }


def run_rank(joined: session.Joined) -> None:
    told = joined.settings
    groups = {tls: _group(told["secret"], tls) for tls in NAMES}
    numbers = torch.randn(told["bytes"] // 4, generator=torch.Generator().manual_seed(joined.rank))
    sums = {tls: numbers.clone() for tls in NAMES}
    for tls, group in groups.items():
        dist.all_reduce(sums[tls], group=group)
    if not torch.equal(sums[False], sums[True]):
        raise Failed("the sums differ")
    times: dict[bool, list[float]] = {tls: [] for tls in NAMES}
    used: dict[bool, list[float]] = {tls: [] for tls in NAMES}
    buffer = torch.zeros(told["bytes"] // 4)
    calls = max(1, int(told["seconds"] / session.block(lambda: dist.all_reduce(buffer, group=groups[False]), 2, None)))
    for number in range(told["blocks"]):
        joined.say(f"block {number + 1} of {told['blocks']}")
        for tls, group in groups.items():
            began = time.process_time()
            times[tls].append(session.block(lambda group=group: dist.all_reduce(buffer, group=group), calls, group))  # type: ignore[misc]
            cpu = torch.tensor(time.process_time() - began, dtype=torch.float64)
            dist.all_reduce(cpu)
            used[tls].append(cpu.item())
    carried = 2 * (joined.world_size - 1) / joined.world_size * told["bytes"]
    rows = [
        {
            "name": NAMES[tls],
            "seconds": statistics.median(times[tls]),
            "each": times[tls],
            "bytes_per_s": carried / statistics.median(times[tls]),
            "cpu_s_per_gb": statistics.median(used[tls]) / calls / carried * 1e9,
        }
        for tls in NAMES
    ]
    for group in groups.values():
        dist.destroy_process_group(group)
    joined.deliver(rows)


def _group(secret: str, tls: bool) -> dist.ProcessGroup:
    config = dataclasses.replace(RingConfig.from_environment(), secret=bytes.fromhex(secret), tls=tls, transport="tcp")
    group = dist.new_group(backend="ring", pg_options=config)
    assert group is not None
    return group


def report(result: dict[str, Any]) -> str:
    plain = result["rows"][0]
    rows = [
        [
            it["name"],
            format_time(it["seconds"]),
            f"{min(it['each']) * 1e3:.1f} to {max(it['each']) * 1e3:.1f} ms",
            f"{it['bytes_per_s'] * 8 / 1e9:.3f} Gbit/s",
            f"{100 * plain['seconds'] / it['seconds']:.1f} %",
            f"{it['cpu_s_per_gb']:.2f} s",
        ]
        for it in result["rows"]
    ]
    title = f"All-reduces of {format_size(result['settings']['bytes'])} over TCP"
    columns = ["", "median", "blocks", "each way", "of plain", "CPU for each GB"]
    return session.report_table(result, title, columns, rows)
