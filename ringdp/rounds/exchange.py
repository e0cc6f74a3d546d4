"""The exchange of one fragment with the other ranks: asynchronous operations, driven by the communication thread.

Beside the values each rank sends its weight (in its record), and the mean is weighed when both have come: values leave
without a wait.
"""

from __future__ import annotations

import dataclasses
import struct
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ringdp.compression.feedback import feedback_of
from ringdp.compression.partition import owner_offset_of
from ringdp.errors import MismatchError
from ringdp.job.backend import named
from ringdp.job.byte_collectives import all_gather_single, as_bytes, as_tensor
from ringdp.rounds.fragments import Fragment

if TYPE_CHECKING:
    from ringdp import _C


class NativeCodec(Protocol):
    """A compressor that the core has, by its name there, with standard error feedback or none."""

    @property
    def native(self) -> str | None: ...
    @property
    def error_feedback(self) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Record:
    """The record that a rank sends when a fragment leaves.

    Attributes:
        weight: the weight of its values; 0: they do not count.
        step_s: seconds of its steps; 0: not known.
        not_finite: the piece with an infinity or a NaN; -1: none.
        digest: of the global parameters.
        counts_samples: the weight is of `DiLoCo.did`.
    """

    weight: float
    step_s: float = 0.0
    not_finite: int = -1
    digest: int = 0
    counts_samples: bool = False

    _FORM = "<ddqQ?7x"

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
    """

    usable: bool
    of_parameters: bool
    weight: float
    records: tuple[Record, ...]

    @property
    def left_out(self) -> dict[int, int]:
        """The piece that was not finite, by rank."""
        return {rank: one.not_finite for rank, one in enumerate(self.records) if one.not_finite >= 0}


class Flight:
    """A fragment that has left. One thread waits for it; the one that completes operations writes the stamp."""

    def __init__(self, name: str, unit: float, *, exact: bool, of_parameters: bool) -> None:
        self.name, self.unit, self.exact, self.of_parameters = name, unit, exact, of_parameters
        self.gathered: Tensor | None = None  # uint8 [ranks * record]
        self.records_came_s: float | None = None  # when all ranks' records had come
        self.works: list[dist.Work] = []
        self.report: _C.FiniteReport | None = None
        self.sent: Tensor | None = None  # where it is not the buffer itself
        self.arrival: Arrival | None = None

    def stamp(self, _: Any = None) -> None:
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
        group: of the ranks, for nothing else; None for one rank alone.
        codec: encodes changes; None: they are sent exactly.
    """

    def __init__(self, fragment: Fragment, group: dist.ProcessGroup | None, codec: NativeCodec | None) -> None:
        from ringdp import _C

        self.fragment, self.group, self.codec = fragment, group, codec
        self.residuals = _C.Residuals()
        self._feedback = codec is not None and feedback_of(codec.error_feedback) is not None
        self.codes = codec is not None and group is not None

    @property
    def ranks(self) -> int:
        return 1 if self.group is None else self.group.size()

    def sent_bytes(self, *, exact: bool) -> float:
        """Of values, by this rank, each time it leaves: 2 (n - 1) / n of them, or of their code."""
        from ringdp import _C

        native = self.codec.native if self.codec is not None and self.codes and not exact else None
        if native is None:
            whole = self.fragment.total.numel() * self.fragment.total.itemsize
        else:
            whole = sum(_C.codec_bytes(native, piece.count) for piece in self.fragment.pieces)
        return 2 * (self.ranks - 1) / self.ranks * whole

    def start(self, name: str, mine: Record, *, unit: float, exact: bool, of_parameters: bool) -> Flight:
        """Send the buffer.

        Args:
            name: of the operations; ranks compare it.
            unit: a usual weight, the same number on all ranks.
            exact: not as codes.
            of_parameters: the buffer has parameters, not changes.
        """
        flight = Flight(name, unit, exact=exact, of_parameters=of_parameters)
        if self.group is None:
            flight.arrival = self._alone(mine, of_parameters)
            flight.stamp()
            return flight
        buffer = self.fragment.buffer
        if mine.weight != unit:
            buffer.mul_(mine.weight / unit)
        record = as_tensor(mine.encode()).to(buffer.device)
        flight.gathered = record.new_empty(self.ranks * _RECORD_BYTES)
        with named(name):
            work = all_gather_single(flight.gathered, record, group=self.group, async_op=True)
            work.get_future().add_done_callback(flight.stamp)
            flight.works.append(work)
        with named(name, bulk=True):
            if self.codes and not exact:
                flight.works.append(self._send_codes(flight))
            else:
                work = dist.all_reduce(buffer, group=self.group, async_op=True)
                assert work is not None
                flight.works.append(work)
        return flight

    def wait(self, flight: Flight) -> Arrival:
        """Wait until the mean is in the buffer.

        Raises:
            PeerLostError, RingTimeoutError, MismatchError: as every operation. What is kept of earlier rounds stays.
        """
        if flight.arrival is None:
            for work in flight.works:
                work.wait()
            flight.arrival = self._arrived(flight)
            flight.works = []
        return flight.arrival

    def _alone(self, mine: Record, of_parameters: bool) -> Arrival:
        usable = mine.weight > 0
        for piece in self.fragment.pieces if usable else ():  # what codes have left out when there were more ranks
            owed = self.residuals.current(piece.name)
            if owed is not None:
                piece.of(self.fragment.buffer).add_(owed, alpha=-1 if of_parameters else 1)
                self.residuals.drop(piece.name)
        return Arrival(usable, of_parameters, mine.weight if usable else 1.0, (mine,))

    def _send_codes(self, flight: Flight) -> dist.Work:
        from ringdp import _C

        buffer, pieces = self.fragment.buffer, self.fragment.pieces
        assert self.group is not None
        assert self.codec is not None
        assert self.codec.native is not None
        flight.sent = buffer if buffer.dtype == torch.float32 else buffer.float()
        both = [
            self.residuals.write(one.name, one.count, buffer.device) if self._feedback else (None, None)
            for one in pieces
        ]
        work, flight.report = _C.all_reduce_compressed(
            self.group,
            flight.sent,
            [one.begin for one in pieces],
            [one.count for one in pieces],
            [owner_offset_of(one.name) for one in pieces],
            [current for current, _ in both],
            [following for _, following in both],
            self.codec.native,
            1.0,
            self.ranks,
        )
        return work

    def _arrived(self, flight: Flight) -> Arrival:
        records = flight.records()
        self._require_same(flight.name, records)
        buffer, weights = self.fragment.buffer, [one.weight for one in records]
        counted = [one for one in weights if one > 0]
        if flight.sent is not None and flight.sent is not buffer:
            buffer.copy_(flight.sent)
        flight.sent = None
        usable = bool(counted) and (flight.report is None or flight.report.finite)
        if usable:
            total = sum(counted) / flight.unit
            if flight.report is None:
                buffer.div_(total)
            elif total != self.ranks:  # the core has divided by the ranks
                buffer.mul_(self.ranks / total)
        if self.codes and flight.report is not None:
            self.residuals.commit(usable)
        return Arrival(usable, flight.of_parameters, sum(counted) / len(counted) if counted else 1.0, records)

    def _require_same(self, name: str, records: Sequence[Record]) -> None:
        assert self.group is not None
        me = self.group.rank()
        for rank, other in enumerate(records):
            if other.digest != records[me].digest:
                raise MismatchError(
                    f"{name}: the global parameters differ on ranks {me} and {rank} (hashes"
                    f" {records[me].digest:016x} and {other.digest:016x}): a rank's memory was changed, or its outer"
                    " optimizer rounds differently on another processor",
                    rank=me,
                    peer=rank,
                )
            if other.counts_samples != records[me].counts_samples:
                counting, silent = (rank, me) if other.counts_samples else (me, rank)
                raise MismatchError(
                    f"{name}: rank {counting} has called did() and rank {silent} has not: call did() on all ranks"
                    " before each step, or on none",
                    rank=me,
                    peer=rank,
                )
