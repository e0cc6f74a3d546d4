"""What a link between two hosts really carries: iperf3's TCP goodput, and the kernel's byte counters."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.lib.hosts import Hosts
from benchmarks.lib.ranks import Unavailable, start, stop_all

PORT = 5201


class NoGoodput(Unavailable):
    """iperf3 did not answer; the message has its words."""


@dataclass(frozen=True)
class Goodput:
    """Payload bytes per second of one TCP stream from one host to another, headers not counted."""

    one_way: float
    both_ways: float  # the slower direction while both are used at once, as a ring uses them


def measure(hosts: Hosts | None, *, seconds: float) -> Goodput | None:
    """Goodput between host 0 and host 1, or over loopback; None where iperf3 is not installed. Raises NoGoodput."""
    if shutil.which("iperf3") is None or (hosts is not None and hosts.count < 2):
        return None
    words = _words(hosts, 0, ["iperf3", "--server", "--port", str(PORT)])
    server = start(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        one = _client(hosts, seconds, [])["end"]["sum_received"]["bits_per_second"] / 8
        end = _client(hosts, seconds, ["--bidir"])["end"]
        both = [end[key]["bits_per_second"] / 8 for key in ("sum_received", "sum_received_bidir_reverse")]
        return Goodput(one_way=one, both_ways=min(both))
    finally:
        stop_all([server])


def _words(hosts: Hosts | None, host: int, words: list[str]) -> list[str]:
    return words if hosts is None else hosts.command(host, words)


def _client(hosts: Hosts | None, seconds: float, options: list[str]) -> dict[str, Any]:
    # The first half second is left out: TCP is still finding its speed.
    server = "127.0.0.1" if hosts is None else hosts.address(0)
    words = ["iperf3", "--client", server, "--port", str(PORT), "--json", "--omit", "0.5"]
    words += ["--time", f"{seconds:.0f}", *options]
    deadline = time.monotonic() + 5.0
    while True:
        done = subprocess.run(
            _words(hosts, 1, words), capture_output=True, text=True, timeout=seconds + 20, check=False
        )
        report: dict[str, Any] = json.loads(done.stdout or "{}")
        if done.returncode == 0 and "sum_received" in report.get("end", {}):
            return report
        if time.monotonic() > deadline:  # the server needs a moment before it listens
            raise NoGoodput(f"iperf3 failed: {report.get('error') or done.stderr.strip()}")
        time.sleep(0.05)


def interface_bytes(interface: str) -> tuple[int, int]:
    """(received, sent) bytes of an interface of this process's own network namespace, headers included."""
    with open("/proc/self/net/dev", encoding="ascii") as file:
        for line in file:
            name, _, numbers = line.partition(":")
            if name.strip() == interface:
                words = numbers.split()
                return int(words[0]), int(words[8])
    raise NoGoodput(f"there is no interface {interface!r} here")
