"""What a worker of `dist_async` asks of the owners, by keys."""

from __future__ import annotations

import collections
from collections.abc import Mapping

from torch import Tensor

from ringdp import _C
from ringdp.errors import InvalidArgumentError
from ringdp.kvstore.messages import Kind
from ringdp.kvstore.service import Service
from ringdp.kvstore.slices import Lot
from ringdp.kvstore.table import Table
from ringdp.kvstore.updates import Optimizer

_DIRECT_BYTES = 64 << 10  # of a slice, from which its memory is sent and received without a copy


class Requests:
    """One message to each owner that has something of the keys. Its plans of them are those of the table's keys: the
    caller has them forgotten where those change. Used by one thread, that of the program.

    Args:
        ages: how many answers had which age; it counts there.

    Attributes:
        sent: pushes, by owner.
        age: the largest of the answers to the last pull, in clocks.
    """

    def __init__(self, service: Service, table: Table, ages: collections.Counter[int]) -> None:
        self._service, self._table, self._ages = service, table, ages
        self._lots: dict[tuple[str, ...], dict[int, Lot]] = {}
        self.sent: collections.Counter[int] = collections.Counter()
        self.age = 0

    def forget(self) -> None:
        """The keys have changed."""
        self._lots.clear()

    def require_finite(self, values: Mapping[str, Tensor]) -> None:
        """Raises InvalidArgumentError where one has a NaN or an infinity."""
        for name, value in values.items():
            if (at := _C.first_non_finite(value)) >= 0:
                raise InvalidArgumentError(
                    f"push: key {name!r} of rank {self._service.members.rank} has {value[at].item()} at element {at}:"
                    " it would spoil the values of all workers, so it was not sent"
                )

    # Each raises PeerLostError when the other owners have been asked; values and memory are flat and on the CPU.

    def push(self, values: Mapping[str, Tensor], scale: float) -> None:
        self._ask(Kind.PUSH, values, {}, scale)

    def pull(self, wholes: Mapping[str, Tensor]) -> None:
        self._take(self._ask(Kind.PULL, wholes, wholes, 1.0), wholes)

    def pushpull(self, values: Mapping[str, Tensor], wholes: Mapping[str, Tensor], scale: float) -> None:
        self._take(self._ask(Kind.PUSHPULL, values, wholes, scale), wholes)

    def _ask(
        self, kind: Kind, values: Mapping[str, Tensor], into: Mapping[str, Tensor], scale: float
    ) -> dict[int, int]:
        """Ask the owners of these keys, with the values of a push; `into` has the memory of a pull.

        Returns the sequence numbers, by owner.
        """
        lots, given = self._lots_of(tuple(values)), list(values.values())
        targets = list(into.values())
        pushes = kind is not Kind.PULL
        lends_here = isinstance(self._table.update, Optimizer) and not self._table.average
        if pushes:
            self.sent.update(list(lots))

        def ask(owner: int) -> int:
            lot = lots[owner]
            direct = lot.place is not None and lot.total >= _DIRECT_BYTES and targets
            # A push that is waited for is sent from where it is; this rank's own update might change it there.
            lends = direct and (owner != self._service.members.rank or (lends_here and scale == 1.0))
            body = (lot.view(given[0]) if lends else lot.of_wholes.pack(given)) if pushes else lot.head
            memory = lot.view(targets[0]) if direct else None
            return self._service.ask(kind, owner, body, scale=scale, key=lot.key, into=memory)

        return self._service.ask_each(lots, ask)

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
            lots = {it: Lot.of(*asked, self._service.members.owners.index(it)) for it in self._service.remote_first()}
            found = self._lots[names] = {owner: lot for owner, lot in lots.items() if lot.total}
        return found
