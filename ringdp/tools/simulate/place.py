"""The hosts of a simulation and their links: as arguments describe them, or as ``doctor --json`` has measured them."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ringdp.costs import HostLayout
from ringdp.errors import InvalidArgumentError, SystemResourceError
from ringdp.tools import algorithm_table
from ringdp.tools.doctor import report

MOST_RANKS = 100_000


@dataclasses.dataclass(frozen=True)
class SimulatedHost:
    """Attributes:
    ranks: on it.
    up_bytes_per_s, down_bytes_per_s: of its link, out and in.
    name: for people.
    site: its number; hosts of two sites share their sites' lines.
    """

    ranks: int
    up_bytes_per_s: float
    down_bytes_per_s: float
    name: str
    site: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkCosts:
    """What a rank's thread spends, in microseconds and nanoseconds a byte.

    Those built in were measured on a virtual machine with 2 cores (AMD EPYC); docs/lab/simulation.md says how.

    Attributes:
        message_between_hosts_us: of a message, at each end.
        message_within_host_us: the same through shared memory.
        copy_between_hosts_ns: of a byte, to the kernel or from it.
        copy_within_host_ns: of a byte, into shared memory.
        add_ns: of a byte that is added.
        encode_ns, decode_ns: of a byte of float32, before encoding and after decoding.
    """

    message_between_hosts_us: float = 6.0
    message_within_host_us: float = 0.85
    copy_between_hosts_ns: float = 0.25
    copy_within_host_ns: float = 0.14
    add_ns: float = 0.022
    encode_ns: float = 0.25
    decode_ns: float = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where the simulated job runs.

    Attributes:
        hosts: ranks are numbered host by host.
        round_trip_s: between hosts of a site.
        cores: of each host.
        between: bytes a second and the round trip of each site's line to the others; None: one site.
        memory_bytes_per_s: of each host, for the copies between its ranks; 0: it does not limit.
        wire_bytes_per_byte: with the headers of packets: 1.05 with 1500 bytes each.
        burst_bytes: that pass a host's link at once after a pause: where tc's token buckets are the links.
        costs: of the ranks' work.
        one_machine: the hosts are namespaces of one machine, whose cores they share.
    """

    hosts: tuple[SimulatedHost, ...]
    round_trip_s: float
    cores: int
    between: tuple[float, float] | None = None
    memory_bytes_per_s: float = 0.0
    wire_bytes_per_byte: float = 1.05
    burst_bytes: float = 0.0
    costs: WorkCosts = WorkCosts()
    one_machine: bool = False

    def __post_init__(self) -> None:
        if not self.hosts or self.cores < 1:
            raise InvalidArgumentError("a simulation needs a host, with a core")
        if self.ranks > MOST_RANKS:
            raise InvalidArgumentError(f"{self.ranks} ranks are more than {MOST_RANKS:,}, the most that are simulated")

    @property
    def ranks(self) -> int:
        return sum(host.ranks for host in self.hosts)

    @property
    def ranks_of_hosts(self) -> HostLayout:
        """As the table of algorithms takes them."""
        return HostLayout(tuple(host.ranks for host in self.hosts), self.cores)

    @property
    def longest_round_trip_s(self) -> float:
        return max(self.round_trip_s, self.between[1]) if self.between else self.round_trip_s

    @property
    def layout(self) -> str:
        """One of `ringdp.config.tuning.LAYOUTS`."""
        return algorithm_table.layout(self.ranks_of_hosts)

    def rows(self) -> list[tuple[int, int, float, float]]:
        """As ``_C.simulate`` takes hosts."""
        return [(it.ranks, it.site, it.up_bytes_per_s, it.down_bytes_per_s) for it in self.hosts]

    def settings(self) -> dict[str, Any]:
        """As ``_C.simulate`` takes them: seconds, and seconds a byte."""
        found: dict[str, Any] = {
            "cores": self.cores,
            "one_machine": self.one_machine,
            "memory_bytes_per_s": self.memory_bytes_per_s,
            "latency_s": self.round_trip_s / 2,
            "latency_between_sites_s": self.longest_round_trip_s / 2,
            "site_bytes_per_s": self.between[0] if self.between else 1.0,
            "wire_bytes_per_byte": self.wire_bytes_per_byte,
            "burst_bytes": self.burst_bytes,
        }
        for name, value in dataclasses.asdict(self.costs).items():
            stem, unit = name.rsplit("_", 1)
            found[f"{stem}_s"] = value * {"us": 1e-6, "ns": 1e-9}[unit]
        return found


