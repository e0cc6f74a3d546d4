"""This rank's part of a table: its rows, their optimizer state, and the row of each id.

`FixedShard` has the rows of a table of a known size; `GrowingShard` gives rows to ids when they have come often enough.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ringdp import _C, values
from ringdp.errors import InvalidArgumentError
from ringdp.nn.owners import RowOwners
from ringdp.nn.sparse_updates import SparseUpdate

_BLOCK_ROWS = 1 << 14
_FIRST_ROWS = 1 << 10


@dataclasses.dataclass(frozen=True)
class Normal:
    """The rows at the start: normal numbers, the same for any number of ranks. Those of a growing table are nearly
    normal, by id and seed.

    Raises:
        InvalidArgumentError: another value.
    """

    std: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        values.number("Normal", "std", self.std, "from 0 on", lambda it: it >= 0)
        values.whole("Normal", "seed", self.seed)


@dataclasses.dataclass(frozen=True)
class Growing:
    """A table that takes any int64 as an id: ``ShardedEmbedding(Growing(admit_after=3, evict_after=10_000), 16)``.

    Args:
        admit_after: an id gets a row in the forward in which it has occurred so often in training, over all ranks.
        evict_after: an id that has not occurred in more than so many steps is forgotten with its row; None: never.

    Raises:
        InvalidArgumentError: another value.
    """

    admit_after: int = 1
    evict_after: int | None = None

    def __post_init__(self) -> None:
        values.whole("Growing", "admit_after", self.admit_after, 1, 2**62 - 1)
        if self.evict_after is not None:
            values.whole("Growing", "evict_after", self.evict_after, 1, 2**62 - 1)


class Asked(NamedTuple):
    """The distinct ids of a batch, as they travel to their owners.

    Attributes:
        message: ``[n]`` or ``[n, 2]``, owner by owner.
        per_owner: how many each rank owns.
        inverse: int32, of each id of the batch which of the distinct ones it is.
    """

    message: Tensor
    per_owner: list[int]
    inverse: Tensor


class Shard(Protocol):
    """Of one table, on one rank. Used by one thread.

    Attributes:
        table: ``[rows, dim]``; rows of a growing table without an id are undefined.
        state: the optimizer's state, ``[rows, width]`` each.
    """

    table: Tensor
    state: dict[str, Tensor]

    def ask(self, ids: Tensor, counting: bool) -> Asked:
        """The distinct `ids`, int64. Raises InvalidArgumentError where one is not a row."""

    def room(self, count: int) -> Tensor:
        """Memory for so many ids of a message."""

    def find(self, message: Tensor, clock: int) -> Tensor:
        """Row numbers, int32, of the ids that came in a message at step `clock`; -1: the id has no row."""

    def count(self, clock: int) -> int:
        """How many rows ids have here."""

    def content(self, clock: int) -> dict[str, Any]:
        """For a file."""

    def take(self, content: Mapping[str, Any], rank: int, ranks: int) -> None:
        """Take this rank's rows of the file of `rank` of `ranks`, which wrote a shard of the same table."""

    def clear(self) -> None:
        """Before files are taken."""


