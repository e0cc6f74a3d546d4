"""Rounds that nobody holds up: they end without the ranks that are late, whose changes join a later one.

A thread on each rank takes its part in all exchanges, whatever the rank's training does. The threads meet: an
all-gather of a few bytes, in which each says whether its training has come to the end of the turn. From what all have
said, all conclude alike: the turn is over when all ranks have come, or `grace` seconds after a quorum of them had. Who
has not come then sends zeros of weight 0, and has the same global parameters as the others.
"""

from __future__ import annotations

import dataclasses
import enum
import logging
import math
import struct
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ringdp.errors import InvalidStateError, MismatchError
from ringdp.job.backend import cut_off, named
from ringdp.job.byte_collectives import all_gather_bytes
from ringdp.job.elastic import as_unit, places
from ringdp.job.threads import end_before_groups, start_thread
from ringdp.rounds.exchange import Flight, FragmentExchange, Record
from ringdp.rounds.fragments import Fragment, digest
from ringdp.rounds.not_finite import log_clipped, log_not_finite
from ringdp.rounds.outer import OuterStep

RECENT = 4  # turns of a fragment, after which a change that was left out does not join any more
_LEAST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5  # between meetings, unless this rank comes
_MOMENT_S = 0.2  # for what the thread is doing when the process ends
_LONGEST_END_S = 1.0

_log = logging.getLogger("ringdp.rounds")


class Coming(enum.IntEnum):
    """For what a rank has come."""

    NOT = 0
    TURN = 1
    FINISH = 2  # of all fragments; all ranks are waited for


@dataclasses.dataclass(frozen=True)
class Presence:
    """What a rank says when the threads meet.

    Attributes:
        coming: for what it has come.
        waited_s: seconds since then.
    """

    coming: Coming
    waited_s: float = 0.0

    _FORM = "<Bd"

    def encode(self) -> bytes:
        return struct.pack(self._FORM, self.coming, self.waited_s)

    @classmethod
    def decode(cls, data: bytes) -> Presence:
        coming, waited_s = struct.unpack(cls._FORM, data)
        return cls(Coming(coming), waited_s)


@dataclasses.dataclass(frozen=True)
class Quorum:
    """When a turn is over.

    Attributes:
        share: of the ranks, above 0 to 1.
        grace_s: seconds for which the others are waited for after that.
    """

    share: float
    grace_s: float

    def is_there(self, present: Sequence[Presence]) -> bool:
        """Enough ranks have come to tell the others to come as they are."""
        return len(self._waited(present)) >= self._least(present)

    def is_over(self, present: Sequence[Presence]) -> bool:
        waited = self._waited(present)
        if len(waited) == len(present):
            return True
        if any(one.coming is Coming.FINISH for one in present) or len(waited) < self._least(present):
            return False
        return waited[self._least(present) - 1] >= self.grace_s

    def _waited(self, present: Sequence[Presence]) -> list[float]:
        """Of those who have come, the first one's first."""
        return sorted((one.waited_s for one in present if one.coming), reverse=True)

    def _least(self, present: Sequence[Presence]) -> int:
        return max(1, math.ceil(self.share * len(present) - 1e-9))  # 0.28 * 25 is above 7


@dataclasses.dataclass(frozen=True)
class Change:
    """Of one fragment.

    Attributes:
        values: flat, [numel].
        weight: 0: it does not count.
        not_finite: the piece with an infinity or a NaN; -1: none.
    """

    values: Tensor
    weight: float
    not_finite: int = -1


@dataclasses.dataclass
class Part:
    """What this rank's training brings to a turn: changes, by number of fragment.

    Attributes:
        turn: how many are over, as far as the training knows.
        counts_samples: weights are of `DiLoCo.did`.
        counts: it is in the turn's mean; written by the thread.
    """

    coming: Coming
    turn: int
    changes: Mapping[int, Change]
    counts_samples: bool
    came_s: float
    counts: bool = False


