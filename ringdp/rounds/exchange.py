"""The exchange of one fragment with the other ranks: asynchronous operations, driven by the communication thread.

Beside the values each rank sends its weight (in its record), and the mean is weighed when both have come: values leave
without a wait.

In an elastic job the wait is a unit. What it began with stays until it counts: this rank's parameters when the fragment
left, the residuals, and of course the global parameters. After a loss the fragment leaves again, with the same values.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringdp.errors import MismatchError, PeerLostError, RingError
from ringdp.job.backend import named
from ringdp.job.byte_collectives import all_gather_single, as_bytes, as_tensor
from ringdp.job.elastic import as_unit, is_elastic
from ringdp.rounds.codes import RoundsCodec, codes_of
from ringdp.rounds.fragments import Fragment


@dataclasses.dataclass(frozen=True)
class Record:
    """The record that a rank sends when a fragment leaves.

    Attributes:
        weight: the weight of its values; 0: they do not count.
        step_s: seconds of its steps; 0: not known.
        not_finite: the piece with an infinity or a NaN; -1: none.
        digest: of the global parameters.
        counts_samples: the weight is of `DiLoCo.did`.
        late: the rank's training had not come (`ringdp.rounds.quorum`).
        norm: of its change, before it was clipped; 0: not known.
    """

    weight: float
    step_s: float = 0.0
    not_finite: int = -1
    digest: int = 0
    counts_samples: bool = False
    late: bool = False
    norm: float = 0.0

    _FORM = "<ddqQ??6xd"

    def encode(self) -> bytes:
        return struct.pack(self._FORM, *dataclasses.astuple(self))

    @classmethod
    def decode(cls, data: bytes) -> Record:
        return cls(*struct.unpack(cls._FORM, data))


_RECORD_BYTES = struct.calcsize(Record._FORM)


@dataclasses.dataclass(frozen=True)
class Arrival:
    """The result of a fragment's exchange; the same on all ranks.

    Attributes:
        usable: the fragment's buffer has the mean; otherwise no rank had finite values.
        of_parameters: the mean is of parameters, not of changes.
        weight: of a rank, on average.
        records: by rank.
        rank: this one's number among them.
    """

    usable: bool
    of_parameters: bool
    weight: float
    records: tuple[Record, ...]
    rank: int = 0

    @property
    def left_out(self) -> dict[int, int]:
        """The piece that was not finite, by rank."""
        return {rank: one.not_finite for rank, one in enumerate(self.records) if one.not_finite >= 0}


@dataclasses.dataclass(frozen=True)
class Beside:
    """What is exchanged with a fragment, and counts with it: `average` writes into these tensors."""

    writes: Sequence[Tensor]
    average: Callable[[], None]


class Flight:
    """A fragment that has left. One thread waits for it; the one that completes operations writes the stamp.

    Attributes:
        name: of the operations; ranks compare it.
        mine: this rank's record.
        unit: a usual weight, the same number on all ranks.
        exact: not as codes.
        averages: the mean may be one of parameters.
        of_parameters: the buffer has parameters, not changes.
        kept: flat, [numel]: this rank's parameters when it left; None where it leaves once.
        fill: gives the buffer the values with which it left; None: they are what `kept` says.
        most: the norm to which ranks' changes are clipped.
        factor: by which this rank's change is multiplied: below 1 where it is clipped.
        view: in which it has left; 0: it has not yet.
        ranks, rank: their number there, and this one's.
    """

    def __init__(
        self,
        name: str,
        mine: Record,
        *,
        unit: float,
        exact: bool,
        averages: bool,
        fill: Callable[[], None] | None = None,
    ) -> None:
        self.name, self.mine, self.unit, self.exact, self.averages = name, mine, unit, exact, averages
        self.fill = fill
        self.most, self.factor = math.inf, 1.0
        self.of_parameters = averages
        self.kept: Tensor | None = None
        self.view, self.ranks, self.rank = 0, 1, 0
        self.gathered: Tensor | None = None  # uint8 [ranks * record]
        self.records_came_s: float | None = None  # when all ranks' records had come
        self.works: list[dist.Work] = []
        self.coded = False  # it has left as codes
        self.arrival: Arrival | None = None

    def stamp(self, gathered: torch.futures.Future[Any] | None = None) -> None:
        if gathered is not None:
            try:
                gathered.value()
            except Exception:  # who waits for it has the error
                return
        self.records_came_s = time.monotonic()

    def records(self) -> tuple[Record, ...]:
        """All ranks', once they have come, which the stamp says."""
        if self.arrival is not None:
            return self.arrival.records
        assert self.gathered is not None
        data = as_bytes(self.gathered)
        return tuple(Record.decode(data[at : at + _RECORD_BYTES]) for at in range(0, len(data), _RECORD_BYTES))