class FixedShard:
    """Of a table of `rows` rows; see `Shard`."""

    def __init__(self, owners: RowOwners, dim: int, update: SparseUpdate, dtype: torch.dtype) -> None:
        self._owners = owners
        self.table = torch.empty(owners.count, dim, dtype=dtype, device="cpu")
        self.state = update.new_state(owners.count, dim, dtype)

    def fill(self, weight: Tensor | Normal) -> None:
        """Begin with the rows of `weight`."""
        owners, table = self._owners, self.table
        if isinstance(weight, Tensor):
            table.copy_(weight.detach()[owners.ids(self._places())])
            return
        for number, begin in enumerate(range(0, owners.rows, _BLOCK_ROWS)):
            generator = torch.Generator(device="cpu").manual_seed(weight.seed * 1_000_003 + number)
            count = min(_BLOCK_ROWS, owners.rows - begin)
            block = torch.randn(count, table.shape[1], generator=generator, dtype=table.dtype, device="cpu")
            block.mul_(weight.std)
            first = (owners.rank - begin) % owners.ranks
            here = block[first :: owners.ranks]
            at = (begin + first) // owners.ranks
            table[at : at + len(here)] = here

    def ask(self, ids: Tensor, counting: bool) -> Asked:
        del counting
        rows = self._owners.rows
        if len(ids):
            least, most = torch.aminmax(ids)
            if int(least) < 0 or int(most) >= rows:
                raise InvalidArgumentError(
                    f"the ids lie between {int(least)} and {int(most)}, and the embedding has rows 0 to {rows - 1}"
                )
        return Asked(*_C.ask_rows(ids, rows, self._owners.factor, self._owners.ranks))

    def room(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int32, device="cpu")

    def find(self, message: Tensor, clock: int) -> Tensor:
        del clock
        return message

    def count(self, clock: int) -> int:
        del clock
        return self._owners.count

    def content(self, clock: int) -> dict[str, Any]:
        del clock
        return {"rows": self.table, "state": self.state}

    def take(self, content: Mapping[str, Any], rank: int, ranks: int) -> None:
        mine = self._places()
        there = (mine % ranks == rank).nonzero().view(-1)
        source = mine[there] // ranks
        self.table[there] = content["rows"][source].to(self.table.dtype)
        for name, tensor in self.state.items():
            tensor[there] = content["state"][name][source].to(tensor.dtype)

    def clear(self) -> None:
        pass  # all rows are overwritten

    def _places(self) -> Tensor:
        return torch.arange(self._owners.rank, self._owners.rows, self._owners.ranks, dtype=torch.int64, device="cpu")


class GrowingShard:
    """Of a table that grows; see `Shard` and csrc/kernels/row_index.h.

    Args:
        rank, ranks: this rank owns the ids whose hash leaves `rank`, divided by `ranks`.
        start: of the numbers with which a row begins, which its id decides.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        dim: int,
        update: SparseUpdate,
        dtype: torch.dtype,
        growing: Growing,
        start: Normal,
    ) -> None:
        self._rank, self._ranks, self._start = rank, ranks, start
        self._limits = growing.admit_after, growing.evict_after or 0
        self._directory = _C.RowDirectory(*self._limits)
        self.table = torch.zeros(_FIRST_ROWS, dim, dtype=dtype, device="cpu")
        self.state = update.new_state(_FIRST_ROWS, dim, dtype)

    def ask(self, ids: Tensor, counting: bool) -> Asked:
        return Asked(*_C.ask_hashed(ids, self._ranks, counting))

    def room(self, count: int) -> Tensor:
        return torch.empty(count, 2, dtype=torch.int64, device="cpu")

    def find(self, message: Tensor, clock: int) -> Tensor:
        rows, new_ids, new_rows = self._directory.look_up(message, clock)
        if len(new_ids):
            self._reserve()
            _C.fill_rows(self.table, new_rows, new_ids, self._start.seed, self._start.std)
            for tensor in self.state.values():
                tensor.index_fill_(0, new_rows.to(torch.int64), 0.0)
        return rows

    def count(self, clock: int) -> int:
        return self._directory.count(clock)

    def content(self, clock: int) -> dict[str, Any]:
        entries = self._directory.entries(clock)
        rows = entries[:, 3][entries[:, 3] >= 0]
        return {
            "entries": entries,
            "rows": self.table[rows],
            "state": {name: tensor[rows] for name, tensor in self.state.items()},
        }

    def take(self, content: Mapping[str, Any], rank: int, ranks: int) -> None:
        del rank, ranks
        entries = content["entries"]
        mine = _C.owner_of_ids(entries[:, 0].contiguous(), self._ranks) == self._rank
        has_row = entries[:, 3] >= 0
        here = self._directory.add(entries[mine].contiguous())
        self._reserve()
        source = (has_row.cumsum(0) - 1)[mine & has_row]
        target = here[here >= 0].to(torch.int64)
        self.table[target] = content["rows"][source].to(self.table.dtype)
        for name, tensor in self.state.items():
            tensor[target] = content["state"][name][source].to(tensor.dtype)

    def clear(self) -> None:
        self._directory = _C.RowDirectory(*self._limits)

    def _reserve(self) -> None:
        needed, have = self._directory.capacity, len(self.table)
        if needed > have:
            more = max(needed, have + have // 2) - have
            self.table = torch.cat([self.table, self.table.new_zeros(more, self.table.shape[1])])
            self.state = {
                name: torch.cat([tensor, tensor.new_zeros(more, tensor.shape[1])])
                for name, tensor in self.state.items()
            }
