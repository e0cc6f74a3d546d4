"""The owner of a part of a store: takes the workers' requests in turn, and answers those that may be answered.

It does not communicate: a thread hands it requests, and it calls `Answering` with what is to be sent.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from ringdp.errors import InvalidStateError, MismatchError, RingError, RingTimeoutError
from ringdp.job.byte_collectives import as_bytes, as_tensor
from ringdp.kvstore.clocks import Clocks
from ringdp.kvstore.messages import ANSWERED, Kind, Message
from ringdp.text import ranks_by_number

_log = logging.getLogger("ringdp.kvstore")
NOTICE_S = 10.0
_AT_A_CLOCK = (Kind.PUSH, Kind.PULL, Kind.PUSHPULL)


@dataclasses.dataclass(frozen=True)
class Push:
    """Of one worker.

    Attributes:
        body: as the worker packed it.
        key: see `Message`.
        late: how many updates of others came between what the worker last pulled and this.
    """

    worker: int
    body: Tensor
    scale: float = 1.0
    late: int = 0
    key: int = -1


class Served(Protocol):
    """A part of a store's values. Used by one thread at a time."""

    def apply(self, pushes: Sequence[Push]) -> None:
        """One push, or those of one clock of all workers, by worker: their sum counts."""

    def answer(self, asked: Message) -> Tensor:
        """For a pull: a copy."""

    def set(self, body: Tensor | None) -> None:
        """Change a number of the update."""

    def writer(self, folder: str, clock: int, pushes: Mapping[int, int]) -> Callable[[], None]:
        """Copies everything; what it returns writes that to a file, on another thread, and raises OSError."""


class Answering(Protocol):
    """Where an owner's answers go."""

    def answer(self, worker: int, message: Message) -> None:
        """Send it; never blocks, and does not raise where the worker is lost."""

    def expect(self, worker: int) -> None:
        """The worker's next request may come."""


@dataclasses.dataclass
class _Asked:
    """The request of a worker that the owner has."""

    message: Message
    since: float
    told: float = 0.0  # when the log had it last


