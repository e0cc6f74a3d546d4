"""AsyncStore: `dist_async`, where no worker waits for another that is less than `staleness` clocks behind."""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import os
import statistics
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from ringdp import _C, refusals
from ringdp.errors import InvalidArgumentError, InvalidStateError, MembershipChanged, PeerLostError
from ringdp.job.byte_collectives import as_tensor, broadcast_bytes, together
from ringdp.job.elastic import is_elastic, places, use
from ringdp.kvstore import moving, slices
from ringdp.kvstore.attached import Attached
from ringdp.kvstore.keys import KeyName, Values, by_key, check_number, check_priority, summed
from ringdp.kvstore.messages import Kind
from ringdp.kvstore.service import Members, Service
from ringdp.kvstore.slices import Lot, Slices
from ringdp.kvstore.store import KVStore
from ringdp.kvstore.table import Table, hand_out
from ringdp.kvstore.updates import Optimizer
from ringdp.text import ranks_by_number

_log = logging.getLogger("ringdp.kvstore")
_DIRECT_BYTES = 64 << 10  # of a slice, from which its memory is sent and received without a copy
_SLOW_S = 0.1  # of waiting, below which no owner is called slow
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class AsyncStats:
    """Of one worker, since the store was made.

    Attributes:
        clock: how often it has called `step`.
        staleness: how many answers had which age: by how many clocks the slowest worker was behind this one.
        waited_s: by owner, for how long this worker waited for it: where one is far above the others, that owner or the
            way to it is slow.
        held_s: for how long it waited for slow workers.
        pushes: that this rank's owner has applied.
        lost_pushes: that count nowhere, because their worker or owner was lost.
    """

    clock: int
    staleness: Mapping[int, int]
    waited_s: Mapping[int, float]
    held_s: float
    pushes: int
    lost_pushes: int


