"""Hosts far apart on one machine: network namespaces, and between them a line with a rate, a delay, losses and a queue.

    python -m benchmarks long_line --rate 100mbit --delay 25ms [--loss 0.1] [--behind-nat 1] -- python train.py
        make the hosts, start the command once per rank with the variables torchrun sets, print what the ranks print
        with the rank before it, remove the hosts; the exit code is 1 when a rank failed

A round trip is twice the delay. long_line.cpp forwards, in user space: no module of the kernel is needed (netem), but
root, iproute2, /dev/net/tun and a C++ compiler. It takes its share of the cores, most where packets are lost, which
then come one by one. The hosts have Linux's usual buffers and the congestion control --congestion: cubic, as most hosts
do, unless this system does not let a namespace have it; then its own, and a line says so.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.hosts import INTERFACE, Hosts, HostsError, namespace, on_host, run_ranks, tool
from benchmarks.lib.ranks import RanksFailed, Unavailable, compile_program, signals_unwind, start, stop_all

SOURCE = Path(__file__).with_name("long_line.cpp")
# What most hosts have; this machine's may be others.
_BUFFERS = ("net.ipv4.tcp_rmem=4096 131072 6291456", "net.ipv4.tcp_wmem=4096 16384 4194304")
_IPV4 = Path("/proc/sys/net/ipv4")
_MOST_HOSTS = "cubic"
_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_UNITS_BIT = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@dataclass(frozen=True)
class LongLine:
    """What lies between any two hosts. `queue_s`: of each host's uplink; what comes when it is full is lost."""

    delay_s: float
    loss_percent: float = 0.0
    queue_s: float = 0.05
    behind_nat: tuple[int, ...] = ()

    def __str__(self) -> str:
        lost = f", {self.loss_percent:g} % lost" if self.loss_percent else ""
        hidden = f", hosts {', '.join(map(str, self.behind_nat))} behind NAT" if self.behind_nat else ""
        return f"{self.delay_s * 1e3:g} ms from one to another{lost}{hidden}"


def parse_time(text: str) -> float:
    """Seconds of `25ms`. Raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", text)
    if found is None:
        raise ValueError(f"{text!r} is not a time such as 25ms")
    return float(found[1]) * _UNITS_S[found[2]]


def parse_rate(text: str) -> float:
    """Bits a second of tc's words; 0 for "none". Raises ValueError."""
    if text == "none":
        return 0.0
    found = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", text.lower())
    if found is None:
        raise ValueError(f"{text!r} is not a rate such as 100mbit")
    return float(found[1]) * _UNITS_BIT[found[2]]