class Owner:
    """Of each worker it has one request at most, and the next one comes when that has been done: so its memory is
    bounded, and a worker's requests are done in their order. What it does for one request, it does as a whole: under
    `lock`, which guards the values too.

    A request of a worker that is too far ahead waits here. With staleness 0 pushes are kept until all workers have gone
    past their clock, one of each, and then applied together in the order of the workers.

    Args:
        rank: of the group, this rank's, for texts.
        timeout_s: how long a request waits for slow workers.

    Attributes:
        agreed: how often the ranks have agreed on keys and settings; a request made after more of that waits.
        pushes: applied so far, by worker.
        lost_pushes: of workers that were lost before the clock of the push was over.
        failure: in which it ended; every request gets it.
    """

    def __init__(self, served: Served, clocks: Clocks, answering: Answering, *, rank: int, timeout_s: float) -> None:
        self.lock = threading.Condition()
        self._served, self.clocks, self._answering = served, clocks, answering
        self._rank, self._timeout_s = rank, timeout_s
        self._present = set(clocks.workers)  # whose requests may come
        self._asked: dict[int, _Asked] = {}
        self._kept: dict[int, list[Push]] = {}  # by clock; with staleness 0
        self._pulled_at: dict[int, int] = {}  # of each worker, `pushes` when it last pulled
        self._own: dict[int, int] = {}  # of each worker, its pushes since then
        self._writing: threading.Thread | None = None
        self.agreed = 0
        self.pushes: collections.Counter[int] = collections.Counter()
        self.lost_pushes = 0
        self._over = False  # see `end_waits`
        self.failure: Exception | None = None

    @property
    def over(self) -> bool:
        """No request comes any more, and all files are written."""
        return not self._present and (self._writing is None or not self._writing.is_alive())

    def has_request_of(self, worker: int) -> bool:
        """Under the lock: its last one is not done."""
        return worker in self._asked

    def behind(self) -> list[int]:
        """The slowest workers, where not all are at one clock."""
        with self.lock:
            return self.clocks.behind()

    # Requests. Each takes the lock.

    def agree(self, take: Callable[[], None]) -> None:
        """The ranks have agreed once more: `take` gives that to the values."""
        with self.lock:
            take()
            self.agreed += 1
            self._go_on()

    def take(self, worker: int, message: Message) -> None:
        """A request has come."""
        with self.lock:
            self._asked[worker] = _Asked(message, time.monotonic())
            self._go_on()

    def lost(self, worker: int) -> None:
        """No request of it comes any more. What it pushed in a clock that it has not ended counts nowhere."""
        with self.lock:
            self._present.discard(worker)
            if worker not in self.clocks.workers:
                self.lock.notify_all()
                return
            reached = self.clocks.of(worker)
            self._asked.pop(worker, None)
            for clock, pushes in self._kept.items():
                if clock >= reached:
                    self.lost_pushes += sum(one.worker == worker for one in pushes)
                    pushes[:] = [one for one in pushes if one.worker != worker]
            self.clocks.left(worker)
            self._go_on()

    def fail(self, error: Exception) -> None:
        """All requests, also those to come, get this error."""
        with self.lock:
            self.failure = self.failure or error
            self._go_on()

    def end_waits(self) -> None:
        """An owner is lost: no request waits for other workers any more, since they stop to see what is left."""
        with self.lock:
            self._over = True
            self._go_on()

    def look(self) -> None:
        """Now and then: name workers for which others wait, and end what has waited too long."""
        now = time.monotonic()
        with self.lock:
            for worker, asked in list(self._asked.items()):
                waits = self.clocks.waits(asked.message.clock)
                waited_s = now - asked.since
                if waits is None or waited_s < NOTICE_S:
                    continue
                text = (
                    f"rank {worker} has waited {waited_s:.0f} s in its {asked.message.kind.name.lower()} at clock"
                    f" {asked.message.clock} for {ranks_by_number(waits.workers)}, at clock {waits.clock}"
                    f" (staleness={self.clocks.staleness})"
                )
                if waited_s > self._timeout_s:
                    self._asked.pop(worker)
                    self._end(worker, asked, RingTimeoutError(text, rank=worker, peer=waits.workers[0]))
                elif now - asked.told >= NOTICE_S:
                    asked.told = now
                    _log.warning("%s", text)

    # Under the lock.

    def _go_on(self) -> None:
        """Do all requests that can be done: one may let others go on."""
        while True:
            if self._kept:
                self._apply_kept()
            worker = min(filter(self._may_do, self._asked), default=None)
            if worker is None:
                break
            self._do(worker, self._asked.pop(worker))
        self.lock.notify_all()

    def _may_do(self, worker: int) -> bool:
        message = self._asked[worker].message
        if self.failure is not None or self._over:
            return True
        if message.agreed > self.agreed:  # this rank comes to it soon
            return False
        if message.kind in _AT_A_CLOCK:
            return self.clocks.waits(message.clock) is None
        if message.kind is Kind.SAVE:  # when all workers have come to it
            return all(one in self._asked and self._asked[one].message.kind is Kind.SAVE for one in self.clocks.workers)
        return True

    def _do(self, worker: int, asked: _Asked) -> None:
        message = asked.message
        try:
            if self.failure is not None and message.kind not in (Kind.LEAVE, Kind.BYE):
                raise self.failure
            payload = None
            if message.kind in (Kind.PUSH, Kind.PUSHPULL):
                self._push(worker, message)
            if message.kind in (Kind.PULL, Kind.PUSHPULL):
                payload = self._served.answer(message)
                self._pulled_at[worker], self._own[worker] = self.pushes.total(), 0
            elif message.kind is Kind.TICK:
                self.clocks.reached(worker, message.clock)
            elif message.kind is Kind.SET:
                self._served.set(message.payload)
            elif message.kind is Kind.SAVE and not self._over:
                self._save(worker, asked)
                return
            elif message.kind is Kind.LEAVE:
                self.clocks.left(worker)
            elif message.kind is Kind.BYE:
                self._present.discard(worker)
                return
        except Exception as error:
            if self.failure is None:  # the values may be half changed
                self.failure = InvalidStateError(
                    f"the owner on rank {self._rank} has failed in a {message.kind.name.lower()} of rank {worker}:"
                    f" {type(error).__name__}: {error}"
                )
            self._end(worker, asked, error)
            return
        if message.kind in ANSWERED:
            self._reply(worker, asked, payload)
        self._answering.expect(worker)

    def _push(self, worker: int, message: Message) -> None:
        assert message.payload is not None
        late = self.pushes.total() - self._pulled_at.get(worker, 0) - self._own.get(worker, 0)
        push = Push(worker, message.payload, message.scale, late, message.key)
        self._own[worker] = self._own.get(worker, 0) + 1
        if self.clocks.staleness == 0:
            self._kept.setdefault(message.clock, []).append(push)
        else:
            self._served.apply([push])
            self.pushes[worker] += 1

    def _apply_kept(self) -> None:
        """The pushes of clocks that all workers have gone past."""
        over = sorted(clock for clock in self._kept if clock < self.clocks.least or not self.clocks.workers)
        for clock in over:
            pushes = self._kept.pop(clock)
            try:
                if pushes and self.failure is None:
                    self._served.apply(sorted(pushes, key=lambda one: one.worker))
            except Exception as error:
                self.failure = InvalidStateError(
                    f"the owner on rank {self._rank} has failed in the update of clock {clock}:"
                    f" {type(error).__name__}: {error}"
                )
            self.pushes.update(one.worker for one in pushes)

    def _save(self, worker: int, asked: _Asked) -> None:
        """All workers that are there have come to it: the values are those of their clock."""
        saving = {worker: asked} | self._asked
        self._asked.clear()
        clocks = {it.message.clock for it in saving.values()}
        bodies = [it.message.payload for it in saving.values()]
        folders = {as_bytes(it).decode() if it is not None else "" for it in bodies}
        if folders == {""}:
            for one, it in saving.items():
                self._reply(one, it, None)
                self._answering.expect(one)
            return
        if len(folders) > 1 or (len(clocks) > 1 and self.clocks.staleness is not None):
            where, when = ", ".join(sorted(map(repr, folders))), ", ".join(map(str, sorted(clocks)))
            error = MismatchError(
                f"save: the workers come with different folders or clocks: {where}; clocks {when}. Call it on all of"
                " them after the same number of steps"
            )
            for one, it in saving.items():
                self._end(one, it, error)
            return
        if self._writing is not None:
            self._writing.join()
        write = self._served.writer(folders.pop(), min(clocks), dict(self.pushes))
        self._writing = threading.Thread(target=self._write, args=(write, saving), name="ringdp kvstore save")
        self._writing.start()
        for one in saving:
            self._answering.expect(one)

    def _write(self, write: Callable[[], None], saving: dict[int, _Asked]) -> None:
        error: Exception | None = None
        try:
            write()
        except Exception as raised:
            error = raised
        for worker, asked in saving.items():
            if error is None:
                self._reply(worker, asked, None)
            else:
                self._end(worker, asked, error, expect=False)

    def _reply(self, worker: int, asked: _Asked, payload: Tensor | None) -> None:
        message = asked.message
        held_s = time.monotonic() - asked.since
        age = self.clocks.age(message.clock)
        answer = Message(Kind.ANSWER, message.sequence, message.clock, age=age, held_s=held_s, payload=payload)
        self._answering.answer(worker, answer)

    def _end(self, worker: int, asked: _Asked, error: Exception, *, expect: bool = True) -> None:
        """A push has no answer: its worker gets the error by its next request."""
        message = asked.message
        if message.kind in ANSWERED:
            kind = type(error).__name__ if isinstance(error, RingError) else "InvalidStateError"
            text = f"{kind}\n{error}".encode()[:4000]
            answer = Message(Kind.ERROR, message.sequence, message.clock, payload=as_tensor(text))
            self._answering.answer(worker, answer)
        if expect:
            self._answering.expect(worker)
