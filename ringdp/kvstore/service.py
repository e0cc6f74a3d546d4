"""Requests of this rank as a worker, and the thread of this rank as an owner: what `dist_async` communicates by."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from ringdp import errors
from ringdp.errors import InvalidStateError, PeerLostError, RingError, RingTimeoutError
from ringdp.job.backend import BACKEND, backend_of, timeout_of
from ringdp.job.byte_collectives import all_gather_bytes, as_bytes
from ringdp.job.elastic import as_unit, is_elastic
from ringdp.job.threads import end_before_groups, start_thread
from ringdp.kvstore.clocks import Clocks
from ringdp.kvstore.messages import Kind, Message
from ringdp.kvstore.owner import Owner, Served

_log = logging.getLogger("ringdp.kvstore")
_TIMEOUT_S = 1800.0  # of one rank alone
_LOOK_MS = 500
_ANSWER_MS = 200  # between two looks at signals
_NAME_BYTES = 16
_MOST_BYTES = 1 << 40
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Members:
    """Of a store: ranks of its group; without a group, rank 0 alone.

    Attributes:
        workers: that push and pull.
        owners: that have slices, in the order of the slices.
        lets_end: a rank that serves alone does so, and then ends the program, where a worker's program asks: MXNet's
            servers run the same program.
    """

    group: dist.ProcessGroup | None
    rank: int
    workers: tuple[int, ...]
    owners: tuple[int, ...]
    lets_end: bool = False

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, servers: int, *, lets_end: bool = False) -> Members:
        """`servers` ranks, the last ones, own all and do not work; 0: all ranks do both."""
        ranks = 1 if group is None else group.size()
        everyone = tuple(range(ranks))
        if not servers:
            return cls(group, 0 if group is None else group.rank(), everyone, everyone)
        return cls(group, 0 if group is None else group.rank(), everyone[:-servers], everyone[-servers:], lets_end)

    @property
    def works(self) -> bool:
        return self.rank in self.workers

    @property
    def owns(self) -> bool:
        return self.rank in self.owners

    @property
    def timeout_s(self) -> float:
        timeout = None if self.group is None else timeout_of(self.group, "cpu")
        return _TIMEOUT_S if timeout is None else timeout.total_seconds()


class Service:
    """Of one store on this rank. All ranks of its group make theirs alike.

    Requests to one owner are done in their order. To an owner on this rank they go without the network, but through the
    same `Owner`. The other workers' requests are taken by the program's thread while it waits for an answer, else by a
    thread of the owner, for as long as one of them is there. `ask` and `answer_of`
    are for one thread, that of the program.

    Args:
        served: this rank's part of the values; None where it owns nothing.
        clocks: of the workers; None: all begin at 0.
        name: of the connections, the same on all ranks and never used before; None: the ranks agree on one.
        agreed: how often the ranks have agreed on keys and settings.

    Attributes:
        clock: this worker's.
        waited_s: by owner, for how long this worker waited for it, without the time for which slow workers were waited
            for.
        held_s: for how long slow workers were waited for.
    """

    def __init__(
        self,
        members: Members,
        served: Served | None,
        staleness: int | None,
        *,
        clocks: Mapping[int, int] | None = None,
        name: str | None = None,
        agreed: int = 0,
    ) -> None:
        begin = dict.fromkeys(members.workers, 0) if clocks is None else dict(clocks)
        self.members, self.clock = members, begin.get(members.rank, 0)
        self.agreed = agreed
        self.waited_s = dict.fromkeys(members.owners, 0.0)
        self.held_s = 0.0
        self._sequence = 0
        self._early: dict[int, Message] = {}  # answers that nobody has asked for yet, by sequence
        self._mine: dict[int, Message] = {}  # of this rank's own owner; under its lock
        self._process = os.getpid()
        self._closed = False
        self._box = self._mailbox(members.group, name)
        self.owner: Owner | None = None
        self._thread: threading.Thread | None = None
        if served is not None:
            self.owner = Owner(served, Clocks(begin, staleness), self, rank=members.rank, timeout_s=members.timeout_s)
            self.owner.agreed = agreed
        if self._box is not None and members.works:
            for owner in members.owners:
                if owner != members.rank:
                    self._box.expect(owner, answers=True)
        if self._box is not None and self.owner is not None:
            self._start()
        _alive.add(self)
        end_before_groups(_end_all)

    @staticmethod
    def _mailbox(group: dist.ProcessGroup | None, name: str | None) -> Any:
        if group is None or group.size() == 1:
            return None
        if backend_of(group, "cpu") != BACKEND:
            raise InvalidStateError(f"dist_async needs the backend {BACKEND} for the CPU, and this group has another")
        from ringdp import _C

        if name is None:
            mine = secrets.token_hex(_NAME_BYTES // 2).encode()
            meet = functools.partial(all_gather_bytes, mine, group, room=_NAME_BYTES)
            name = as_unit(group, "name of an asynchronous store", meet)[0].decode()
        return _C.Mailbox(group=group, name=f"ringdp store {name}", most_bytes=_MOST_BYTES)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._serve, name="ringdp kvstore", daemon=True)
        start_thread(self._thread, "no thread can be started for the owner's part of a store")

    # The worker.

    def ask(
        self,
        kind: Kind,
        owner: int,
        payload: Tensor | None = None,
        *,
        scale: float = 1.0,
        key: int = -1,
        into: Tensor | None = None,
    ) -> int:
        """Send a request, and return its sequence number. Waits while much is on its way to the owner.

        Args:
            into: the answer's payload is received there, if it has its size; it has to be read before the next answer.

        Raises:
            PeerLostError: the owner is lost.
            InvalidStateError: after `close`, or in a forked process.
        """
        self._require_open()
        self._sequence += 1
        message = Message(kind, self._sequence, self.clock, self.agreed, scale, payload=payload, key=key, into=into)
        if owner != self.members.rank:
            if into is not None:
                self._box.land(owner, into)
            waited_ns = self._box.send(owner, message.header(), payload, answers=False, waits=True)
            self.waited_s[owner] += waited_ns / 1e9
            return self._sequence
        assert self.owner is not None
        with self.owner.lock:
            self._wait_for_own()
            self.owner.take(owner, message)
        return self._sequence

    def answer_of(self, owner: int, sequence: int) -> Message:
        """Wait for the answer to a request.

        Raises:
            PeerLostError: the owner is lost.
            RingTimeoutError: it does not answer, or waits for workers that do not come.
            RingError: it answers with an error.
        """
        began = time.monotonic()
        while (message := self._answer_from(owner, sequence)) is None:
            self._require_owners()
            if time.monotonic() - began > 2 * self.members.timeout_s:  # it ends what waits for slow workers sooner
                raise RingTimeoutError(
                    f"the owner on rank {owner} has not answered rank {self.members.rank} for"
                    f" {time.monotonic() - began:.0f} s: is its process stopped?",
                    rank=self.members.rank,
                    peer=owner,
                )
        self.held_s += message.held_s
        self.waited_s[owner] += max(0.0, time.monotonic() - began - message.held_s)
        if message.kind is Kind.ERROR:
            assert message.payload is not None
            kind, text = as_bytes(message.payload).decode(errors="replace").split("\n", 1)
            raise getattr(errors, kind, InvalidStateError)(text)
        return message

    def ask_all(self, kind: Kind, payload: Tensor | None = None) -> dict[int, int]:
        """As `ask`, of all owners, this rank last; the sequence numbers, by owner."""
        return self.ask_each(self.remote_first(), lambda owner: self.ask(kind, owner, payload))

    def ask_each(self, owners: Iterable[int], ask: Callable[[int], int]) -> dict[int, int]:
        """Call `ask` for some owners; where one is lost, the others are asked before that is raised."""
        asked: dict[int, int] = {}
        lost: PeerLostError | None = None
        for owner in owners:
            try:
                asked[owner] = ask(owner)
            except PeerLostError as error:
                lost = lost or error
        if lost is not None:
            raise lost
        return asked

    def drain(self) -> None:
        """When an owner is lost: the others have done all that this worker has asked of them."""
        for owner in self.remote_first():
            with contextlib.suppress(PeerLostError):
                sequence = self.ask(Kind.SYNC, owner)
                while self._answer_from(owner, sequence) is None:
                    self._box.require(owner)

    def remote_first(self) -> list[int]:
        rank = self.members.rank
        return [it for it in self.members.owners if it != rank] + [rank] * self.members.owns

    def step(self) -> None:
        """This worker's clock ticks, and all owners learn it."""
        self.clock += 1
        self.ask_all(Kind.TICK)

    def sync(self) -> None:
        """All that this worker has asked has been done."""
        for owner, sequence in self.ask_all(Kind.SYNC).items():
            self.answer_of(owner, sequence)

    def barrier(self) -> None:
        """As `sync`, and all workers have come to it."""
        for owner, sequence in self.ask_all(Kind.SAVE).items():
            self.answer_of(owner, sequence)

    def close(self, *, wait: bool = True) -> None:
        """Say that this worker goes, and serve the others until all of them have said so.

        Args:
            wait: False: end at once; the others lose what this rank owns.

        Raises:
            PeerLostError: in an elastic job, an owner is lost meanwhile; then nothing is closed.
        """
        if self._closed or os.getpid() != self._process:
            return
        if wait and self.members.works:
            self._say_goodbye()
        if wait:
            self.serve()
        self._closed = True
        if self._box is not None:
            self._box.close()
        if self._thread is not None:
            self._thread.join()

    def serve(self) -> None:
        """Wait until all workers have left. Raises PeerLostError as `close`."""
        group = self.members.group
        lasts = group is not None and is_elastic(group)
        if self.owner is None:
            return
        with self.owner.lock:
            while not self.owner.over:
                self.owner.lock.wait(_ANSWER_MS / 1000)
                if lasts:
                    with contextlib.suppress(InvalidStateError):  # one has closed: all have left it
                        self._require_owners()

    # The owner's answers. Any thread; see `Answering`.

    def answer(self, worker: int, message: Message) -> None:
        if worker != self.members.rank:
            with contextlib.suppress(RingError):  # the thread learns that the worker is lost
                self._box.send(worker, message.header(), message.payload, answers=True, waits=False)
            return
        assert self.owner is not None
        with self.owner.lock:
            self._mine[message.sequence] = message
            self.owner.lock.notify_all()

    def expect(self, worker: int) -> None:
        if worker != self.members.rank:
            self._box.expect(worker, answers=False)

    # Private methods.

    def _say_goodbye(self) -> None:
        """To the owners that are there."""
        left: dict[int, int] = {}
        for owner in self.remote_first():
            with contextlib.suppress(RingError):
                left[owner] = self.ask(Kind.LEAVE, owner)
        for owner, sequence in left.items():
            with contextlib.suppress(RingError):
                while self._answer_from(owner, sequence) is None:
                    self._box.require(owner)
        for owner in left:
            with contextlib.suppress(RingError):
                self.ask(Kind.BYE, owner)

    def _require_open(self) -> None:
        if os.getpid() != self._process:
            raise InvalidStateError(
                "this process was forked from one that uses dist_async: the store belongs to the parent; start worker"
                " processes with 'spawn', or do not use the store in them"
            )
        if self._closed:
            raise InvalidStateError("this store was closed")
        if not self.members.works and self.members.lets_end:
            self.close()
            raise SystemExit(0)
        if not self.members.works:
            raise InvalidStateError(f"rank {self.members.rank} of this store serves alone: call serve() on it")

    def _wait_for_own(self) -> None:
        """Until this rank's owner has done its last request; under its lock."""
        assert self.owner is not None
        while self.owner.has_request_of(self.members.rank):
            self.owner.lock.wait(_ANSWER_MS / 1000)

    def _answer_from(self, owner: int, sequence: int) -> Message | None:
        """None: it has not come for some time."""
        if owner == self.members.rank:
            assert self.owner is not None
            with self.owner.lock:
                if sequence not in self._mine:
                    self.owner.lock.wait(_ANSWER_MS / 1000)
                return self._mine.pop(sequence, None)
        while (message := self._early.pop(sequence, None)) is None:
            if (found := self._box.answer(owner, _ANSWER_MS, serves=self.owner is not None)) is None:
                return None
            asks, sender, header, payload = found
            if asks:
                self._take(sender, header, payload)
            else:
                came = Message.of(header, payload)
                self._early[came.sequence] = came
        return message

    def _require_owners(self) -> None:
        """Raises PeerLostError where one is lost: others may wait for that before they answer this worker."""
        if self._box is not None:
            for owner in self.members.owners:
                if owner != self.members.rank:
                    self._box.require(owner)

    def _serve(self) -> None:
        assert self.owner is not None
        looked = time.monotonic()
        try:
            for worker in self.members.workers:
                self.expect(worker)
            while not self._closed:
                if (found := self._box.request(_LOOK_MS)) is not None:
                    self._take(*found[1:])
                if (now := time.monotonic()) - looked > _LOOK_MS / 1000:
                    looked = now
                    self.owner.look()
        except BaseException as error:
            _log.exception("the owner's part of a store on rank %d has ended", self.members.rank)
            self.owner.fail(InvalidStateError(f"the owner on rank {self.members.rank} has ended: {error}"))

    def _take(self, worker: int, header: bytes | None, payload: Tensor | None) -> None:
        """A request for this rank's owner, or the loss of a worker; on whichever thread has got it."""
        assert self.owner is not None
        if header is not None:
            self.owner.take(worker, Message.of(header, payload))
            return
        self.owner.lost(worker)
        if worker in self.members.owners:
            self.owner.end_waits()


_alive: weakref.WeakSet[Service] = weakref.WeakSet()


def _end_all() -> None:
    """A program that ends by an error, or leaves its job because of one, ends at once."""
    failed = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None) or sys.exc_info()[1]
    for service in list(_alive):
        service.close(wait=failed is None)
