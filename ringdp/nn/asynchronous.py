"""Rows of an asynchronous table: a worker asks their owners for them and pushes gradients, without other workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ringdp import _C
from ringdp.kvstore.messages import Kind, Message
from ringdp.kvstore.owner import Push
from ringdp.kvstore.service import Members, Service
from ringdp.nn.exchange import Lookup, Pending, RowExchange
from ringdp.nn.shards import Shard
from ringdp.nn.sparse_updates import SparseUpdate


class Rows:
    """An owner's: its shard and the update of it; see `Served`. Guarded by the `Owner`'s lock.

    A pull is int32 rows, and its answer their codes. A push is their number, int64, the rows, and the codes of their
    gradients.
    """

    def __init__(self, shard: Shard, update: SparseUpdate, wire: str, divisor: float) -> None:
        self._shard, self._update, self._wire, self._divisor = shard, update, wire, divisor

    def apply(self, pushes: Sequence[Push]) -> None:
        table = self._shard.table
        codes, which = [], []
        for push in pushes:
            count = int(push.body[:8].view(torch.int64))
            end = 8 + 4 * count
            which.append(push.body[8:end].view(torch.int32))
            code = _C.encoded_rows(table, count, self._wire)
            code.view(torch.uint8).view(-1).copy_(push.body[end:])
            codes.append(code)
        rows, sums = _C.sum_rows(table, codes, which, self._wire, self._divisor)
        self._update.apply(table, self._shard.state, rows, sums)

    def answer(self, asked: Message) -> Tensor:
        assert asked.payload is not None
        return _C.gather_rows(self._shard.table, asked.payload.view(torch.int32), self._wire).view(torch.uint8).view(-1)

    def set(self, body: Tensor | None) -> None:
        """There is nothing to set."""

    def writer(self, folder: str, clock: int, pushes: Mapping[int, int]) -> Callable[[], None]:
        """`ShardedEmbedding.save` writes, when all workers have stopped."""
        raise NotImplementedError


@dataclasses.dataclass
class _Asked(Pending):
    """Rows for which the owners have been asked."""

    service: Service | None = None
    answers: Sequence[tuple[int, int, int, int]] = ()  # owner, sequence, and the first and last row of `received`

    def wait(self) -> Tensor:
        assert self.service is not None
        answers, self.answers = self.answers, ()
        for owner, sequence, begin, end in answers:
            payload = self.service.answer_of(owner, sequence).payload
            assert payload is not None
            self.received[begin:end].view(torch.uint8).view(-1).copy_(payload)
        return self.received


class AsyncRowExchange(RowExchange):
    """Of one table of a fixed size. Each worker calls it at its own pace; `step` ends its clock."""

    def __init__(
        self, shard: Shard, members: Members, update: SparseUpdate, wire: str, divisor: float, staleness: int | None
    ) -> None:
        super().__init__(shard, None, update, wire, divisor)
        self.wire = wire if len(members.owners) > 1 else "exact"  # as where ranks look up together
        self.service = Service(members, Rows(shard, update, self.wire, divisor), staleness)

    def refuse(self, error: Exception) -> None:
        """No other worker waits for this one."""

    def look_up(self, ids: Tensor, counting: bool) -> Lookup:
        asked = self._shard.ask(ids, counting)
        return Lookup(asked.inverse, asked.per_owner, [], asked.message, None, asked.message)

    def begin_rows(self, lookup: Lookup, clock: int) -> Pending:
        del clock
        received = _C.encoded_rows(self._shard.table, len(lookup.message), self.wire)
        answers = []
        places = self._places(lookup)
        for owner in self.service.remote_first():
            begin, end = places[owner]
            if begin < end:
                sequence = self.service.ask(Kind.PULL, owner, lookup.message[begin:end].view(torch.uint8))
                answers.append((owner, sequence, begin, end))
        return _Asked(received, received, None, self.service, answers)

    def push(self, used: Sequence[tuple[Lookup, Tensor]]) -> None:
        """The gradients of some lookups, one message to each owner, and the end of this worker's clock."""
        codes = [self.encoded_gradient(rows) for _, rows in used]
        places = [self._places(lookup) for lookup, _ in used]
        for owner in self.service.remote_first():
            spans = [it[owner] for it in places]
            number = torch.tensor([sum(end - begin for begin, end in spans)], dtype=torch.int64, device="cpu")
            ids = [lookup.message[begin:end] for (lookup, _), (begin, end) in zip(used, spans, strict=True)]
            rows = [code[begin:end] for code, (begin, end) in zip(codes, spans, strict=True)]
            parts = [number, *ids, *rows]
            body = torch.cat([it.contiguous().view(torch.uint8).view(-1) for it in parts if it.numel()])
            self.service.ask(Kind.PUSH, owner, body)
        self.service.step()

    def step_of(self, updates: int) -> int:
        """Its clock: owners count the pushes that they had."""
        self.barrier()
        return self.service.clock

    def barrier(self) -> None:
        self.service.barrier()

    def close(self) -> None:
        self.service.close()

    def _places(self, lookup: Lookup) -> list[tuple[int, int]]:
        """By owner, its first and last of the distinct rows."""
        ends = torch.tensor(lookup.ask, dtype=torch.int64, device="cpu").cumsum(0).tolist()
        return list(zip([0, *ends[:-1]], ends, strict=True))