class Forwarder:
    """The process that carries packets between the hosts, for as long as this object is not closed."""

    def __init__(self, line: LongLine, rate: str, device: str, hosts: Sequence[tuple[str, str]]) -> None:
        """`hosts`: their namespaces and addresses. Raises HostsError."""
        if not os.path.exists("/dev/net/tun"):
            raise HostsError("/dev/net/tun is missing: modprobe tun")
        mask = sum(1 << host for host in line.behind_nat)
        numbers = [parse_rate(rate), line.delay_s * 1e6, line.loss_percent, line.queue_s * 1e6, mask]
        words = [str(_compiled()), device, *map(str, numbers), *(f"{space}:{address}" for space, address in hosts)]
        self._process: subprocess.Popen[Any] = start(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline().strip() != "ready":
            assert self._process.stderr is not None
            why = self._process.stderr.read().strip()
            self.close()
            raise HostsError(f"the line cannot be made: {why}")

    def close(self) -> None:
        stop_all([self._process])


def _compiled() -> Path:
    """long_line.cpp as a program, compiled when it has changed."""
    folder = Path(tempfile.gettempdir()) / f"ringdp-long-line-{os.getuid()}"
    program = folder / hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    if not program.exists():
        compile_program([SOURCE], program, "-O2")
    return program


def usual_congestion() -> str:
    """What most hosts have, if a namespace may have it (see tcp(7), tcp_allowed_congestion_control), or this host's."""
    allowed = (_IPV4 / "tcp_allowed_congestion_control").read_text().split()
    own = (_IPV4 / "tcp_congestion_control").read_text().strip()
    if _MOST_HOSTS in (*allowed, own):
        return _MOST_HOSTS
    print(f"long_line: the hosts have {own}, not {_MOST_HOSTS}, which this system keeps from them", file=sys.stderr)
    return own


class FarHosts(Hosts):
    """Hosts with such a line between any two of them, instead of a bridge."""

    def __init__(self, count: int, *, rate: str, line: LongLine, congestion: str | None = None) -> None:
        """Raises HostsError."""
        super().__init__(count, rate=rate)
        self.line, self.congestion = line, congestion or usual_congestion()
        self._forwarder: Forwarder | None = None

    def close(self) -> None:
        if self._forwarder is not None:
            self._forwarder.close()
            self._forwarder = None
        super().close()

    def _make(self) -> None:
        spaces = [namespace(self.name, host) for host in range(self.count)]
        for space in spaces:
            self._write_names(space)
            tool("ip", "netns", "add", space)
        places = [(space, self.address(host)) for host, space in enumerate(spaces)]
        self._forwarder = Forwarder(self.line, self.rate, INTERFACE, places)
        for host, (space, address) in enumerate(places):
            settings = (f"net.ipv4.tcp_congestion_control={self.congestion}", *_BUFFERS)
            tool(*on_host(self.name, host, ["sysctl", "-qw", *settings]))
            tool("ip", "-n", space, "addr", "add", f"{address}/24", "dev", INTERFACE)
            tool("ip", "-n", space, "link", "set", INTERFACE, "mtu", "1500", "txqueuelen", "10000", "up")
            tool("ip", "-n", space, "link", "set", "lo", "up")


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the words of the command after `--`."""
    cut = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks long_line", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words = list(argv[cut + 1 :])
    parser.add_argument("--hosts", type=int, default=2, help="how many (default 2)")
    parser.add_argument("--per-host", type=int, default=1, help="ranks on each host (default 1)")
    parser.add_argument("--rate", default="100mbit", help="of each host's line, up and down (100mbit)")
    parser.add_argument("--delay", type=parse_time, default=0.025, help="from one host to another (25ms)")
    parser.add_argument("--loss", type=float, default=0.0, help="percent of the packets (0)")
    parser.add_argument("--queue", type=parse_time, default=0.05, help="of each host's uplink (50ms)")
    parser.add_argument("--behind-nat", default="", help="hosts that take no connections from outside: 1,2")
    parser.add_argument("--congestion", help="the hosts' congestion control (cubic, where they may have it)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds before everything is ended (300)")
    args = parser.parse_args(argv[:cut])
    if not words:
        parser.error("which command? write it after --")
    try:
        parse_rate(args.rate)
        args.behind_nat = tuple(int(it) for it in args.behind_nat.split(",") if it)
    except ValueError as error:
        parser.error(str(error))
    if not 0 <= args.loss < 100:
        parser.error(f"--loss is a percentage from 0 to below 100, not {args.loss:g}")
    if any(not 0 <= host < args.hosts for host in args.behind_nat):
        parser.error(f"--behind-nat: there are hosts 0 to {args.hosts - 1}")
    return args, words


def main(argv: Sequence[str]) -> int:
    args, words = parse(argv)
    line = LongLine(args.delay, args.loss, args.queue, args.behind_nat)
    try:
        with signals_unwind(), FarHosts(args.hosts, rate=args.rate, line=line, congestion=args.congestion) as hosts:
            run_ranks(hosts, words, per_host=args.per_host, timeout_s=args.timeout)
    except Unavailable as error:
        print(f"long_line: {error}", file=sys.stderr)
        return 2
    except RanksFailed as error:
        print(error, file=sys.stderr)
        return 1
    return 0
