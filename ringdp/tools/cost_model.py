"""What an all-reduce should take by the α-β-γ model: the reasons behind the table of algorithms, as numbers.

A message costs α, a byte sent β, a byte added γ; α and β differ inside a host and between hosts. The terms of
each algorithm are those of Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH" (IJHPCA 19(1), 2005, section 4), and, for the least that must be sent, of Patarasuk and Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations" (JPDC 69(2), 2009, section 3). Two things are added here: ranks that
share a host share its link, and ranks that share its cores work one after another.

The model chooses nothing: the table (csrc/collective/choice.h) does. tests/unit/test_cost_model.py holds the table
against the model; ``python -m ringdp bench --explain`` prints both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from ringdp.errors import InvalidArgumentError

HALF_TYPES = ("float16", "bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """The constants of a machine; a file of RINGDP_TUNING may bring others, benchmarks/tune.py measures them.

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
class Place:
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
    def spread(cls, *, ranks: int, hosts: int, cores: int) -> Place:
        """``ranks`` over ``hosts`` as evenly as it goes, the first ones having one more."""
        if not 1 <= hosts <= ranks:
            raise InvalidArgumentError(f"{ranks} ranks cannot be on {hosts} hosts: each host needs one")
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
        added_bytes: bytes that the busiest rank adds.
        rank_bytes: bytes that the busiest rank sends in all.
    """

    local_messages: float = 0.0
    remote_messages: float = 0.0
    local_bytes: float = 0.0
    link_bytes: float = 0.0
    added_bytes: float = 0.0
    rank_bytes: float = 0.0

    def seconds(self, costs: Costs, place: Place) -> float:
        """The model's time: everything one after another."""
        inside = self.local_messages * costs.alpha_local_us * 1e-6
        inside += (self.local_bytes * costs.beta_local_ns_per_byte + self.added_bytes * costs.gamma_ns_per_byte) * 1e-9
        between = self.remote_messages * costs.alpha_remote_us * 1e-6
        between += self.link_bytes * costs.beta_remote_ns_per_byte * 1e-9
        return inside * place.crowd + between


def work(algorithm: str, place: Place, size_bytes: int, *, dtype: str = "float32") -> Work:
    """The terms of an all-reduce of ``size_bytes`` by the algorithm of that name in that place.

    Raises:
        InvalidArgumentError: the model does not know the algorithm.
    """
    if algorithm not in _ALGORITHMS:
        raise InvalidArgumentError(f"the model knows {', '.join(_ALGORITHMS)}, not {algorithm}")
    if place.ranks == 1:
        return Work()
    found = _ALGORITHMS[algorithm](place, float(size_bytes))
    if algorithm == "two_level" and dtype in HALF_TYPES:  # between hosts in pairs, which takes two steps
        found = dataclasses.replace(found, remote_messages=2)
    return found


def candidates(place: Place, dtype: str) -> Sequence[str]:
    """The algorithms that may reduce this type in this place."""
    found = ["fold", "pairwise" if dtype in HALF_TYPES else "ring"]
    if len(place.per_host) > 1 and max(place.per_host) > 1:
        found.append("two_level")
    return found


def _fold(place: Place, size: float) -> Work:
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


def _ring(place: Place, size: float) -> Work:
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


def _pairwise(place: Place, size: float) -> Work:
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


def _two_level(place: Place, size: float) -> Work:
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


_ALGORITHMS: Mapping[str, Callable[[Place, float], Work]] = {
    "fold": _fold,
    "ring": _ring,
    "pairwise": _pairwise,
    "two_level": _two_level,
}
