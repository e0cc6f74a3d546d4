"""AsyncStore: `dist_async`, where no worker waits for another that is less than `staleness` clocks behind."""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from ringdp import refusals
from ringdp.errors import InvalidArgumentError, InvalidStateError, MembershipChanged, PeerLostError
from ringdp.job.byte_collectives import as_tensor
from ringdp.job.elastic import is_elastic, places, use
from ringdp.kvstore import moving, slices
from ringdp.kvstore.async_stats import AsyncStats
from ringdp.kvstore.attached import Attached
from ringdp.kvstore.keys import KeyName, Values, by_key, check_number, check_priority, summed
from ringdp.kvstore.messages import Kind
from ringdp.kvstore.requests import Requests
from ringdp.kvstore.service import Members, Service
from ringdp.kvstore.slices import Slices
from ringdp.kvstore.store import KVStore
from ringdp.kvstore.table import Table, hand_out

Result = TypeVar("Result")


class AsyncStore(KVStore):
    """Keys with values to which each worker pushes and from which it pulls when it likes: ``create("dist_async")``.

    As `KVStore`, with these differences. A push goes to the owners at once and does not wait; they apply it as it
    comes, by the optimizer or updater. Each worker has a clock, which ticks at `step`. With ``staleness=s`` a pull, or
    a push, waits until no worker is more than s clocks behind; with 0 the pushes of a clock are added up in the order
    of the workers and applied together, with the bits of ``dist_sync``. A worker sees its own pushes in what it pulls,
    and each key as one update left it.

    `init`, `set_optimizer`, `set_updater`, `load`, `state_dict` and `load_state_dict` are calls of all ranks; the last
    two, and those of the optimizer's states, not of a store with servers: `save` and `load` it. A worker that goes
    calls `close`, as the end of a program does; it returns when all workers have.
    """

    def __init__(self, members: Members, reduce: str, staleness: int | None, compensates: bool) -> None:
        group, servers = members.group, 0 if members.owners == members.workers else len(members.owners)
        if group is not None and is_elastic(group):
            if staleness == 0:
                refusals.refuse("elastic", "waiting kvstore")
            use("async kvstore")
        self._places = (0,) if group is None else places(group)  # of the members' ranks, for good
        super().__init__("dist_async", None, reduce)
        described = f"dist_async, reduce={reduce!r}, {staleness=}, {servers=}, compensation={compensates}"
        self._table = Table(group, average=reduce == "mean", description=described, owners=members.owners)
        self._staleness, self._compensates = staleness, compensates
        self._ages: collections.Counter[int] = collections.Counter()
        self._open(members)
        self._in_this_clock: set[str] = set()  # keys that were pushed; with staleness 0
        self._saves: dict[int, int] = {}  # the last one's requests, by owner, whose answers nobody has looked at
        self._folder: str | None = None  # of the last save
        self._lost_pushes = 0

    @property
    def rank(self) -> int:
        """This rank's number among the workers, or among the servers, from 0."""
        peers = self._members.workers if self._members.works else self._members.owners
        return peers.index(self._members.rank)

    @property
    def num_workers(self) -> int:
        return len(self._members.workers)

    @property
    def age(self) -> int:
        """The largest of the answers to the last pull, in clocks."""
        return self._requests.age

    @property
    def is_server(self) -> bool:
        """This rank serves alone: it calls `serve`."""
        return not self._members.works

    # Values.

    def push(self, key: KeyName | Sequence[KeyName], value: Values, priority: int = 0, *, scale: float = 1.0) -> None:
        """Send gradients to the owners, which apply them; they are copied.

        Args:
            scale: the sum of the gradients is multiplied by it before the update.

        Raises:
            InvalidArgumentError: a key that was never initialised, a value of another shape or type, or one with a NaN
                or an infinity.
            InvalidStateError: with another staleness than 0 the store has no optimizer and no updater; with 0 the key
                was pushed in this clock already.
            PeerLostError: an owner is lost.
        """
        check_priority("push", priority)
        scale = check_number("push: scale", scale)
        values = self._given("push", key, value)
        try:
            self._requests.push(values, scale)
        except PeerLostError as error:  # its part of this push is lost
            self._move(error)

    def pull(self, key: KeyName | Sequence[KeyName], out: Values, priority: int = 0) -> None:
        """Put the values into the tensors `out`; waits until no worker is too far behind.

        Raises:
            InvalidArgumentError: a key that was never initialised, or a tensor of another shape or type.
            InvalidStateError: with staleness 0 the key was pushed in this clock, which `step` ends.
            PeerLostError: an owner is lost.
            RingTimeoutError: a worker does not come; it is named.
        """
        check_priority("pull", priority)
        wanted, wholes = self._wanted("pull", key, out)
        self._or_move(lambda: self._requests.pull(wholes))
        for name, tensors in wanted.items():
            hand_out(wholes[name], tensors)

    def pushpull(
        self,
        key: KeyName | Sequence[KeyName],
        value: Values,
        out: Values = None,
        priority: int = 0,
        *,
        scale: float = 1.0,
    ) -> None:
        """`push`, then `pull`, in one message to each owner; with staleness 0 there is a `step` between them."""
        out = value if out is None else out
        if self._staleness == 0:
            self.push(key, value, priority, scale=scale)
            self.step()
            self.pull(key, out, priority)
            return
        check_priority("pushpull", priority)
        scale = check_number("pushpull: scale", scale)
        wanted, wholes = self._wanted("pushpull", key, out)
        values = self._given("pushpull", key, value)
        try:
            self._requests.pushpull(values, wholes, scale)
        except PeerLostError as error:  # its part of this push is lost
            self._move(error)
            self._or_move(lambda: self._requests.pull(wholes))
        for name, tensors in wanted.items():
            hand_out(wholes[name], tensors)

    def step(self) -> None:
        """This worker's clock ticks.

        Raises:
            PeerLostError: an owner is lost.
        """
        self._settle()
        self._in_this_clock.clear()
        try:
            self._service.step()
        except PeerLostError as error:
            self._move(error)  # the other owners know the clock

    def flush(self) -> None:
        """Wait until the owners have done all that this worker has asked of them."""
        self._settle()
        self._or_move(lambda: self._service.sync())

    def barrier(self) -> None:
        """As `flush`, and wait until all workers have come here."""
        self._settle()
        self._or_move(lambda: self._service.barrier())

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set it for this worker's pushes from here on, and those of others that come after: one worker's call is
        enough. Raises InvalidArgumentError where it is not a finite number from 0 on."""
        rate = check_number("set_learning_rate: a learning rate", learning_rate, at_least=0.0)
        self._optimizer("set_learning_rate")
        self._settle()
        self._service.ask_all(Kind.SET, as_tensor(struct.pack("<d", rate)))

    def stats(self) -> AsyncStats:
        """What this worker has waited for, and how old the answers were."""
        service, owner = self._service, self._service.owner
        return AsyncStats(
            service.clock,
            dict(sorted(self._ages.items())),
            dict(service.waited_s),
            service.held_s,
            0 if owner is None else owner.pushes.total(),
            self._lost_pushes + (0 if owner is None else owner.lost_pushes),
        )

    def report(self) -> str:
        """What holds this worker up, in words: owners that are slow, or far, and workers that are."""
        return self.stats().report(self._members.rank, self._service.owner)

    # Servers, and the end.

    def serve(self) -> None:
        """Of a rank that serves alone: returns when all workers have closed the store.

        Raises:
            InvalidStateError: it is a worker.
        """
        if not self.is_server:
            raise InvalidStateError(f"serve: rank {self._members.rank} is a worker of this store")
        self._settle()
        self.close()

    def close(self) -> None:
        """Leave, and serve the others until all workers have left. Idempotent.

        Raises:
            SystemResourceError: a file of the last `save` could not be written.
        """
        try:
            self._check_saves()
        finally:
            self._or_move(lambda: self._service.close())

    def __enter__(self) -> AsyncStore:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._service.close(wait=False)

    # Saved states.

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Begin to write each owner's slices and optimizer state to a file of `folder`; on all workers, after the same
        number of steps. Returns at once; requests that follow wait until all workers have come here and the owners have
        copied their slices: the files are of one clock.

        Raises:
            SystemResourceError: a file of the `save` before this one could not be written.
        """
        self._settle()
        self._check_saves()
        self._folder = os.fspath(folder)
        body = as_tensor(self._folder.encode())
        self._saves = self._or_move(lambda: self._service.ask_all(Kind.SAVE, body))

    def load(self, folder: str | os.PathLike[str]) -> int:
        """Read the newest files of `save` of all owners, at any number of ranks; on all ranks. Returns their clock.

        Raises:
            InvalidArgumentError: there are none, or they do not fit the keys or the optimizer.
            SystemResourceError: a file cannot be read; on all ranks.
        """
        self._settle()
        if not self.is_server:
            self._service.sync()

        def take(contents: Sequence[Mapping[str, Any]]) -> None:
            if self._service.owner is not None and self._served is not None:
                with self._service.owner.lock:
                    self._served.take(contents)

        return slices.load(folder, self._table.group, self._table.operations, take)

    # What is of all ranks at once.

    def attach(self, model: nn.Module) -> Attached:
        """Raises InvalidArgumentError: ranks that step alone have no common backward."""
        raise InvalidArgumentError(
            "attach: ranks of dist_async do not push together: call push, step and pull, or take a Trainer"
        )

    def set_gradient_compression(self, compression: Any, **options: Any) -> NoReturn:
        """Raises InvalidArgumentError."""
        refusals.refuse("async kvstore", "compressed kvstore")

    # Private methods.

    def _exchange(self, names: list[str], grads: list[Tensor], values: list[Tensor], scale: float) -> None:
        self.push(names, grads, scale=scale)
        self.step()
        self.pull(names, values)

    @contextlib.contextmanager
    def _as_one(self, what: str) -> Iterator[None]:
        if self._members.owners != self._members.workers:
            raise InvalidStateError(f"{what}: the slices are on servers: call save(folder), and load(folder)")
        if self._table.keys:
            self.barrier()
        yield
        if what == "load_state_dict":
            self._agree()
        self.barrier()

    def _refuse(self, error: Exception) -> None:
        """Others do not wait for this rank's calls."""

    def _settle(self) -> None:
        if not self._table.settled:
            self._table.settle()
            self._agree()

    def _agree(self) -> None:
        self._requests.forget()
        self._service.agreed += 1
        table, owner = self._table, self._service.owner
        if owner is not None and self._served is not None:
            owner.agree(functools.partial(self._served.agree, list(table.keys.values()), table.slices, table.update))

    def _flush(self) -> set[str]:
        self.barrier()
        return set()

    def _or_move(self, call: Callable[[], Result]) -> Result:
        """As often as an owner is lost meanwhile."""
        while True:
            try:
                return call()
            except PeerLostError as error:
                self._move(error)

    def _move(self, error: PeerLostError) -> None:
        """Go on with the owners that are left. Raises the error where the job is not elastic."""
        group, old, owner = self._table.group, self._service, self._service.owner
        if group is None or not is_elastic(group) or isinstance(error, MembershipChanged):
            raise error
        old.drain()
        content = None
        if owner is not None and self._served is not None:
            with owner.lock:
                content = self._served.content(old.clock, owner.pushes)
        left = moving.Left(self._places, self._members, old.clock, self._requests.sent, content, self._folder)
        try:
            found = moving.meet(group, left)
        finally:
            old.close(wait=False)
        self._lost_pushes += found.lost_pushes + (0 if owner is None else owner.lost_pushes)
        self._places = found.places
        self._table.deal_again(found.members.owners, found.members.rank)
        self._open(found.members, found.contents, clocks=found.clocks, name=found.name, agreed=old.agreed)
        self._saves = {}

    def _open(self, members: Members, contents: Sequence[Mapping[str, Any]] = (), **known: Any) -> None:
        """Connect to the owners, one of which this rank may be: of nothing, or, in a store that goes on, of its part of
        the contents; `known`: see `Service`."""
        self._members, self._served = members, None
        if members.owns:
            average = len(members.workers) if self._table.average else 1
            place = members.owners.index(members.rank)
            self._served = Slices(place, average, compensates=self._compensates)
            if contents:
                self._served.agree(list(self._table.keys.values()), self._table.slices, self._table.update)
                self._served.take(contents)
        self._service = Service(members, self._served, self._staleness, **known)
        self._requests = Requests(self._service, self._table, self._ages)

    def _given(self, what: str, key: KeyName | Sequence[KeyName], value: Values) -> dict[str, Tensor]:
        """Of a push, flat and on the CPU."""
        given = by_key(what, key, value)
        self._settle()
        self._table.check_all(what, given)
        if again := self._in_this_clock & given.keys():
            raise InvalidStateError(
                f"push: key {min(again)!r} was pushed in clock {self._service.clock} already, and with staleness=0"
                " there is one push of a key in a clock: call step() first"
            )
        if self._staleness != 0 and self._table.update.assigns:
            raise InvalidStateError(
                "push: dist_async needs an optimizer or an updater, as pushes are not added up before they count: call"
                " set_optimizer or set_updater on all ranks"
            )
        values = {name: summed(tensors, torch.device("cpu")) for name, tensors in given.items()}
        self._requests.require_finite(values)
        if self._staleness == 0:
            self._in_this_clock.update(values)
        return values

    def _wanted(
        self, what: str, key: KeyName | Sequence[KeyName], out: Values
    ) -> tuple[dict[str, list[Tensor]], dict[str, Tensor]]:
        """The tensors of a pull, and for each key flat memory on the CPU: of the first tensor where it has such."""
        wanted = by_key(what, key, out)
        self._settle()
        self._table.check_all(what, wanted)
        if again := self._in_this_clock & wanted.keys():
            raise InvalidStateError(
                f"pull: key {min(again)!r} was pushed in clock {self._service.clock}, and with staleness=0 a push"
                " counts when all workers have ended its clock: call step() first"
            )
        return wanted, {name: self._table.target(name, tensors) for name, tensors in wanted.items()}

    def _check_saves(self) -> None:
        saves, self._saves = self._saves, {}
        try:
            for owner, sequence in saves.items():
                self._service.answer_of(owner, sequence)
        except PeerLostError as error:
            self._move(error)