class Meetings:
    """The thread, and what it shares with the training thread.

    The global parameters and the outer optimizers change on this thread alone, under `lock`, and after the same
    meetings on all ranks. It runs from the first step to the end of `finish`, so that nothing else of the group's runs
    beside it.

    Args:
        who: in the names of operations.
        group: of the ranks; the thread alone uses it while it runs. None for one rank alone.
        exchanges: of the fragments.
        outer: of each fragment.
        units: a usual weight of each fragment, the same on all ranks; each turn writes it.

    Attributes:
        lock: guards the global parameters.
        turn: how many are over.
        called: a quorum has come to this one, which wants the others as they are.
        view: of the ranks in the last one's mean.
        bytes_sent: by this rank.
        ended: called on the thread as ``ended(came)`` where a turn is over, before a rank that came goes on.
    """

    def __init__(
        self,
        who: str,
        quorum: Quorum,
        group: dist.ProcessGroup | None,
        exchanges: Sequence[FragmentExchange],
        outer: Sequence[OuterStep],
        units: list[float],
    ) -> None:
        self._who, self._quorum, self._group = who, quorum, group
        self._exchanges, self._outer = exchanges, outer
        self._units = units
        self.lock = threading.Condition()
        self.turn, self.view, self.called = 0, 0, False
        self.bytes_sent = 0.0
        self.ended: Callable[[bool], None] | None = None
        self._missing: list[int] = []  # numbers for good of the ranks that the last turn was over without
        self._part: Part | None = None
        self._error: BaseException | None = None
        self._ends = False
        self._thread: threading.Thread | None = None

    # The training thread.

    def begin(self, *, new: bool = False) -> None:
        """Start the thread, if it does not run. `new`: this rank has come where a turn had ended.

        Raises:
            InvalidStateError: after `end`, or another one's thread uses the group.
            RingError: what it has ended with.
        """
        self.require_well()
        if self._ends:
            raise InvalidStateError(f"{self._who}: after detach() there are no rounds: call finish() before it")
        if self.runs:
            return
        if self._group is not None and any(one._group is self._group and one.runs for one in _alive):
            raise InvalidStateError(
                f"{self._who}: another one with quorum= is under way, and in an elastic job both would meet in the"
                " job's own group: call its finish() first"
            )
        self._thread = threading.Thread(target=self._run, args=(new,), name="ringdp rounds", daemon=True)
        start_thread(self._thread, f"{self._who}: no thread can be started to take part in rounds")
        _alive.add(self)
        end_before_groups(_end_all)

    @property
    def runs(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def require_well(self) -> None:
        if self._error is not None:
            raise self._error

    def bring(self, part: Part) -> bool:
        """Bring the part, and wait until its turn is over. Whether it counts there: it may be over already."""
        _synchronize([one.values for one in part.changes.values()])
        with self.lock:
            self._part = part
            self.lock.notify_all()
            try:
                while self.turn == part.turn and not part.counts:
                    self.require_well()
                    self.lock.wait(_LONGEST_PAUSE_S)
            finally:
                self._part = None
        if part.counts and part.coming is Coming.FINISH and self._thread is not None:
            self._thread.join()
        return part.counts

    def end(self) -> None:
        """Without the other ranks: the thread ends, or is left behind in an operation that fails."""
        self._ends = True
        thread = self._thread
        if thread is None or not thread.is_alive():  # in a forked process another thread may have had the lock
            return
        with self.lock:
            self.lock.notify_all()
        thread.join(_MOMENT_S)
        if thread.is_alive() and self._group is not None:
            cut_off(self._group)
            thread.join(_LONGEST_END_S)

    def begin_again(self, turn: int, units: list[float]) -> None:
        """From a state, while the thread does not run."""
        self.turn, self.called, self._units = turn, False, units

    # The thread.

    @torch.no_grad()
    def _run(self, new: bool) -> None:
        try:
            if new and self.ended is not None:
                self.ended(False)
            told: Part | None = None
            pause_s = min(_LONGEST_PAUSE_S, max(_LEAST_PAUSE_S, self._quorum.grace_s / 20))
            while True:
                with self.lock:
                    self.lock.wait_for(lambda: self._ends or self._there() is not told, pause_s)  # noqa: B023
                    if self._ends:
                        return
                    told = self._there()
                by_rank = self._meet(told)
                present = list(by_rank.values())
                finishes = any(one.coming is Coming.FINISH for one in present)
                if self._quorum.is_over(present):
                    self._exchange(told, by_rank, finishes)
                    if finishes:
                        return
                    told = None
                else:
                    self.called = not finishes and self._quorum.is_there(present)
        except BaseException as error:
            with self.lock:
                self._error = error
                self.lock.notify_all()

    def _there(self) -> Part | None:
        return self._part if self._part is not None and self._part.turn == self.turn else None

    def _meet(self, part: Part | None) -> dict[int, Presence]:
        """By rank, as they are numbered for good."""
        mine = Presence(Coming.NOT) if part is None else Presence(part.coming, time.monotonic() - part.came_s)
        if self._group is None or self._group.size() == 1:
            return {0: mine}
        group, what = self._group, f"{self._who} turn {self.turn + 1}: who has come"
        data = mine.encode()

        def gathered() -> dict[int, Presence]:
            lines = all_gather_bytes(data, group, room=len(data))
            return {rank: Presence.decode(line) for rank, line in zip(places(group), lines, strict=True)}

        with named(what):
            return as_unit(group, what, gathered)

    def _exchange(self, part: Part | None, present: Mapping[int, Presence], finishes: bool) -> None:
        count = len(self._exchanges)
        if finishes and (others := [rank for rank, one in present.items() if one.coming is Coming.TURN]):
            one = next(rank for rank, it in present.items() if it.coming is Coming.FINISH)
            raise MismatchError(
                f"{self._who} turn {self.turn + 1}: rank {one} calls finish() and rank {others[0]} trains on: call it"
                " on all ranks after the same number of rounds (`round`)",
                rank=others[0],
                peer=one,
            )
        for number in range(count) if finishes else [self.turn % count]:
            self._exchange_one(number, part)
        if not finishes:
            self._log_left_out(present)
            if self.ended is not None:
                self.ended(part is not None)
        with self.lock:
            # A turn that all ranks end together is of all fragments: the first one is next.
            self.turn = -(-self.turn // count) * count if finishes else self.turn + 1
            self.called = False
            if part is not None:
                part.counts = True
            self.lock.notify_all()

    def _exchange_one(self, number: int, part: Part | None) -> None:
        exchange = self._exchanges[number]
        fragment, change = exchange.fragment, None if part is None else part.changes[number]

        def fill() -> None:
            if change is None or change.not_finite >= 0:
                fragment.buffer.zero_()
            else:
                fragment.buffer.copy_(change.values)

        record = Record(
            0.0 if change is None else change.weight,
            not_finite=-1 if change is None else change.not_finite,
            digest=digest(fragment.total),
            counts_samples=part is not None and part.counts_samples,
            late=part is None,
            norm=0.0 if change is None else float(torch.linalg.vector_norm(change.values)),
        )
        name = f"{self._who} turn {self.turn + 1}, fragment {number + 1}/{len(self._exchanges)}: {fragment.label}"
        flight = Flight(name, record, unit=self._units[number], exact=False, averages=False, fill=fill)
        exchange.start(flight)
        arrival = exchange.wait(flight)
        log_not_finite(flight, fragment, arrival)
        log_clipped(flight, arrival)
        with self.lock:
            if arrival.usable:
                self._outer[number].step(fragment.buffer)
            _synchronize([fragment.total])
            self.view = flight.view
        self._units[number] = arrival.weight
        self.bytes_sent += exchange.sent_bytes(exact=False)

    def _log_left_out(self, present: Mapping[int, Presence]) -> None:
        """One line when ranks begin to be left out, and one when all are there again."""
        missing = [rank for rank, one in present.items() if one.coming is Coming.NOT]
        if missing == self._missing or self._group is None:
            return
        self._missing = missing
        if self._group.rank() != 0:
            return
        if missing:
            _log.warning(
                "%s turn %d is over without rank%s %s: %d of %d ranks have come, and %g s are over",
                self._who,
                self.turn + 1,
                "s" if len(missing) > 1 else "",
                ", ".join(map(str, missing)),
                len(present) - len(missing),
                len(present),
                self._quorum.grace_s,
            )
        else:
            _log.warning("%s turn %d: all ranks are there again", self._who, self.turn + 1)


@dataclasses.dataclass
class _Pending:
    """Changes that no turn has: the sum of weight times change, their weight, and the turn before which they began."""

    total: Tensor
    weight: float
    turn: int


class Attendance:
    """This rank's training between turns: what it began from, and what no turn has yet. The training thread.

    Args:
        meetings: where its changes go.
        fragments: of the model.

    Attributes:
        bases: of each fragment the global parameters from which this rank went on.
        seen: turns whose result this rank's parameters have.
        finished: nothing was done since `finish`.
    """

    def __init__(self, who: str, meetings: Meetings, fragments: Sequence[Fragment]) -> None:
        self._who, self.meetings, self._fragments = who, meetings, fragments
        self.bases = [one.total.clone() for one in fragments]
        self._pending: dict[int, _Pending] = {}
        self._began = [0] * len(fragments)  # turns that were over when this rank last took the fragment's parameters
        self.seen, self.finished = 0, True

    def missed(self) -> list[int]:
        """Fragments whose turns went by without this rank since it last came."""
        turn, count = self.meetings.turn, len(self._fragments)
        return sorted({one % count for one in range(self.seen, turn)})

    def change(self, number: int) -> tuple[Tensor, float]:
        """Of the fragment, since this rank took its parameters, and its norm."""
        fragment, base = self._fragments[number], self.bases[number]
        fragment.read(values := torch.empty_like(base))
        torch.sub(base, values, out=values)
        return values, float(torch.linalg.vector_norm(values))

    def brings(self, number: int, values: Tensor, weight: float) -> Change:
        """The change of so much weight, with what earlier turns went by without."""
        pending = self._pending.get(number)
        if pending is None:
            return Change(values, weight)
        total = pending.total.add(values, alpha=weight)
        return Change(total.div_(pending.weight + weight), pending.weight + weight)

    def left_out(self, number: int, change: Change) -> None:
        """No turn has it yet: it joins a later one, unless that comes too late."""
        began = self._pending[number].turn if number in self._pending else self._began[number]
        age = (self.meetings.turn - began) // len(self._fragments)
        if change.not_finite >= 0 and age <= RECENT:  # it has nothing of what earlier turns went by without
            return
        self._pending.pop(number, None)
        if change.weight <= 0:
            return
        if age > RECENT:
            _log.warning(
                "%s: this rank was not there for %d turns of %s: its change of weight %g is too old and counts nowhere",
                self._who,
                age,
                self._fragments[number].label,
                change.weight,
            )
            return
        self._pending[number] = _Pending(change.values.mul(change.weight), change.weight, began)
        _log.warning(
            "%s turn %d went by without this rank: its change of weight %g joins the next one",
            self._who,
            self.meetings.turn,
            change.weight,
        )

    def counted(self, changes: Mapping[int, Change]) -> None:
        for number, change in changes.items():
            if change.not_finite < 0:
                self._pending.pop(number, None)

    def take(self, numbers: Sequence[int], turn: int) -> None:
        """This rank goes on from the global parameters, and has seen the turns before that one."""
        with self.meetings.lock:
            self.seen = turn
            for number in numbers:
                fragment = self._fragments[number]
                self.bases[number].copy_(fragment.total)
                fragment.write(fragment.total)
                self._began[number] = turn

    def begin_again(self, turn: int, units: list[float]) -> None:
        """From a state, which was saved when rounds had been finished."""
        self.meetings.begin_again(turn, units)
        self._pending.clear()
        self.take(range(len(self._fragments)), turn)
        self.finished = True


def _synchronize(tensors: Sequence[Tensor]) -> None:
    """Two threads may have a stream each."""
    for one in tensors:
        if one.is_cuda:
            torch.cuda.synchronize(one.device)


_alive: weakref.WeakSet[Meetings] = weakref.WeakSet()


def _end_all() -> None:
    for meetings in list(_alive):
        meetings.end()
