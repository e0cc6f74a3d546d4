"""The command line of ``python -m ringdp simulate``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ringdp import _C, config
from ringdp.config.tuning import Tuning
from ringdp.errors import RingError
from ringdp.text import parse_size
from ringdp.tools.bench.command import DTYPES
from ringdp.tools.option_types import duration, rate, size
from ringdp.tools.simulate import outcome, starting, tune
from ringdp.tools.simulate.place import Place, SimulatedHost, WorkCosts, alike, at_sites, extended, measured, slowed

_ABOUT = """\
What an all-reduce would take on machines that are not here: the product's own algorithms over links in numbers, from 2
to 10,000 ranks. No data is moved, and no rank is started.

  python -m ringdp simulate --hosts 1000 --per-host 8 --link 100gbit --latency 10us --size 25m
  python -m ringdp simulate --hosts 16 --link 1gbit --size 1m,25m --compressed int8
  python -m ringdp simulate --hosts 32 --slow host17:0.5            one host's link has half of its rate
  python -m ringdp simulate --hosts 8 --sites 4 --between 1gbit,50ms
  python -m ringdp doctor -H a,b,c,d --json > links.json
  python -m ringdp simulate --links links.json --hosts 8            what would four more hosts bring?
  python -m ringdp simulate --hosts 64 --link 25gbit --tune tuning.json    a table of algorithms for that network

  python -m ringdp simulate --hosts 1000 --per-host 8 --what start    or agreement (after a loss), or commit (of a step)

