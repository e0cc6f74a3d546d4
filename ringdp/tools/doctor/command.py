"""The command line of ``python -m ringdp doctor``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from ringdp.config import LaunchEnvironment, launch_environment, tuning
from ringdp.errors import InvalidArgumentError, RingError
from ringdp.tools import starting
from ringdp.tools.doctor import registry, report
from ringdp.tools.doctor.finding import Finding
from ringdp.tools.doctor.host import Host, Thresholds
from ringdp.tools.option_types import duration, rate, size

_ABOUT = """\
Check whether ringdp can work here, which devices and networks it would use, and what would make it faster.

  python -m ringdp doctor                              this host: versions, cores, memory, network, limits, clock
  python -m ringdp doctor -H node1:2,node2:2           each host, and all links: which ranks reach which, how fast
  ringrun -n 4 -m ringdp doctor                        the same on the ranks of a launcher; torchrun and srun, too
  python -m ringdp doctor -H a,b --min-bandwidth 900mbit --max-latency 500us
                                                       exit code 1 where a link is worse than that
  python -m ringdp doctor -H a,b,c,d --uplinks tuning.json
                                                       a map of unequal links, for RINGDP_TUNING on all ranks
  python -m ringdp doctor --json                       for programs

Each finding is ok, a note (works, and could be better) or a problem, with what to do. The exit code is 0 without a
problem, 1 with one, 2 for a command line that cannot be used. Nothing is changed on any host.
"""


def add_parsers(commands: Any) -> None:
    """Add the command to the parsers of ``python -m ringdp``."""
    parser = commands.add_parser(
        "doctor",
        help="whether ringdp can work here and between these hosts, and what would make it faster",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    starting.add_options(parser.add_argument_group("ranks"))
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--uplinks", metavar="FILE", help="write the hosts' measured links there, for RINGDP_TUNING")
    parser.add_argument("--timeout", type=_positive, default=30.0, help="seconds that ranks wait for each other (30)")
    parser.add_argument("--seconds", type=_positive, default=15.0, help="about how long all links are measured (15)")
    wanted = parser.add_argument_group("thresholds: what is worse is a problem")
    wanted.add_argument("--min-bandwidth", type=rate, metavar="RATE", help="of each edge: 1gbit, 900mbit or 100MB/s")
    wanted.add_argument("--max-latency", type=duration, metavar="TIME", help="of each round trip: 500us, 2ms")
    wanted.add_argument("--max-clock-offset", type=duration, metavar="TIME", help="between hosts' clocks: 50ms")
    wanted.add_argument("--min-shared-memory", type=size, metavar="SIZE", help="free in /dev/shm: 1g")
    wanted.add_argument("--min-descriptors", type=int, metavar="N", help="that a process may have open: 4096")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit code."""
    if problem := starting.problem(args):
        sys.stderr.write(f"python -m ringdp doctor: {problem}\n")
        return 2
    try:
        place = launch_environment()
        if place is None and starting.wanted(args):
            return starting.launch("doctor", args.argv)
        return _examine(args, place)
    except RingError as error:
        sys.stderr.write(f"python -m ringdp doctor: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def _examine(args: argparse.Namespace, place: LaunchEnvironment | None) -> int:
    thresholds = Thresholds(
        min_bytes_per_s=args.min_bandwidth,
        max_latency_s=args.max_latency,
        max_clock_offset_s=args.max_clock_offset,
        min_shared_memory_bytes=args.min_shared_memory,
        min_descriptors=args.min_descriptors,
    )
    if place is None or place.world_size == 1:
        if args.uplinks is not None:
            _write_uplinks(args.uplinks, {}, "")
        findings = registry.run_checks(host := Host(thresholds=thresholds))
        _print(args, f"ringdp doctor on {host.name}", findings, (host.name,), {"hosts": [host.name], "ranks": 1})
        return report.exit_code(findings)
    from ringdp.tools.doctor.ranks import edges, session

    host = Host(local_ranks=place.local_world_size or 1, ranks=place.world_size, thresholds=thresholds)
    outcome = session.examine(place, host, timeout_s=args.timeout, seconds=args.seconds)
    if not outcome.speaks:
        return 0
    title = f"ringdp doctor, {outcome.ranks} ranks on {', '.join(outcome.hosts)}"
    content: dict[str, Any] = {"hosts": list(outcome.hosts), "ranks": outcome.ranks}
    tables = []
    if outcome.matrix is not None:
        content["matrix"], tables = outcome.matrix.as_dict(), edges.tables(outcome.matrix)
    if args.uplinks is not None:
        _write_uplinks(args.uplinks, {} if outcome.matrix is None else outcome.matrix.uplinks(), title)
    _print(args, title, outcome.findings, outcome.hosts, content, tables)
    return report.exit_code(outcome.findings)


def _write_uplinks(path: str, uplinks: Mapping[str, float], title: str) -> None:
    if len(uplinks) < 2:
        raise InvalidArgumentError(
            "--uplinks: no links between hosts were measured; doctor -H node1,node2 measures them"
        )
    tuning.write_uplinks(path, uplinks, title)
    sys.stderr.write(f"written to {path}: set RINGDP_TUNING to it, or to copies of it, on every rank\n")


def _print(
    args: argparse.Namespace,
    title: str,
    findings: Sequence[Finding],
    hosts: Sequence[str],
    content: dict[str, Any],
    tables: Sequence[str] = (),
) -> None:
    when = datetime.now().astimezone().isoformat(timespec="seconds")
    if args.json:
        text = report.as_json({"time": when, **content}, findings)
    else:
        text = report.text(f"{title}, {when}", findings, tables=tables, hosts=hosts)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return number
