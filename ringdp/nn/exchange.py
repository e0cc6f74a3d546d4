"""The exchange of a batch's rows: ids go to the owners, rows come back, gradients go to the owners."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ringdp import _C
from ringdp.errors import InvalidArgumentError, MismatchError
from ringdp.kvstore.agreement import Operations
from ringdp.nn.shards import Asked, Shard
from ringdp.nn.sparse_updates import SparseUpdate


@dataclasses.dataclass
class Lookup:
    """The distinct rows that one batch of this rank needs, and the rows that other ranks need of this one.

    Attributes:
        inverse: int32, of each id of the batch, which of the distinct rows it is, as they are asked for.
        ask: how many rows this rank asks of each.
        answer: how many rows each asks of this one.
        message: the ids that this rank is asked for, rank by rank; complete when `work` is done.
        work: the ids' way; None when it is done.
        wanted: int32, the rows of these ids, when they have been looked up.
    """

    inverse: Tensor
    ask: list[int]
    answer: list[int]
    message: Tensor
    work: dist.Work | None
    sent: Tensor  # kept alive
    wanted: Tensor | None = None


@dataclasses.dataclass
class Pending:
    """Encoded rows on their way."""

    received: Tensor
    sent: Tensor  # kept alive
    work: dist.Work | None

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.received


class RowExchange:
    """Of one table over a group; None: this rank has all rows. All ranks call alike, in one order.

    Args:
        update: of this rank's rows.
        wire: the code of rows: "exact", "bfloat16" or "int8".
        divisor: of the gradients' sums.
    """

    def __init__(
        self, shard: Shard, group: dist.ProcessGroup | None, update: SparseUpdate, wire: str, divisor: float
    ) -> None:
        self._shard, self._group = shard, group
        self._update, self._divisor = update, divisor
        self.wire = wire if group is not None else "exact"
        self._operations = Operations(group, "a sharded embedding")

    def refuse(self, error: Exception) -> None:
        """Give `error` to the ranks that wait for this one; see `Operations.refuse`."""
        self._operations.refuse(error)

    def look_up(self, ids: Tensor, counting: bool) -> Lookup:
        """Begin: distinct ids go to their owners.

        Args:
            ids: int64 ``[n]``.
            counting: they occur in training, which a growing table counts.

        Raises:
            InvalidArgumentError: an id is not a row.
            MismatchError: another rank has such an id, or does something else.
        """
        try:
            asked = self._shard.ask(ids, counting)
        except InvalidArgumentError:
            if self._group is not None:
                self._count([-1] * self._group.size(), self._group)
            raise
        if self._group is None:
            return Lookup(asked.inverse, asked.per_owner, asked.per_owner, asked.message, None, asked.message)
        return self._send(asked, self._group)

    def begin_rows(self, lookup: Lookup, clock: int) -> Pending:
        """The owners look the ids up, at step `clock`, and send the rows as they are now."""
        if lookup.work is not None:
            lookup.work.wait()
            lookup.work = None
        lookup.wanted = self._shard.find(lookup.message, clock)
        rows = _C.gather_rows(self._shard.table, lookup.wanted, self.wire)
        return self._move(rows, lookup.answer, lookup.ask, "rows of a sharded embedding")

    def push(self, used: Sequence[tuple[Lookup, Tensor]]) -> None:
        """Update the rows by the gradients of all ranks' lookups since the last push."""
        words = "gradients of a sharded embedding"
        on_their_way = [
            self._move(self.encoded_gradient(rows), lookup.ask, lookup.answer, words) for lookup, rows in used
        ]
        codes = [pending.wait() for pending in on_their_way]
        wanted = [lookup.wanted for lookup, _ in used if lookup.wanted is not None]  # all of them
        shard = self._shard
        rows, sums = _C.sum_rows(shard.table, codes, wanted, self.wire, self._divisor)
        self._update.apply(shard.table, shard.state, rows, sums)

    def encoded_gradient(self, rows: Tensor) -> Tensor:
        """Of the rows of a lookup, in the order of `Lookup.inverse`; zeros where backward did not come to them."""
        gradient = torch.zeros_like(rows) if rows.grad is None else rows.grad
        return _C.encode_rows(gradient.contiguous(), self.wire)

    def step_of(self, updates: int) -> int:
        """The step of all ranks, where this one's rows have had so many updates: for files. Waits for other ranks, if
        they are at steps of their own."""
        return updates

    def barrier(self) -> None:
        """All that ranks have pushed counts: as always where they call alike."""

    def close(self) -> None:
        """Nothing has to end."""

    def decoded(self, pending: Pending) -> Tensor:
        """The rows that have come, ``[n, dim]``."""
        received = pending.wait()
        if self.wire == "exact":
            return received
        table = self._shard.table
        rows = torch.empty(len(received), table.shape[1], dtype=table.dtype, device="cpu")
        _C.decode_rows(received, rows, self.wire)
        return rows

    def _send(self, asked: Asked, group: dist.ProcessGroup) -> Lookup:
        answer = self._count(asked.per_owner, group)
        for peer, count in enumerate(answer):
            if count < 0:
                raise MismatchError(
                    f"rank {peer} has an id that is not a row of the embedding", rank=group.rank(), peer=peer
                )
        message = self._shard.room(sum(answer))
        with self._operations.named("ids of a sharded embedding"):
            work = dist.all_to_all_single(message, asked.message, answer, asked.per_owner, group=group, async_op=True)
        return Lookup(asked.inverse, asked.per_owner, answer, message, work, asked.message)

    def _count(self, counts: Sequence[int], group: dist.ProcessGroup) -> list[int]:
        answer = torch.empty(len(counts), dtype=torch.int64, device="cpu")
        with self._operations.named("ids of a sharded embedding, counted"):
            dist.all_to_all_single(answer, torch.tensor(counts, dtype=torch.int64, device="cpu"), group=group)
        return answer.tolist()

    def _move(self, rows: Tensor, send: list[int], receive: list[int], words: str) -> Pending:
        if self._group is None:
            return Pending(rows, rows, None)
        received = _C.encoded_rows(self._shard.table, sum(receive), self.wire)
        with self._operations.named(words):
            work = dist.all_to_all_single(received, rows, receive, send, group=self._group, async_op=True)
        return Pending(received, rows, work)
