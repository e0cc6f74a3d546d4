"""The rows of a batch: which rank has them, the way of their ids to the owners, and of rows and gradients."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch import Tensor

from ringdp.errors import InvalidArgumentError, MismatchError
from ringdp.kvstore.agreement import Operations
from ringdp.nn import wire
from ringdp.nn.owners import RowOwners


@dataclasses.dataclass
class Lookup:
    """The distinct rows that one batch of this rank needs, and what other ranks need of this one.

    Attributes:
        inverse: of each id of the batch, which of the distinct rows it is, as they are asked for.
        ask: how many rows this rank asks of each.
        answer: how many rows each asks of this one.
        wanted: rows of this rank's part of the table that are asked for, rank by rank; complete when `work` is done.
        work: the ids' way; None when it is done.
    """

    inverse: Tensor
    ask: list[int]
    answer: list[int]
    wanted: Tensor
    work: dist.Work | None
    sent: Tensor  # kept alive


class RowExchange:
    """Of one table over a group; None: this rank has all rows. All ranks call alike, in one order."""

    def __init__(self, owners: RowOwners, group: dist.ProcessGroup | None, how: str) -> None:
        self._owners, self._group, self._wire = owners, group, how
        self._operations = Operations(group)

    def look_up(self, ids: Tensor) -> Lookup:
        """Begin: distinct ids go to their owners.

        Raises:
            InvalidArgumentError: an id is not a row.
            MismatchError: another rank has such an id, or does something else.
        """
        ranks, rows = self._owners.ranks, self._owners.rows
        bad = ids.numel() > 0 and not (int(ids.min()) >= 0 and int(ids.max()) < rows)
        places, inverse = torch.unique(self._owners.places(ids if not bad else ids[:0]), return_inverse=True)
        owner = places % ranks
        order = torch.argsort(owner, stable=True)
        position = torch.empty_like(order)
        position[order] = torch.arange(len(order))
        mine = (places[order] // ranks).to(torch.int32)
        ask = torch.bincount(owner, minlength=ranks)
        if self._group is None:
            if bad:
                raise _not_a_row(ids, rows)
            return Lookup(position[inverse], [len(mine)], [len(mine)], mine, None, mine)
        told = torch.full_like(ask, -1) if bad else ask
        answer = torch.empty_like(told)
        with self._operations.named("ids of a sharded embedding, counted"):
            dist.all_to_all_single(answer, told, group=self._group)
        if bad:
            raise _not_a_row(ids, rows)
        if (answer < 0).any():
            peer = int((answer < 0).nonzero()[0])
            raise MismatchError(
                f"rank {peer} has an id that is not a row of the embedding", rank=self._owners.rank, peer=peer
            )
        counts, asked = answer.tolist(), ask.tolist()
        wanted = torch.empty(sum(counts), dtype=torch.int32)
        with self._operations.named("ids of a sharded embedding"):
            work = dist.all_to_all_single(wanted, mine, counts, asked, group=self._group, async_op=True)
        return Lookup(position[inverse], asked, counts, wanted, work, mine)

    def begin_rows(self, lookup: Lookup, table: Tensor) -> Pending:
        """The owners send the rows as they are now."""
        if lookup.work is not None:
            lookup.work.wait()
            lookup.work = None
        rows = wire.encode(table.index_select(0, lookup.wanted), self._wire if self._group is not None else "exact")
        return self._move(rows, lookup.answer, lookup.ask, table, "rows of a sharded embedding")

    def begin_gradients(self, lookup: Lookup, gradients: Tensor, table: Tensor) -> Pending:
        """Gradients of the rows, in the order of `Lookup.inverse`, go to the owners."""
        rows = wire.encode(gradients, self._wire if self._group is not None else "exact")
        return self._move(rows, lookup.ask, lookup.answer, table, "gradients of a sharded embedding")

    def finish(self, pending: Pending, dtype: torch.dtype) -> Tensor:
        """The rows or gradients that have come, ``[n, dim]``."""
        if pending.work is None:
            return pending.received
        pending.work.wait()
        return wire.decode(pending.received, pending.dim, dtype, self._wire)

    def _move(self, rows: Tensor, send: list[int], receive: list[int], table: Tensor, words: str) -> Pending:
        if self._group is None:
            return Pending(rows, rows, table.shape[1], None)
        received = wire.empty(sum(receive), table.shape[1], table.dtype, self._wire)
        with self._operations.named(words):
            work = dist.all_to_all_single(received, rows, receive, send, group=self._group, async_op=True)
        return Pending(received, rows, table.shape[1], work)


@dataclasses.dataclass
class Pending:
    """Rows on their way."""

    received: Tensor
    sent: Tensor  # kept alive
    dim: int
    work: dist.Work | None


def _not_a_row(ids: Tensor, rows: int) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"the ids lie between {int(ids.min())} and {int(ids.max())}, and the embedding has rows 0 to {rows - 1}"
    )