class AsyncStore(KVStore):
    """Keys with values to which each worker pushes and from which it pulls when it likes: ``create("dist_async")``.

    As `KVStore`, with these differences. A push goes to the owners at once and does not wait; they apply it as it
    comes, by the optimizer or updater. Each worker has a clock, which ticks at `step`. With ``staleness=s`` a pull, or
    a push, waits until no worker is more than s clocks behind; with 0 the pushes of a clock are added up in the order
    of the workers and applied together, with the bits of ``dist_sync``. A worker sees its own pushes in what it pulls,
    and each key as one update left it.

    `init`, `set_optimizer`, `set_updater`, `load`, `state_dict` and `load_state_dict` are calls of all ranks. A worker
    that goes calls `close`, as the end of a program does; it returns when all workers have.

    Attributes:
        age: the largest of the answers to the last pull, in clocks.
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
        self._members, self._staleness = members, staleness
        self._compensates = compensates
        self._served = self._slices_of(members)
        self._service = Service(members, self._served, staleness)
        self._lots: dict[tuple[str, ...], dict[int, Lot]] = {}
        self._in_this_clock: set[str] = set()  # keys that were pushed; with staleness 0
        self._ages: collections.Counter[int] = collections.Counter()
        self._saves: dict[int, int] = {}  # the last one's requests, by owner, whose answers nobody has looked at
        self._sent: collections.Counter[int] = collections.Counter()  # pushes, by owner
        self._folder: str | None = None  # of the last save
        self._lost_pushes = 0
        self.age = 0

    @property
    def rank(self) -> int:
        """This rank's number among the workers, or among the servers, from 0."""
        peers = self._members.workers if self._members.works else self._members.owners
        return peers.index(self._members.rank)

    @property
    def num_workers(self) -> int:
        return len(self._members.workers)

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
            self._ask(Kind.PUSH, values, scale=scale)
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
        self._or_move(lambda: self._pull_into(wholes))
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
            self._take(self._ask(Kind.PUSHPULL, values, wholes, scale=scale), wholes)
        except PeerLostError as error:  # its part of this push is lost
            self._move(error)
            self._or_move(lambda: self._pull_into(wholes))
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
        stats, owner = self.stats(), self._service.owner
        lines = [
            f"rank {self._members.rank}, clock {stats.clock}: waited {sum(stats.waited_s.values()):.1f} s for owners"
            f" and {stats.held_s:.1f} s for slow workers; answers were up to {max(stats.staleness, default=0)} clocks"
            " old"
        ]
        if len(stats.waited_s) > 1:
            slowest = max(stats.waited_s, key=stats.waited_s.__getitem__)
            usual_s = statistics.median(it for rank, it in stats.waited_s.items() if rank != slowest)
            if stats.waited_s[slowest] > max(_SLOW_S, 2 * usual_s):
                lines.append(
                    f"the owner on rank {slowest}, or the way to it, is slow: {stats.waited_s[slowest]:.1f} s, others"
                    f" {usual_s:.1f} s"
                )
        if owner is not None and (behind := owner.behind()):
            lines.append(
                f"{ranks_by_number(behind)} {'is' if len(behind) == 1 else 'are'} behind, at clock {owner.clocks.least}"
            )
        return "\n".join(lines)

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
        group = self._table.group

        def find() -> bytes:
            if group is not None and group.rank() != 0:
                return b""
            return "\n".join(map(str, slices.newest(Path(folder)))).encode()

        def take(found: bytes | bytearray) -> int:
            contents = slices.read([Path(folder) / Path(one).name for one in found.decode().split("\n")])
            if self._service.owner is not None and self._served is not None:
                with self._service.owner.lock:
                    self._served.take(contents)
            return int(contents[0]["clock"])

        if group is None:
            return take(find())

        def on_all() -> int:
            found = broadcast_bytes(together(find, group, "load"), 0, group)
            return together(lambda: take(found), group, "load")

        return self._table.operations.run("loading of slices", on_all)

    def state_dict(self) -> dict[str, Any]:
        """As `KVStore.state_dict`, on all ranks; not of a store with servers: `save` it."""
        self._refuse_with_servers("state_dict")
        try:
            return super().state_dict()
        finally:
            self.barrier()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `KVStore.load_state_dict`; not of a store with servers: `load` it."""
        self._refuse_with_servers("load_state_dict")
        if self._table.keys:
            self.barrier()
        super().load_state_dict(state)
        self._agree()
        self.barrier()

    def save_optimizer_states(self, path: str | os.PathLike[str]) -> None:
        self._refuse_with_servers("save_optimizer_states")
        super().save_optimizer_states(path)
        self.barrier()

    def load_optimizer_states(self, path: str | os.PathLike[str]) -> None:
        self._refuse_with_servers("load_optimizer_states")
        super().load_optimizer_states(path)
        self.barrier()

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

    def _refuse(self, error: Exception) -> None:
        """Others do not wait for this rank's calls."""

    def _settle(self) -> None:
        if not self._table.settled:
            self._table.settle()
            self._agree()

    def _agree(self) -> None:
        self._lots.clear()
        self._service.agreed += 1
        table, owner = self._table, self._service.owner
        if owner is not None and self._served is not None:
            owner.agree(functools.partial(self._served.agree, list(table.keys.values()), table.slices, table.update))

    def _flush(self) -> set[str]:
        self.barrier()
        return set()

    def _flush_if_pushed(self) -> None:
        pass

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
        left = moving.Left(self._places, self._members, old.clock, self._sent, content, self._folder)
        try:
            found = moving.meet(group, left)
        finally:
            old.close(wait=False)
        self._lost_pushes += found.lost_pushes + (0 if owner is None else owner.lost_pushes)
        self._places, self._members, members = found.places, found.members, found.members
        self._table.deal_again(members.owners, members.rank)
        self._served = self._slices_of(members)
        if self._served is not None:
            self._served.agree(list(self._table.keys.values()), self._table.slices, self._table.update)
            self._served.take(found.contents)
        self._lots.clear()
        self._sent.clear()
        self._saves = {}
        self._service = Service(members, self._served, self._staleness, clocks=found.clocks, name=found.name)
        self._service.agreed = old.agreed
        if self._service.owner is not None:
            self._service.owner.agree_again(old.agreed)
        if members.rank == 0:
            _log.warning(
                "%s of a dist_async store lost with its slices: they are those of clock %d, and %d pushes of the ranks"
                " that are left count nowhere",
                ranks_by_number(found.lost),
                found.since,
                found.lost_pushes,
            )

    def _slices_of(self, members: Members) -> Slices | None:
        """Those of this rank, still without keys; None where it owns none."""
        if not members.owns:
            return None
        average = len(members.workers) if self._table.average else 1
        return Slices(members.owners.index(members.rank), average, compensates=self._compensates)

    def _given(self, what: str, key: KeyName | Sequence[KeyName], value: Values) -> dict[str, Tensor]:
        """Of a push, flat and on the CPU."""
        given = by_key(what, key, value)
        self._settle()
        self._table.check_all(what, given)
        self._require_update(given)
        values = {name: summed(tensors, torch.device("cpu")) for name, tensors in given.items()}
        for name, one in values.items():
            _require_finite(name, one, self._members.rank)
        if self._staleness == 0:
            self._in_this_clock.update(values)

        return values

    def _ask(
        self, kind: Kind, values: Mapping[str, Tensor], into: Mapping[str, Tensor] | None = None, *, scale: float = 1.0
    ) -> dict[int, int]:
        """Ask the owners of these keys, with the values of a push; `into` has the memory of a pull.

        Returns the sequence numbers, by owner.
        """
        lots, given = self._lots_of(tuple(values)), list(values.values())
        targets = [] if into is None else list(into.values())
        pushes = kind is not Kind.PULL
        lends_here = isinstance(self._table.update, Optimizer) and not self._table.average
        if pushes:
            self._sent.update(list(lots))

        def ask(owner: int) -> int:
            lot = lots[owner]
            direct = lot.place is not None and lot.total >= _DIRECT_BYTES and targets
            # A push that is waited for is sent from where it is; this rank's own update might change it there.
            lends = direct and (owner != self._members.rank or (lends_here and scale == 1.0))
            body = (lot.view(given[0]) if lends else lot.of_wholes.pack(given)) if pushes else lot.head
            memory = lot.view(targets[0]) if direct else None
            return self._service.ask(kind, owner, body, scale=scale, key=lot.key, into=memory)

        return self._service.ask_each(lots, ask)

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

    def _pull_into(self, wholes: Mapping[str, Tensor]) -> None:
        self._take(self._ask(Kind.PULL, wholes, wholes), wholes)

    def _take(self, asked: Mapping[int, int], wholes: Mapping[str, Tensor]) -> None:
        """The owners' answers."""
        lots, targets = self._lots_of(tuple(wholes)), list(wholes.values())
        self.age = 0
        for owner, sequence in asked.items():
            answer = self._service.answer_of(owner, sequence)
            self.age = max(self.age, answer.age)
            self._ages[answer.age] += 1
            if answer.payload is not None:
                lots[owner].of_wholes.unpack(answer.payload, targets)

    def _lots_of(self, names: tuple[str, ...]) -> dict[int, Lot]:
        """By owner, without those that have nothing of these keys; this rank last."""
        if (found := self._lots.get(names)) is None:
            keys = self._table.keys
            numbers = {name: number for number, name in enumerate(keys)}
            asked = [keys[name] for name in names], [numbers[name] for name in names]
            lots = {it: Lot.of(*asked, self._members.owners.index(it)) for it in self._service.remote_first()}
            found = self._lots[names] = {owner: lot for owner, lot in lots.items() if lot.total}
        return found

    def _require_update(self, given: Mapping[str, Any]) -> None:
        if self._staleness == 0:
            if again := self._in_this_clock & given.keys():
                raise InvalidStateError(
                    f"push: key {min(again)!r} was pushed in clock {self._service.clock} already, and with staleness=0"
                    " there is one push of a key in a clock: call step() first"
                )
        elif self._table.update.assigns:
            raise InvalidStateError(
                "push: dist_async needs an optimizer or an updater, as pushes are not added up before they count: call"
                " set_optimizer or set_updater on all ranks"
            )

    def _check_saves(self) -> None:
        saves, self._saves = self._saves, {}
        try:
            for owner, sequence in saves.items():
                self._service.answer_of(owner, sequence)
        except PeerLostError as error:
            self._move(error)

    def _refuse_with_servers(self, what: str) -> None:
        if self._members.owners != self._members.workers:
            raise InvalidStateError(f"{what}: the slices are on servers: call save(folder), and load(folder)")


def _require_finite(name: str, value: Tensor, rank: int) -> None:
    if (at := _C.first_non_finite(value)) >= 0:
        raise InvalidArgumentError(
            f"push: key {name!r} of rank {rank} has {value[at].item()} at element {at}: it would spoil the values of"
            " all workers, so it was not sent"
        )
