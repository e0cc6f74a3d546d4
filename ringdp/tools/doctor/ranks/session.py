"""The order in which the ranks of a job examine the network between them. Each stage has a deadline."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ringdp.config import LaunchEnvironment, RingConfig, host_identity
from ringdp.errors import HandshakeError, RingError
from ringdp.tools.doctor import registry
from ringdp.tools.doctor.checks import network
from ringdp.tools.doctor.finding import Finding, Verdict, merged, problem
from ringdp.tools.doctor.host import Host
from ringdp.tools.doctor.ranks import collective, comparison, edges
from ringdp.tools.doctor.ranks.edges import Edge, Matrix
from ringdp.tools.doctor.ranks.meeting import Meeting, Missing, describe_ranks
from ringdp.tools.doctor.ranks.probe import CONNECT_S, TOKEN_BYTES, Client, ProbeServer

LONGEST_PROBE_S, SHORTEST_PROBE_S = 0.5, 0.06
MEETING, COMPARISON, LINKS, RING = "ranks", "versions and settings of the ranks", "links between ranks", "ring"
"""The names of the checks between ranks."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A rank's result.

    Attributes:
        speaks: this rank prints it.
        findings: all of them.
        hosts: the names of the hosts that were looked at.
        ranks: in the job.
        matrix: None where the ranks did not measure.
    """

    speaks: bool
    findings: list[Finding]
    hosts: tuple[str, ...]
    ranks: int
    matrix: Matrix | None = None


def examine(place: LaunchEnvironment, host: Host, *, timeout_s: float, seconds: float) -> Outcome:
    """Examine the hosts, then the network between the ranks. Errors of the network are findings, not exceptions.

    Args:
        timeout_s: for which ranks wait for each other at each stage.
        seconds: about how long the measurements of all edges take together.
    """
    own = registry.run_checks(host)
    settings = host.settings()
    try:
        meeting = Meeting.of_launcher(place, timeout_s, epoch=int(host.environ.get("TORCHELASTIC_RESTART_COUNT") or 0))
    except RingError as error:
        return Outcome(True, [*own, _no_store(place, error)], (host.name,), place.world_size)
    session = _Session(meeting, host, settings, own, seconds)
    try:
        return session.run()
    except Missing as error:
        late = f"{error} within {timeout_s:g} s: it died, hangs, or lost its network"
        found = problem(late, "look at the log of that rank", ranks=error.ranks)
        return session.outcome([dataclasses.replace(found, check=MEETING)], gone=error.ranks)
    except (RuntimeError, OSError) as error:  # the store's own: rank 0 has gone
        sentence = f"the job's store at {place.init_method} was lost: {str(error).splitlines()[0]}"
        found = problem(sentence, "look at the log of rank 0, which keeps it")
        return session.outcome([dataclasses.replace(found, check=MEETING)], gone=[0])
    finally:
        meeting.leave()


def _no_store(place: LaunchEnvironment, error: RingError) -> Finding:
    sentence = f"rank {place.rank} of {place.world_size} cannot reach the job's store: {str(error).splitlines()[0]}"
    advice = error.advice if isinstance(error, HandshakeError) and error.advice else "see MASTER_ADDR and MASTER_PORT"
    found = problem(sentence, advice, rank=place.rank, store=place.init_method)
    return dataclasses.replace(found, check=MEETING)


class _Session:
    """One rank's part. All ranks do the same stages in the same order, so that no stage waits for another one."""

    def __init__(
        self, meeting: Meeting, host: Host, settings: RingConfig | str, own: Sequence[Finding], seconds: float
    ) -> None:
        self._meeting, self._host = meeting, host
        self._broken = isinstance(settings, str)
        self._settings = RingConfig() if isinstance(settings, str) else settings
        self._own, self._seconds = own, seconds
        self._cards: dict[int, dict[str, Any]] = {}
        self._found: list[Finding] = []
        self._matrix: Matrix | None = None
        self._address: dict[int, str] = {}  # where each other rank was reached; empty: nowhere

    def run(self) -> Outcome:
        card = {
            "host": self._settings.host_name,
            "host_id": host_identity(self._settings.host_id),
            "likeness": dict(comparison.Likeness.of(self._host).values),
            "findings": [one.as_dict() for one in self._own],
            "broken": self._broken,
            "token": secrets.token_hex(TOKEN_BYTES),
        }
        self._cards, missing = self._meeting.gather_present("card", card)
        if missing:
            return self.outcome([dataclasses.replace(self._who_is_missing(missing), check=MEETING)])
        self._compare()
        if any(card["broken"] for card in self._cards.values()):
            return self.outcome([])  # a problem with its settings is a finding of that rank
        self._matrix = self._measure()
        has_door = self._settings.door is not None
        self._say(LINKS, edges.findings(self._matrix, self._host.thresholds, door=has_door))
        if has_door or all(edge.reached for edge in self._matrix.edges.values() if edge.source > edge.target):
            size_bytes = collective.size_for(self._matrix)
            gathered = self._meeting.all_say(
                "ring",
                collective.measure(size_bytes, self._meeting.timeout_s),
                what="meet over ring",
                timeout_s=2 * self._meeting.timeout_s,
            )
            self._say(RING, collective.findings(gathered, self._matrix, size_bytes))
        self._meeting.barrier("finish")
        return self.outcome([])

    def outcome(self, more: Iterable[Finding], *, gone: Sequence[int] = ()) -> Outcome:
        """The outcome so far. The first rank that came and is still there prints it."""
        by_host: dict[str, list[Finding]] = {}
        for rank, name in self._names().items():
            of_rank = [Finding.from_dict(one) for one in self._cards[rank]["findings"]]
            known = {(one.check, one.sentence) for one in by_host.setdefault(name, [])}
            first_of_host = not known
            # The ranks of a host say the same but for their settings, so only problems of the others are news.
            by_host[name] += [
                one
                for one in of_rank
                if first_of_host or (one.verdict is Verdict.PROBLEM and (one.check, one.sentence) not in known)
            ]
        if not by_host:
            by_host[self._settings.host_name] = list(self._own)
        first = min((rank for rank in self._cards if rank not in gone), default=self._meeting.rank)
        return Outcome(
            self._meeting.rank == first,
            [*merged(by_host), *self._found, *more],
            tuple(by_host),
            self._meeting.world_size,
            self._matrix,
        )

    def _names(self) -> dict[int, str]:
        """The name of the host of each rank that came; hosts of one name (containers) get a number."""
        ids: dict[str, list[str]] = {}
        for _, card in sorted(self._cards.items()):
            of_name = ids.setdefault(card["host"], [])
            if card["host_id"] not in of_name:
                of_name.append(card["host_id"])

        def name(card: Mapping[str, Any]) -> str:
            place = ids[card["host"]].index(card["host_id"])
            return f"{card['host']}#{place + 1}" if len(ids[card["host"]]) > 1 else str(card["host"])

        return {rank: name(card) for rank, card in sorted(self._cards.items())}

    def _say(self, check: str, findings: Iterable[Finding]) -> None:
        self._found += [dataclasses.replace(one, check=check) for one in findings]

    def _who_is_missing(self, missing: Sequence[int]) -> Finding:
        here = ", ".join(f"rank {rank} on {card['host']}" for rank, card in sorted(self._cards.items())[:8])
        sentence = (
            f"{describe_ranks(missing)} of {self._meeting.world_size} did not come to the store within "
            f"{self._meeting.timeout_s:g} s; those that came: {here}"
        )
        remedy = "look whether they were started, and at their logs; --timeout waits longer"
        return problem(sentence, remedy, missing=list(missing), came=sorted(self._cards))

    def _compare(self) -> None:
        likenesses = [self._cards[rank]["likeness"] for rank in range(self._meeting.world_size)]
        self._say(COMPARISON, comparison.findings(likenesses))

    # Edges

    def _measure(self) -> Matrix:
        meeting, cards = self._meeting, self._cards
        ids = list(dict.fromkeys(cards[rank]["host_id"] for rank in range(meeting.world_size)))
        host_of = tuple(ids.index(cards[rank]["host_id"]) for rank in range(meeting.world_size))
        names = tuple(self._names().values())
        token = bytes.fromhex(cards[0]["token"])
        rows = [] if len(ids) == 1 else network.selected(self._settings.iface)
        addresses = [] if isinstance(rows, str) else [row["ip"] for row in rows]
        networks = [] if isinstance(rows, str) else [network.network_of(row) for row in rows]
        if host_of.count(host_of[meeting.rank]) > 1:  # others of this host come over loopback
            addresses = [*addresses, "127.0.0.1"]
        try:
            server = ProbeServer(addresses, token, self._settings.port_range)
        except OSError:
            server = None
        try:
            published = [] if server is None else self._published(server)
            gathered = meeting.all_say("addresses", published, what="listen for the others")
            client = Client(token, networks)
            mine = self._reach(client, gathered, host_of)
            attempts = sum(len(it) for it in gathered)
            meeting.barrier("try the others' addresses", timeout_s=meeting.timeout_s + CONNECT_S * attempts)
            self._time(client, mine, host_of)
            own = [_packed(edge) for edge in mine.values()]
            measured = meeting.all_say("edges", own, what="measure its edges")
            found = [Edge(**{**one, "tried": tuple(one["tried"])}) for of_rank in measured for one in of_rank]
        finally:
            if server is not None:
                server.close()
        return Matrix(host_of, names, _joined(found))

    def _published(self, server: ProbeServer) -> list[str]:
        advertise = self._settings.advertise
        if not advertise:
            return server.addresses
        _, _, port = server.addresses[0].rpartition(":")
        return [advertise if advertise.rpartition(":")[2].isdecimal() else f"{advertise}:{port}", *server.addresses]

    def _reach(self, client: Client, addresses: Sequence[Sequence[str]], host_of: Sequence[int]) -> dict[int, Edge]:
        """To every other rank, each rank in an order of its own, so that not all ask the same one."""
        own, ranks = self._meeting.rank, self._meeting.world_size
        found = {}
        for step in range(1, ranks):
            to = (own + step) % ranks
            reached = client.reach(addresses[to], same_host=host_of[own] == host_of[to])
            self._address[to] = reached.address
            found[to] = Edge(own, to, bool(reached.address), reached.tried)
        return found

    def _time(self, client: Client, mine: dict[int, Edge], host_of: Sequence[int]) -> None:
        """Pair by pair: the lower rank measures, then the higher one, and no other pair uses their hosts' links.

        A rank pulls bytes from the other one, so it measures the edge towards itself. It is in `mine` under the other's
        number, and `_joined` moves it to its edge.
        """
        order = edges.rounds(host_of)
        seconds = max(SHORTEST_PROBE_S, min(LONGEST_PROBE_S, self._seconds / max(1, 2 * len(order))))
        for pairs in order:
            for end in (0, 1):
                for pair in pairs:
                    if pair[end] == self._meeting.rank:
                        other = pair[1 - end]
                        mine[other] = self._edge(client, mine[other], seconds)
                self._meeting.barrier("measure its edges")

    def _edge(self, client: Client, edge: Edge, seconds: float) -> Edge:
        address = self._address[edge.target]
        if not address:
            return edge
        try:
            latency = client.latency(address)
            rate = client.rate_from(address, seconds)
        except OSError as error:
            return dataclasses.replace(
                edge, tried=(*edge.tried, f"{address}: {error.strerror or error} while measuring")
            )
        return dataclasses.replace(
            edge,
            latency_s=latency.median_s,
            clock_offset_s=latency.clock_offset_s,
            clock_error_s=latency.clock_error_s,
            bytes_per_s=rate,
        )


def _packed(edge: Edge) -> dict[str, Any]:
    return dataclasses.asdict(edge)


def _joined(found: Sequence[Edge]) -> Mapping[tuple[int, int], Edge]:
    """Each edge with the rate that its target pulled from its source."""
    by_pair = {(edge.source, edge.target): edge for edge in found}
    return {
        (source, target): dataclasses.replace(edge, bytes_per_s=by_pair[target, source].bytes_per_s)
        for (source, target), edge in sorted(by_pair.items())
    }
