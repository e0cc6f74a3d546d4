#!/usr/bin/env python3
"""What compression="auto" does: on a link whose speed changes, and how it compares with exact gradients.

    sudo python benchmarks/auto_compression.py follow --hosts 2 --rates 100mbit,1gbit,10gbit,1gbit,100mbit
        one training, the links change under it; prints each decision and what steps took at each speed
    python benchmarks/auto_compression.py compare --ranks 2 --model mlp
    sudo python benchmarks/auto_compression.py compare --hosts 2 --rate 10gbit --model mlp
        blocks of steps alternate between exact and auto; prints the ratio with its 95 % interval

Times are rank 0's; steps wait for each other anyway.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.lib import models
from benchmarks.lib import session
from benchmarks.lib.hosts import Hosts
from benchmarks.lib.measure import format_time, interval, machine, table


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("follow", "compare"), nargs="?")
    parser.add_argument("--model", default="mlp", choices=models.NAMES)
    parser.add_argument("--allow", default="4bit", help="what auto may choose among (default 4bit)")
    parser.add_argument("--rates", default="100mbit,1gbit,10gbit,1gbit,100mbit", help="follow: speeds, one by one")
    parser.add_argument("--seconds", type=float, default=45.0, help="follow: how long each lasts (default 45)")
    parser.add_argument("--blocks", type=int, default=20, help="compare: blocks of each (default 20)")
    parser.add_argument("--block-steps", type=int, default=12, help="compare: steps in a block (default 12)")
    parser.add_argument("--idle", type=float, default=0.0, help="seconds that each forward takes longer")
    parser.add_argument("--json", metavar="FILE", help="write everything measured there, too")
    session.add_place_options(parser)
    args = parser.parse_args(argv)
    if args.as_rank is None and args.what is None:
        parser.error("follow or compare?")
    args.rate_words = args.rates.split(",")
    if args.what == "follow":
        args.rate = args.rate_words[0]
        args.hosts = args.hosts or 2
    args.place = session.place_of(parser, args)
    return args


@contextmanager
def changing(hosts: Hosts | None, rates: Sequence[str], seconds: float) -> Iterator[list[tuple[float, str]]]:
    """Within the block the links get one speed after the other; the list has when, by time.time()."""
    log: list[tuple[float, str]] = []
    stop = threading.Event()

    def change() -> None:
        assert hosts is not None
        for rate in rates:
            hosts.set_rate(rate)
            log.append((time.time(), rate))
            if stop.wait(seconds):
                return

    thread = threading.Thread(target=change, daemon=True)
    if hosts is not None:
        thread.start()
    try:
        yield log
    finally:
        stop.set()
        if hosts is not None:
            thread.join()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    if reason := session.why_no_ringdp():
        raise session.Unavailable(reason)
    settings = {
        "what": args.what,
        "model": args.model,
        "allow": args.allow,
        "blocks": args.blocks,
        "block_steps": args.block_steps,
        "seconds": args.seconds * len(args.rate_words) + 5,
        "idle_s": args.idle,
    }
    follow = args.what == "follow"
    with (
        session.make_hosts(args.place) as hosts,
        changing(hosts if follow else None, args.rate_words, args.seconds) as changes,
    ):
        result, quiet = session.run(__file__, settings, args.place, hosts=hosts, timeout_s=args.timeout)
    return {
        "benchmark": "auto_compression",
        "what": args.what,
        "machine": machine(),
        "place": str(args.place),
        "quiet": quiet.as_dict() | {"words": str(quiet)},
        "changes": changes,
        **settings,
        **result,
    }


def report(result: dict[str, Any]) -> str:
    about = result["machine"]
    lines = [
        f"compression=auto, allow={result['allow']}, {result['model']}, {result['place']}",
        f"{about['processor']}, {about['cores']} cores, Linux {about['kernel']}, torch {about['torch']}",
        "",
    ]
    lines += _followed(result) if result["what"] == "follow" else _compared(result)
    lines += ["", result["quiet"]["words"]]
    lines += [f"WARNING: {warning}" for warning in result["quiet"]["warnings"]]
    return "\n".join(lines)


def _followed(result: dict[str, Any]) -> list[str]:
    begin = result["changes"][0][0]
    ends = [when for when, _ in result["changes"][1:]] + [float("inf")]
    rows = []
    for (when, rate), end in zip(result["changes"], ends, strict=True):
        here = [seconds for at, seconds in result["steps"] if when <= at < end]
        last = here[len(here) * 2 // 3 :]
        rows.append([rate, str(len(here)), format_time(statistics.median(last)) if last else ""])
    lines = [table(["links", "steps", "step, in the last third"], rows), ""]
    events = [(at, f"step {step}: {reason}") for at, step, reason in result["decisions"]]
    events += [(when, f"links of {rate}") for when, rate in result["changes"]]
    return lines + [f"{at - begin:6.1f} s  {text}" for at, text in sorted(events)]


def _compared(result: dict[str, Any]) -> list[str]:
    ratios = [auto / exact for exact, auto in zip(result["exact_s"], result["auto_s"], strict=True)]
    mean, half = interval(ratios)
    rows = [
        ["exact", format_time(statistics.median(result["exact_s"]))],
        ["auto", format_time(statistics.median(result["auto_s"]))],
    ]
    lines = [
        table(["gradients", "step, median of blocks"], rows),
        "",
        f"auto / exact, {len(ratios)} pairs, changes included: {mean:.3f},"
        f" 95 % from {mean - half:.3f} to {mean + half:.3f}",
    ]
    return lines + [f"step {step}: {reason}" for _, step, reason in result["decisions"]]


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.as_rank:
        from benchmarks.compression.auto_compression_rank import run_rank

        run_rank(args.as_rank)
        return 0
    return session.command_line(args, measure, report)


if __name__ == "__main__":
    sys.exit(main())
