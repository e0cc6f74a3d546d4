"""What an all-reduce should take by the α-β-γ model: the reasons behind the table of algorithms, as numbers.

A message costs α, a byte sent β, a byte added γ; α and β differ inside a host and between hosts. The terms of
each algorithm are those of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH" (IJHPCA 19(1), 2005, section 4), and, for the least that must be sent, of Patarasuk and Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations" (JPDC 69(2), 2009, section 3). Two things are added here: ranks that
share a host share its link, and ranks that share its cores work one after another.

The model chooses nothing: the table (csrc/collective/algorithm_table.h) does. tests/unit/test_costs.py holds the
table against the model; ``python -m ringdp bench --explain`` prints both.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from ringdp.errors import InvalidArgumentError
from ringdp.text import number_of_ranks

HALF_TYPES = ("float16", "bfloat16")
DIRECT_RANKS = 16  # of AlgorithmTable (csrc/collective/algorithm_table.h), as it is built in


@dataclasses.dataclass(frozen=True, kw_only=True)
class AlgorithmCosts:
    """The constants of a machine; a file of RINGDP_TUNING may bring others, python -m benchmarks tune measures them.

    Those built in were measured on a virtual machine with 2 cores (AMD EPYC) and, between hosts, a link of 1 Gbit.

    Attributes:
        alpha_local_us: microseconds a message takes within a host, however short.
        alpha_remote_us: the same between hosts.
        beta_local_ns_per_byte: nanoseconds per byte sent within a host.
        beta_remote_ns_per_byte: nanoseconds per byte of a host's link, in one direction.
        gamma_ns_per_byte: nanoseconds to add a byte.
    """

    alpha_local_us: float = 1.7
    alpha_remote_us: float = 40.0
    beta_local_ns_per_byte: float = 0.14
    beta_remote_ns_per_byte: float = 8.4
    gamma_ns_per_byte: float = 0.022


@dataclasses.dataclass(frozen=True)
class HostLayout:
    """Where the ranks of a group run, numbered host by host.

    Attributes:
        per_host: the number of ranks on each host.
        cores: cores of each host; more ranks than that work in turns.
    """

    per_host: tuple[int, ...]
    cores: int

    def __post_init__(self) -> None:
        if not self.per_host or min(self.per_host) < 1 or self.cores < 1:
            raise InvalidArgumentError(f"every host needs a rank and a core, not {self.per_host} and {self.cores}")

    @classmethod
    def spread(cls, *, ranks: int, hosts: int, cores: int) -> HostLayout:
        """``ranks`` over ``hosts`` as evenly as it goes, the first ones having one more."""
        if not 1 <= hosts <= ranks:
            raise InvalidArgumentError(f"{number_of_ranks(ranks)} cannot be on {hosts} hosts: each host needs one")
        least, more = divmod(ranks, hosts)
        return cls(tuple(least + (host < more) for host in range(hosts)), cores)

    @property
    def ranks(self) -> int:
        return sum(self.per_host)

    @property
    def hosts(self) -> list[int]:
        """The number of each rank's host, ``[ranks]``, as the table takes it."""
        return [host for host, count in enumerate(self.per_host) for _ in range(count)]

    @property
    def crowd(self) -> float:
        """How many ranks share a core of the fullest host, at least 1."""
        return max(1.0, max(self.per_host) / self.cores)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What an algorithm does to reduce a buffer: the model's terms.

    Attributes:
        local_messages, remote_messages: messages that follow one another on the slowest rank.
        local_bytes: bytes that the busiest rank sends within its host.
        link_bytes: bytes that leave the busiest host.
        awaited_local_bytes, awaited_link_bytes: bytes that others must have sent before, of a tree's way to the root.
        added_bytes: bytes that the busiest rank adds.
        rank_bytes: bytes that the busiest rank sends in all.
    """

    local_messages: float = 0.0
    remote_messages: float = 0.0
    local_bytes: float = 0.0
    link_bytes: float = 0.0
    awaited_local_bytes: float = 0.0
    awaited_link_bytes: float = 0.0
    added_bytes: float = 0.0
    rank_bytes: float = 0.0

    def seconds(self, costs: AlgorithmCosts, place: HostLayout) -> float:
        """The model's time: everything one after another."""
        inside = self.local_messages * costs.alpha_local_us * 1e-6
        local_bytes, link_bytes = self.local_bytes + self.awaited_local_bytes, self.link_bytes + self.awaited_link_bytes
        inside += (local_bytes * costs.beta_local_ns_per_byte + self.added_bytes * costs.gamma_ns_per_byte) * 1e-9
        between = self.remote_messages * costs.alpha_remote_us * 1e-6
        between += link_bytes * costs.beta_remote_ns_per_byte * 1e-9
        return inside * place.crowd + between


def work(algorithm: str, place: HostLayout, size_bytes: int, *, dtype: str = "float32") -> Work:
    """The terms of an all-reduce of ``size_bytes`` by the algorithm of that name in that place.

    Raises:
        InvalidArgumentError: the model does not know the algorithm.
    """
    if algorithm not in ALGORITHMS:
        raise InvalidArgumentError(f"the model knows {', '.join(ALGORITHMS)}, not {algorithm}")
    if place.ranks == 1:
        return Work()
    found = ALGORITHMS[algorithm](place, float(size_bytes))
    if algorithm == "two_level" and dtype in HALF_TYPES:  # between hosts in pairs, which takes two steps
        found = dataclasses.replace(found, remote_messages=2)
    return found