def alike(count: int, per_host: int, bytes_per_s: float) -> list[SimulatedHost]:
    """So many hosts with the same link, ``host0`` and on."""
    return [SimulatedHost(per_host, bytes_per_s, bytes_per_s, f"host{number}") for number in range(count)]


def slowed(hosts: Sequence[SimulatedHost], shares: Mapping[str, float]) -> list[SimulatedHost]:
    """Those hosts, of which some have a share of their link only.

    Raises:
        InvalidArgumentError: there is no host of that name.
    """
    names = {host.name for host in hosts}
    for name in shares:
        if name not in names:
            raise InvalidArgumentError(f"--slow {name}: the hosts are {hosts[0].name} to {hosts[-1].name}")
    return [
        dataclasses.replace(
            host,
            up_bytes_per_s=host.up_bytes_per_s * shares.get(host.name, 1.0),
            down_bytes_per_s=host.down_bytes_per_s * shares.get(host.name, 1.0),
        )
        for host in hosts
    ]


def at_sites(hosts: Sequence[SimulatedHost], sites: int) -> list[SimulatedHost]:
    """The first hosts at site 0, and so on, as evenly as it goes."""
    if not 1 <= sites <= len(hosts):
        raise InvalidArgumentError(f"--sites must be 1 to {len(hosts)}, the number of hosts, not {sites}")
    return [dataclasses.replace(host, site=number * sites // len(hosts)) for number, host in enumerate(hosts)]


def measured(path: Path) -> tuple[list[SimulatedHost], float]:
    """The hosts of a file of ``doctor --json``, and the median round trip between them, in seconds.

    A host's link is as fast as the fastest edge out of it, and into it: `doctor` measures pairs one after another, each
    over one connection. On one host there are no links to measure.

    Raises:
        SystemResourceError: the file cannot be read.
        InvalidArgumentError: it is not from `doctor`, or without edges between hosts.
    """
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise SystemResourceError(f"{path}: {error.strerror}") from None
    except ValueError:
        raise InvalidArgumentError(f"{path} is not JSON, as python -m ringdp doctor --json prints it") from None
    if not isinstance(content, dict) or content.get("ringdp_doctor") != report.FORMAT:
        raise InvalidArgumentError(f"{path} is not what python -m ringdp doctor -H node1,node2 --json prints")
    matrix = content.get("matrix") or {}
    host_of, names = matrix.get("host_of", []), matrix.get("hosts", [])
    edges = [
        edge
        for edge in matrix.get("edges", [])
        if host_of[edge["source"]] != host_of[edge["target"]] and edge["bytes_per_s"] and edge["latency_s"]
    ]
    if not edges:
        raise InvalidArgumentError(f"{path} has no measured links between hosts: doctor -H node1,node2 measures them")
    up, down = _fastest(edges, host_of, "source"), _fastest(edges, host_of, "target")
    missing = sorted(set(host_of) - (set(up) & set(down)))
    if missing:
        raise InvalidArgumentError(f"{path} has no measured link of {names[host_of.index(missing[0])]}")
    hosts = [
        SimulatedHost(host_of.count(number), up[number], down[number], names[host_of.index(number)])
        for number in sorted(set(host_of))
    ]
    return hosts, statistics.median(edge["latency_s"] for edge in edges)


def _fastest(edges: Sequence[Mapping[str, Any]], host_of: Sequence[int], end: str) -> dict[int, float]:
    rates: dict[int, float] = {}
    for edge in edges:
        host = host_of[edge[end]]
        rates[host] = max(rates.get(host, 0.0), float(edge["bytes_per_s"]))
    return rates


def extended(hosts: Sequence[SimulatedHost], count: int) -> list[SimulatedHost]:
    """The first `count` hosts; those that there are not yet are like the median one."""
    median_up = statistics.median(host.up_bytes_per_s for host in hosts)
    median_down = statistics.median(host.down_bytes_per_s for host in hosts)
    ranks = round(statistics.median(host.ranks for host in hosts))
    more = [SimulatedHost(ranks, median_up, median_down, f"more{number}") for number in range(count - len(hosts))]
    return [*hosts[:count], *more]