For each size: the time of each algorithm, the bytes that leave a host, the messages of a rank; which the table chooses,
and what limits it. Where all hosts are alike, one stands for all, at any number of them. docs/how-to/simulate.md says
what is modelled, docs/lab/simulation.md how near it is to measurements.
"""


def add_parsers(commands: Any) -> None:
    """Add the command to the parsers of ``python -m ringdp``."""
    parser = commands.add_parser(
        "simulate",
        help="what an all-reduce would take on hosts that are not here: up to 10,000 ranks, in numbers",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    where = parser.add_argument_group("where")
    where.add_argument("--hosts", type=_count, metavar="N", help="how many (2, or those of --links)")
    where.add_argument("--per-host", type=_count, metavar="N", help="ranks on each (1)")
    where.add_argument("--cores", type=_count, metavar="N", help="of each host (as many as it has ranks)")
    where.add_argument("--link", type=rate, metavar="RATE", help="of each host, in each direction (10gbit)")
    where.add_argument("--latency", type=duration, metavar="TIME", help="round trip between hosts (50us)")
    where.add_argument("--links", type=Path, metavar="FILE", help="hosts as doctor --json measured them")
    where.add_argument("--slow", type=_slow, action="append", default=[], metavar="HOST:SHARE", help="of its link")
    where.add_argument("--sites", type=_count, metavar="N", help="spread the hosts over so many sites")
    where.add_argument("--between", type=_line, metavar="RATE,TIME", help="each site's line, and its round trip")
    where.add_argument("--memory", type=rate, metavar="RATE", help="of each host's memory (it does not limit)")
    where.add_argument("--message-cost", type=duration, metavar="TIME", help="of a message between hosts, at each end")
    what = parser.add_argument_group("what")
    what.add_argument("--what", choices=["all-reduce", *starting.WHAT], default="all-reduce", help="(all-reduce)")
    what.add_argument("--store", type=_count, metavar="N", help="requests a second that it answers (45000)")
    what.add_argument("--size", type=_sizes, default=[parse_size("25m")], help="bytes, comma-separated (25m)")
    what.add_argument("--dtype", default="float32", choices=DTYPES, help="type of the elements (float32)")
    what.add_argument("--algorithm", type=_algorithms, default=[], metavar="NAMES", help="instead of all that can")
    what.add_argument("--compressed", default="", metavar="CODEC", help="also as codes: int8, int4, bfloat16, …")
    what.add_argument("--most-messages", type=_size, default=10**7, metavar="N", help="simulate no more (10000000)")
    parser.add_argument("--tune", type=Path, metavar="FILE", help="write the table for this place, for RINGDP_TUNING")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit code. Errors are printed as one sentence."""
    try:
        if problem := _problem(args):
            sys.stderr.write(f"python -m ringdp simulate: {problem}\n")
            return 2
        if args.compressed:
            _C.codec_bytes(args.compressed, 1)  # raises for a name that no codec has
        tuning = config.RingConfig.from_environment().tuning
        place = described(args, tuning)
        if args.what != "all-reduce":
            return _print_start(args, place)
        if args.tune is not None:
            tuning = _tuned(args, place, tuning)
        found = [
            outcome.compare(
                place,
                size,
                tuning,
                dtype=args.dtype,
                algorithms=args.algorithm,
                codec=args.compressed,
                most_messages=args.most_messages,
            )
            for size in args.size
        ]
        _print(args, place, found)
        return 0 if any(it.best.seconds is not None for it in found) else 1
    except RingError as error:
        sys.stderr.write(f"python -m ringdp simulate: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def _tuned(args: argparse.Namespace, place: Place, tuning: Tuning) -> Tuning:
    """The table for that place, written to the file."""
    found = tune.limits(place, tuning)
    tune.write(args.tune, place, found, "simulated: " + outcome.heading(place, "float32").replace("\n", ", "))
    sys.stderr.write(f"written to {args.tune}: set RINGDP_TUNING to it on every rank\n")
    return dataclasses.replace(
        tuning, limits={**tuning.limits, **{f"{place.layout}.{name}": value for name, value in found.items()}}
    )


def _problem(args: argparse.Namespace) -> str | None:
    """The problem with the command line; None without one."""
    if args.links is not None and (args.link is not None or args.latency is not None or args.per_host is not None):
        return "--links has the hosts' ranks, links and round trips: leave out --per-host, --link and --latency"
    if (args.sites is None) != (args.between is None):
        return "--sites and --between go together: how many, and the line of each"
    if args.compressed and args.dtype != "float32":
        return "--compressed is for float32: leave out --dtype"
    if args.tune is not None and args.what != "all-reduce":
        return "--tune is for all-reduces: leave out --what"
    if any(size % 8 for size in args.size):
        return "a size must be a multiple of 8 bytes"
    return None


def described(args: argparse.Namespace, tuning: Tuning) -> Place:
    """The place that the arguments describe.

    Raises:
        InvalidArgumentError: they name a host that there is not, or the file is not one of `doctor`.
        SystemResourceError: the file cannot be read.
    """
    hosts: list[SimulatedHost]
    if args.links is None:
        hosts = alike(args.hosts or 2, args.per_host or 1, args.link or 1.25e9)
        round_trip_s = 50e-6 if args.latency is None else args.latency
    else:
        hosts, round_trip_s = measured(args.links)
        hosts = extended(hosts, args.hosts or len(hosts))
    hosts = slowed(hosts, dict(args.slow))
    if args.sites is not None:
        hosts = at_sites(hosts, args.sites)
    costs = _costs(tuning.costs)
    if args.message_cost is not None:
        costs = dataclasses.replace(costs, message_between_hosts_us=args.message_cost * 1e6)
    return Place(
        hosts=tuple(hosts),
        round_trip_s=round_trip_s,
        cores=args.cores or max(host.ranks for host in hosts),
        between=args.between,
        memory_bytes_per_s=args.memory or 0.0,
        costs=costs,
    )


def _costs(tuned: Mapping[str, float]) -> WorkCosts:
    """With the constants of a file of RINGDP_TUNING in place of those built in, where both mean the same."""
    costs = WorkCosts()
    if "alpha_local_us" in tuned:
        costs = dataclasses.replace(costs, message_within_host_us=tuned["alpha_local_us"] / 2)
    if "beta_local_ns_per_byte" in tuned:
        costs = dataclasses.replace(costs, copy_within_host_ns=tuned["beta_local_ns_per_byte"])
    if "gamma_ns_per_byte" in tuned:
        costs = dataclasses.replace(costs, add_ns=tuned["gamma_ns_per_byte"])
    return costs


def _print(args: argparse.Namespace, place: Place, found: list[outcome.Comparison]) -> None:
    if args.json:
        content = {
            "ringdp_simulate": outcome.FORMAT,
            "place": dataclasses.asdict(place),
            "dtype": args.dtype,
            "sizes": [outcome.as_dict(place, it) for it in found],
        }
        sys.stdout.write(json.dumps(content, indent=2) + "\n")
        return
    parts = [outcome.heading(place, args.dtype), *(outcome.text(place, it) for it in found)]
    sys.stdout.write("\n\n".join(parts) + "\n")


def _print_start(args: argparse.Namespace, place: Place) -> int:
    requests_per_s = args.store or starting.STORE_REQUESTS_PER_S
    full_mesh_ranks = config.RingConfig.from_environment().full_mesh_ranks
    found = starting.WHAT[args.what](place, starting.costs(place, requests_per_s), full_mesh_ranks)
    shown = starting.text(place, found, requests_per_s)
    if args.json:
        content = {"ringdp_simulate": outcome.FORMAT, "place": dataclasses.asdict(place), args.what: found.numbers}
        shown = json.dumps(content, indent=2)
    sys.stdout.write(shown + "\n")
    return 0


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of 1 or more")
    return int(text)


def _size(text: str) -> int:
    if found := size(text):
        return found
    raise argparse.ArgumentTypeError(f"{text!r} is nothing")


def _sizes(text: str) -> list[int]:
    return [_size(one) for one in text.split(",")]


def _algorithms(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in outcome.ALGORITHMS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(outcome.ALGORITHMS)}")
    return names


def _slow(text: str) -> tuple[str, float]:
    host, _, share = text.rpartition(":")
    try:
        number = float(share)
    except ValueError:
        number = 0.0
    if not host or not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:SHARE: write host17:0.5")
    return host, number


def _line(text: str) -> tuple[float, float]:
    bytes_per_s, comma, round_trip = text.partition(",")
    if not comma:
        raise argparse.ArgumentTypeError(f"{text!r} is not RATE,TIME: write 1gbit,50ms")
    return rate(bytes_per_s), duration(round_trip)