def candidates(place: HostLayout, dtype: str) -> Sequence[str]:
    """The algorithms that may reduce this type in this place; a fold or a tree, as the built-in table has it."""
    direct, half = place.ranks <= DIRECT_RANKS, dtype in HALF_TYPES
    several, most = len(place.per_host) > 1, max(place.per_host)
    found = ["fold" if direct else "tree", "pairwise" if half else "ring"]
    if direct and several and most == 1 and not half:
        found.append("pairwise")
    if min(place.per_host) == most and (not half or len(place.per_host) > DIRECT_RANKS):
        found.append("halving")
    if several and most > 1:
        found.append("two_level")
    return found


def _fold(place: HostLayout, size: float) -> Work:
    ranks, most = place.ranks, max(place.per_host)
    outside = max(count * (ranks - count) for count in place.per_host)
    return Work(
        local_messages=most - 1,
        remote_messages=1 if len(place.per_host) > 1 else 0,  # to different hosts: on the way at the same time
        local_bytes=(most - 1) * size,
        link_bytes=outside * size,
        added_bytes=(ranks - 1) * size,
        rank_bytes=(ranks - 1) * size,
    )


def _ring(place: HostLayout, size: float) -> Work:
    ranks, hosts = place.ranks, len(place.per_host)
    steps, sent = 2 * (ranks - 1), 2 * (ranks - 1) / ranks * size
    inside = max(place.per_host) > 1
    return Work(
        local_messages=steps if inside and hosts == 1 else 0,
        remote_messages=steps if hosts > 1 else 0,  # in each step some message crosses
        local_bytes=sent if inside else 0.0,
        link_bytes=sent if hosts > 1 else 0.0,  # one neighbour of each host is on another
        added_bytes=sent / 2,
        rank_bytes=sent,
    )


def _pairwise(place: HostLayout, size: float) -> Work:
    ranks, most = place.ranks, max(place.per_host)
    chunk = size / ranks
    outside = max(count * (ranks - count) for count in place.per_host)
    return Work(
        local_messages=2 * (most - 1),
        remote_messages=2 if len(place.per_host) > 1 else 0,
        local_bytes=2 * (most - 1) * chunk,
        link_bytes=2 * outside * chunk,
        added_bytes=(ranks - 1) * chunk,
        rank_bytes=2 * (ranks - 1) * chunk,
    )


def _two_level(place: HostLayout, size: float) -> Work:
    hosts, most = len(place.per_host), max(place.per_host)
    within, across = (most - 1) / most * size, 2 * (hosts - 1) / hosts * size
    return Work(
        local_messages=2 * (most - 1),
        remote_messages=2 * (hosts - 1),
        local_bytes=2 * within,
        link_bytes=across,
        added_bytes=within + across / 2 / min(place.per_host),
        rank_bytes=2 * within + across / min(place.per_host),
    )


def _halving(place: HostLayout, size: float) -> Work:
    """Recursive halving and doubling, inside hosts with as many ranks each, then between them."""
    of_hosts, places = len(place.per_host), max(place.per_host)
    within = 2 * (places - 1) / places * size
    across = 2 * (of_hosts - 1) / of_hosts * size / places  # of each rank
    return Work(
        local_messages=2 * math.ceil(math.log2(places)),
        remote_messages=2 * math.ceil(math.log2(of_hosts)),
        local_bytes=within,
        link_bytes=places * across,
        added_bytes=(within + across) / 2,
        rank_bytes=within + across,
    )


def _tree(place: HostLayout, size: float) -> Work:
    """Rank 0 is the root, which sends to each of its children; the awaited bytes are those of the way up."""
    ranks, hosts = place.ranks, place.hosts
    edges = [(rank & (rank - 1), rank) for rank in range(1, ranks)]  # parent, child
    leaving = [0] * len(place.per_host)
    path = [(0, 0)] * ranks  # of each rank: edges between hosts and within, on the way to the root
    for parent, child in edges:
        crosses = hosts[parent] != hosts[child]
        path[child] = (path[parent][0] + crosses, path[parent][1] + (not crosses))
        for end in (parent, child):
            leaving[hosts[end]] += crosses
    remote, local = max(path)
    local = max(local, max(steps for _, steps in path) - remote)
    children = [hosts[child] != hosts[0] for parent, child in edges if parent == 0]
    sent_local, link = children.count(False) * size, max(leaving) * size
    return Work(
        local_messages=2 * local,
        remote_messages=2 * remote,
        local_bytes=sent_local,
        link_bytes=link,
        awaited_local_bytes=max(0.0, 2 * local * size - sent_local),
        awaited_link_bytes=max(0.0, 2 * remote * size - link),
        added_bytes=len(children) * size,
        rank_bytes=len(children) * size,
    )


ALGORITHMS: Mapping[str, Callable[[HostLayout, float], Work]] = {
    "fold": _fold,
    "ring": _ring,
    "pairwise": _pairwise,
    "two_level": _two_level,
    "tree": _tree,
    "halving": _halving,
}