class FragmentExchange:
    """Averages one fragment over the ranks. One thread.

    Args:
        fragment: whose buffer has the values when it leaves, and their mean when it has arrived.
        group: of the ranks, for nothing else, or of an elastic job; None for one rank alone.
        codec: encodes changes; None: they are sent exactly.
        clip: changes whose norm is beyond so many times `median` are clipped to that; None: none is.

    Attributes:
        median: of the ranks' norms in the last exchange of changes; 0: there was none.
    """

    def __init__(
        self,
        fragment: Fragment,
        group: dist.ProcessGroup | None,
        codec: RoundsCodec | None,
        clip: float | None = None,
    ) -> None:
        self.fragment, self.group = fragment, group
        self._clip, self.median = clip, 0.0
        self.codes = None if codec is None else codes_of(codec, fragment, group)
        self._elastic = group is not None and is_elastic(group)

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else self.group.size()

    def sent_bytes(self, *, exact: bool) -> float:
        """Of values, by this rank, each time it leaves: 2 (n - 1) / n of them, or what their codes take."""
        if self.codes is None or exact:
            whole = self.fragment.total.numel() * self.fragment.total.itemsize
            return 2 * (self.ranks - 1) / self.ranks * whole
        return self.codes.sent_bytes()

    def of_parameters(self, *, exact: bool, averages: bool) -> bool:
        """What the buffer has to have when it leaves. Differences lose bits that parameters have; codes are for
        differences."""
        return exact or (averages and (self.codes is None or self.ranks == 1))

    def start(self, flight: Flight) -> None:
        """Send the buffer, which has what `of_parameters` says, or what the flight's `fill` gives it, now and when it
        leaves again.

        In the first unit of an elastic group's view it leaves when it is waited for: other ranks are there by then.
        """
        from ringdp import _C

        flight.of_parameters = self.of_parameters(exact=flight.exact, averages=flight.averages)
        if flight.fill is not None:
            flight.fill()
        if not flight.exact and self._clip is not None and self.median > 0:
            flight.most = self._clip * self.median
            norm = flight.mine.norm
            flight.factor = min(1.0, flight.most / norm) if norm > 0 else 1.0
        self._clip_buffer(flight)
        self._follow_members()
        if self.ranks == 1:
            flight.arrival = self._alone(flight)
            flight.view = 0 if self.group is None else _C.view_of(self.group)
            flight.stamp()
        elif not self._elastic:
            self._send(flight)
        else:
            assert self.group is not None
            if flight.fill is None:
                self.fragment.read(kept := torch.empty_like(self.fragment.total))
                flight.kept = kept
            if not _C.before_first_unit(self.group):
                try:
                    _C.before_unit(lambda: self._send(flight))
                except PeerLostError:  # as if it had not left
                    flight.view = 0

    def wait(self, flight: Flight, beside: Beside | None = None) -> Arrival:
        """Wait until the mean is in the buffer.

        Raises:
            PeerLostError, RingTimeoutError, MismatchError: as every operation. What is kept of earlier rounds stays.
        """
        if flight.arrival is None:
            assert self.group is not None
            writes = () if beside is None else beside.writes
            flight.arrival = as_unit(self.group, flight.name, lambda: self._arrive(flight, beside), writes=writes)
            if self.codes is not None and flight.coded:
                self.codes.commit(usable=flight.arrival.usable, counts=flight.mine.weight > 0)
            norms = [one.norm for one in flight.arrival.records if one.weight > 0 and not flight.exact]
            self.median = statistics.median(norms) if norms else self.median
            flight.works, flight.kept, flight.fill = [], None, None
        return flight.arrival

    def _clip_buffer(self, flight: Flight) -> None:
        if flight.factor == 1:
            return
        buffer, total = self.fragment.buffer, self.fragment.total
        if flight.of_parameters:
            buffer.copy_(torch.lerp(total, buffer, flight.factor))
        else:
            buffer.mul_(flight.factor)

    def _follow_members(self) -> None:
        if self.codes is not None:
            self.codes.follow_members()

    def _arrive(self, flight: Flight, beside: Beside | None) -> Arrival:
        from ringdp import _C

        group = self.group
        assert group is not None
        if self._elastic and flight.view != _C.view_of(group):
            self._send_again(flight)
        for work in flight.works:
            work.wait()
        arrival = self._arrived(flight)
        if beside is not None:
            beside.average()
        return arrival

    def _send_again(self, flight: Flight) -> None:
        """To the present members, what it left with."""
        for work in flight.works:
            with contextlib.suppress(RingError):  # of members that were lost; it may still use the buffer
                work.wait()
        if self.codes is not None:
            self.codes.commit(usable=False, counts=False)
        self._follow_members()
        flight.of_parameters = self.of_parameters(exact=flight.exact, averages=flight.averages)
        self._fill_again(flight)
        self._clip_buffer(flight)
        self._send(flight)

    def _fill_again(self, flight: Flight) -> None:
        fragment, kept = self.fragment, flight.kept
        if flight.fill is not None:
            flight.fill()
        elif flight.mine.not_finite >= 0:
            fragment.buffer.zero_()
        elif flight.of_parameters:
            assert kept is not None
            fragment.buffer.copy_(kept)
        else:
            assert kept is not None
            torch.sub(fragment.total, kept, out=fragment.buffer)

    def _alone(self, flight: Flight) -> Arrival:
        usable = flight.mine.weight > 0
        if usable and self.codes is not None:
            for piece in self.fragment.pieces:
                owed = self.codes.owed(piece)  # what codes have left out when there were more ranks
                if owed is not None:
                    piece.of(self.fragment.buffer).add_(owed, alpha=-1 if flight.of_parameters else 1)
                    self.codes.residuals.drop(piece.name)
        return Arrival(usable, flight.of_parameters, flight.mine.weight if usable else 1.0, (flight.mine,))

    def _send(self, flight: Flight) -> None:
        from ringdp import _C

        group, mine, buffer = self.group, flight.mine, self.fragment.buffer
        assert group is not None
        flight.works, flight.coded, flight.records_came_s = [], False, None
        flight.view = _C.view_of(group) if self._elastic else 1
        flight.ranks, flight.rank = self.ranks, group.rank()
        if flight.ranks == 1:
            return
        record = as_tensor(mine.encode()).to(buffer.device)
        flight.gathered = record.new_empty(flight.ranks * _RECORD_BYTES)
        with named(flight.name):
            work = all_gather_single(flight.gathered, record, group=group, async_op=True)
            work.get_future().add_done_callback(flight.stamp)
            flight.works.append(work)
        weight = mine.weight / flight.unit
        with named(flight.name, bulk=True):
            if self.codes is not None and not flight.exact:
                flight.works.append(self.codes.send(weight))
                flight.coded = True
            else:
                if weight != 1:
                    buffer.mul_(weight)
                work = dist.all_reduce(buffer, group=group, async_op=True)
                assert work is not None
                flight.works.append(work)

    def _arrived(self, flight: Flight) -> Arrival:
        if flight.ranks == 1:
            return self._alone(flight)
        records = flight.records()
        _require_same(flight, records)
        weights = [one.weight if one.weight > 0 else 0.0 for one in records]
        counted = [one for one in weights if one > 0]
        usable = bool(counted)
        if self.codes is not None and flight.coded:
            usable = usable and self.codes.mean([one / flight.unit for one in weights])
        elif usable:
            self.fragment.buffer.div_(sum(counted) / flight.unit)
        usual = sum(counted) / len(counted) if counted else 1.0
        return Arrival(usable, flight.of_parameters, usual, records, flight.rank)


def _require_same(flight: Flight, records: Sequence[Record]) -> None:
    """Raises MismatchError."""
    me, name = flight.rank, flight.name
    for rank, other in enumerate(records):
        if other.digest != records[me].digest:
            raise MismatchError(
                f"{name}: the global parameters differ on ranks {me} and {rank} (hashes"
                f" {records[me].digest:016x} and {other.digest:016x}): a rank's memory was changed, or its outer"
                " optimizer rounds differently on another processor",
                rank=me,
                peer=rank,
            )
        if other.counts_samples != records[me].counts_samples and not (other.late or records[me].late):
            counting, silent = (rank, me) if other.counts_samples else (me, rank)
            raise MismatchError(
                f"{name}: rank {counting} has called did() and rank {silent} has not: call did() on all ranks"
                " before each step, or on none",
                rank=me,
                peer=rank,
            )
