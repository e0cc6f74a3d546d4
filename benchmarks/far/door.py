"""What one open port costs: how fast a relayed pair of hosts is, and how long hosts take to start through a door.

    sudo python -m benchmarks door                             two of three hosts reach each other through it alone
    sudo python -m benchmarks door --start 8 --delay 25ms      eight hosts behind NAT but one start, 50 ms round trip
    sudo python -m benchmarks door --strangers 10000           what so many connections of strangers do to a job

Hosts are network namespaces. Of a relayed pair: one sends to the other; the rate is of payload, beside the rate of the
hosts' lines, and the CPU time is that of the launcher with the door, for each second. Of a start: the seconds from the
beginning of the launcher with the door to the last rank's return from ringdp.init(), and those of them that are left
when the last rank has called it: before that, each host imports torch twice. Of strangers: a third host connects to the
door in every other second (silent ones, nonsense, replayed handshakes, slow ones), on a core of its own, while two
hosts train on another one; steps of these seconds are compared with those of the seconds between. The door shares the
ranks' core, or with --idle-core may use both.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.far import door_rank
from benchmarks.far.long_line import FarHosts, LongLine, parse_rate, parse_time
from benchmarks.lib.hosts import Hosts, namespace, tool
from benchmarks.lib.ranks import Failed, Unavailable, signals_unwind

PORT = 29500
START_S = 30  # at most, until a job trains
ROOT = Path(__file__).resolve().parents[2]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks door", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="1gbit", help="of each host's line, up and down (1gbit)")
    parser.add_argument("--megabytes", type=int, default=1000, help="that a relayed pair moves (1000)")
    parser.add_argument("--tls", action="store_true", help="ringrun --tls")
    parser.add_argument("--start", type=int, default=0, metavar="HOSTS", help="measure the start of so many hosts")
    parser.add_argument("--delay", type=parse_time, default=0.025, help="of a start: from one host to another (25ms)")
    parser.add_argument("--strangers", type=int, default=0, metavar="N", help="measure a job beside N connections")
    parser.add_argument(
        "--idle-core", action="store_true", help="of --strangers: the ranks leave the door's host a core"
    )
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args(argv)
    try:
        parse_rate(args.rate)
    except ValueError as error:
        parser.error(str(error))
    return args


def main(argv: Sequence[str]) -> int:
    args = parse(argv)
    try:
        with signals_unwind():
            found = start(args) if args.start else strangers(args) if args.strangers else relay(args)
    except (Unavailable, Failed) as error:
        print(f"door: {error}", file=sys.stderr)
        return 2 if isinstance(error, Unavailable) else 1
    if args.json is not None:
        args.json.write_text(json.dumps(found))
    return 0


def relay(args: argparse.Namespace) -> dict[str, Any]:
    with Hosts(3, rate=args.rate) as hosts:
        for host, other in ((1, 2), (2, 1)):
            for words in (
                "add pref 100 lookup local",
                "del pref 0",
                f"add pref 10 from {hosts.address(other)} blackhole",
            ):
                tool("ip", "-n", namespace(hosts.name, host), "rule", *words.split())
        [found] = launch(hosts, args, ["relay", str(args.megabytes)])
    line = parse_rate(args.rate) / 8
    share = f", {found['bytes_per_s'] / line:.1%} of the line" if line else ""
    print(
        f"{'TLS' if args.tls else 'plain'}: a relayed pair at {args.rate}:"
        f" {found['bytes_per_s'] / 1e6:.1f} MB/s{share};"
        f" the launcher with the door used {found['door_cores']:.2f} of a core ({found['transports']})"
    )
    return found


def start(args: argparse.Namespace) -> dict[str, Any]:
    line = LongLine(args.delay, behind_nat=tuple(range(1, args.start)))
    with FarHosts(args.start, rate=args.rate, line=line) as hosts:
        all_found = launch(hosts, args, ["start"])
    found = {"seconds": max(it["until"] for it in all_found) - all_found[0]["since"]}
    found["meeting_s"] = found["seconds"] + all_found[0]["since"] - max(it["began"] for it in all_found)
    print(
        f"{args.start} hosts, {2e3 * args.delay:.0f} ms round trip: {found['seconds']:.2f} s from the first launcher to"
        f" the last rank that has met the others; {found['meeting_s']:.2f} s from the last rank's call of ringdp.init()"
    )
    return found


def strangers(args: argparse.Namespace) -> dict[str, Any]:
    if len(os.sched_getaffinity(0)) < 2:
        raise Unavailable("--strangers needs 2 cores")
    core, other = sorted(os.sched_getaffinity(0))[:2]
    seconds = 2 * -(-args.strangers // door_rank.STRANGERS_PER_S)
    with Hosts(3, rate=args.rate) as hosts, tempfile.TemporaryDirectory() as folder:
        secret = secrets.token_hex(32)
        words = ["strangers", f"{hosts.address(0)}:{PORT}", secret, str(seconds + START_S)]
        command = ["taskset", "-c", str(other), sys.executable, "-m", "benchmarks.far.door_rank", *words]
        environ = os.environ | hosts.host_env(2) | {"PYTHONPATH": str(ROOT)}
        with open(Path(folder, "out"), "w+") as out:
            crowd = subprocess.Popen(hosts.command(2, command), env=environ, stdout=out)
            place = ["taskset", "-c", f"{core},{other}" if args.idle_core else str(core)]
            try:
                [found] = launch(hosts, args, ["beside", str(seconds), str(core)], 2, place, secret)
            finally:
                with contextlib.suppress(subprocess.TimeoutExpired):  # it has begun before the job, and ends after it
                    crowd.wait(2 * START_S)
                crowd.kill()
            out.seek(0)
            found |= json.loads(out.read())
    print(
        f"{args.strangers} connections of strangers, {door_rank.STRANGERS_PER_S} in every other second"
        f" ({found['closed']} of {found['connections']} in all were closed before they said anything): steps took"
        f" {found['beside_s'] * 1e3:.2f} ms beside them, else"
        f" {found['alone_s'] * 1e3:.2f} ms: {found['beside_s'] / found['alone_s']:.3f} (by pairs of seconds"
        f" {found['least']:.3f} to {found['most']:.3f}); the launcher with the door used {found['door_cores']:.2f} of a"
        f" core beside them, else {found['door_cores_alone']:.2f}"
    )
    return found


def launch(
    hosts: Hosts,
    args: argparse.Namespace,
    words: Sequence[str],
    ranks: int = 0,
    prefix: Sequence[str] = (),
    key: str = "",
) -> list[dict[str, Any]]:
    """Run door_rank on each of so many hosts (0: all); what the ranks have said."""
    ranks = ranks or hosts.count
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder, "secret")
        secret.touch(0o600)
        secret.write_text(key or secrets.token_hex(32))
        launchers = []
        for host in range(ranks):
            (place := Path(folder, str(host))).mkdir()
            way = ["--door", str(PORT), "--nnodes", str(ranks)] if host == 0 else ["--join", f"h0:{PORT}"]
            common = ["-n", "1", "--secret-file", str(secret), "--console", "all", *(["--tls"] if args.tls else [])]
            program = ["-m", "benchmarks.far.door_rank", *words]
            command = [*prefix, sys.executable, "-m", "ringdp.launch", *way, *common, *program]
            environ = os.environ | hosts.host_env(host) | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
            out = open(place / "out", "w")  # noqa: SIM115  # until the launcher has ended
            launchers.append(
                subprocess.Popen(hosts.command(host, command), cwd=place, env=environ, stdout=out, stderr=out)
            )
        end = time.monotonic() + 300
        codes = [it.wait(max(1.0, end - time.monotonic())) for it in launchers]
        said = [Path(folder, str(host), "out").read_text() for host in range(ranks)]
    if any(codes):
        raise Failed("\n".join(said))
    return [json.loads(line.partition("] ")[2]) for text in said for line in text.splitlines() if '{"' in line]
