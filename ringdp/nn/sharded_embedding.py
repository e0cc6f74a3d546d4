"""ShardedEmbedding: a table of which each rank has a part, and an optimizer that runs where the rows are."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringdp import refusals, values
from ringdp.errors import InvalidArgumentError, InvalidStateError, MembershipChanged
from ringdp.job.byte_collectives import alone, require_member, together
from ringdp.job.elastic import is_elastic, places
from ringdp.kvstore.agreement import compare_settings
from ringdp.kvstore.service import Members
from ringdp.nn import saved
from ringdp.nn.asynchronous import AsyncRowExchange
from ringdp.nn.bags import sum_bags
from ringdp.nn.exchange import Lookup, Pending, RowExchange
from ringdp.nn.owners import RowOwners
from ringdp.nn.shards import FixedShard, Growing, GrowingShard, Normal, Shard
from ringdp.nn.sparse_updates import Adagrad, Adam, SparseUpdate
from ringdp.text import ranks_by_number

_log = logging.getLogger("ringdp.nn")
_MODES = ("sum", "mean", "none")
_WIRES = ("exact", "bfloat16", "int8")
_MOST_ROWS = 3_000_000_000


class ShardedEmbedding(nn.Module):
    """A table of rows spread over the ranks, which are looked up in bags and updated where they are.

        table = ringdp.nn.ShardedEmbedding(10_000_000, 16, optimizer="rowwise_adagrad", lr=0.05)
        vectors = table(ids, offsets)         # [bags, dim]
        loss.backward()
        table.step()                          # beside the step of the dense part's optimizer
        table.prefetch(next_ids)              # before step(): its ids travel now, its rows after the update

    A batch's distinct ids go to the ranks that own their rows, which send the rows; gradients go the same way, are
    added up and update the rows. Equal to ``nn.EmbeddingBag(sparse=True)`` with the same optimizer over the joined
    batches, to rounding. All ranks call forward, `prefetch` and `step` alike; each with its own ids, as many as it has,
    also none.
    The rows are not among the module's parameters, so that RingDP leaves them alone. On the CPU.

    A growing table takes any int64 as an id. An id without a row reads as zeros, and its gradient is dropped. Which ids
    have rows depends on the ids of all ranks' batches alone: rows are the same at any number of ranks.

    Args:
        num_embeddings: rows of the table; a `ringdp.nn.Growing`, or None for one as it is by default: it grows.
        embedding_dim: numbers of a row.
        mode: how a bag becomes a vector: "sum", "mean", or "none": no bags, a vector for each id.
        optimizer: "sgd", "adagrad", "rowwise_adagrad" or "adam", or a `ringdp.nn.Adagrad` or `ringdp.nn.Adam`.
        lr: its learning rate.
        wire: how rows and gradients travel: "exact", "bfloat16", or "int8" with a scale for each row.
        reduce: "mean" divides the gradients by the number of ranks, as RingDP does; "sum" does not.
        weight: all rows, ``[num_embeddings, embedding_dim]``, the same on all ranks; or how they begin, a
            `ringdp.nn.Normal`, by default of standard deviation 1.
        dtype: of the rows: float32 or float64.
        asynchronous: each rank calls forward, `prefetch`, `step` and `rows` at its own pace, over ring; the owners
            apply gradients as they come. A rank that goes calls `close`, as the end of a program does. Not for a
            growing table.
        staleness: of an asynchronous table: by how many calls of `step` a rank may be ahead of the slowest one; with 0
            the gradients of a step of all ranks are applied together, with the bits of a table that is not
            asynchronous; None: by any number.
        group: whose ranks; the default group if None.

    Raises:
        InvalidArgumentError: a value that cannot be used.
        MismatchError: the ranks' arguments differ.
    """

    @values.moved(
        "ShardedEmbedding",
        {
            "eps": "optimizer=ringdp.nn.Adagrad(eps=…) or ringdp.nn.Adam(eps=…)",
            "betas": "optimizer=ringdp.nn.Adam(betas=…)",
            "std": "weight=ringdp.nn.Normal(std=…)",
            "seed": "weight=ringdp.nn.Normal(seed=…)",
            "admit_after": "num_embeddings=ringdp.nn.Growing(admit_after=…)",
            "evict_after": "num_embeddings=ringdp.nn.Growing(evict_after=…)",
        },
    )
    def __init__(
        self,
        num_embeddings: int | Growing | None,
        embedding_dim: int,
        *,
        mode: str = "sum",
        optimizer: str | Adagrad | Adam = "adagrad",
        lr: float = 0.01,
        wire: str = "exact",
        reduce: str = "mean",
        weight: Tensor | Normal | None = None,
        dtype: torch.dtype = torch.float32,
        asynchronous: bool = False,
        staleness: int | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        size = Growing() if num_embeddings is None else num_embeddings
        count = None if isinstance(size, Growing) else size
        begin = Normal() if weight is None else weight
        drawn = begin if isinstance(begin, Normal) else Normal()
        given = f"{count} x {embedding_dim} {dtype}, {mode}, {wire}, {reduce}, seed {drawn.seed}, std {drawn.std}"
        if isinstance(size, Growing):
            given += f", admitted after {size.admit_after}, evicted after {size.evict_after}"
        if asynchronous:
            given += f", asynchronous, staleness {staleness}"
        solitary = group is None and alone("ringdp.nn.ShardedEmbedding")
        self._group = None if solitary else require_member(group, "ringdp.nn.ShardedEmbedding")
        self._owners: tuple[int, ...] = (0,)  # the ranks that have rows, as they were numbered at the job's beginning

        def check() -> SparseUpdate:
            if self._group is not None:
                self._owners = places(self._group)
            for name, value, known in (
                ("mode", mode, _MODES),
                ("reduce", reduce, ("mean", "sum")),
                ("wire", wire, _WIRES),
            ):
                if value not in known:
                    raise InvalidArgumentError(f"{name} must be one of {', '.join(known)}, not {value!r}")
            if dtype not in (torch.float32, torch.float64):
                raise InvalidArgumentError(f"rows are float32 or float64, not {dtype}")
            if not isinstance(size, int | Growing):
                values.refuse("ShardedEmbedding", "num_embeddings", num_embeddings, "a number, a Growing or None")
            if not isinstance(begin, Tensor | Normal):
                values.refuse("ShardedEmbedding", "weight", begin, "a tensor, a Normal or None")
            values.flag("ShardedEmbedding", "asynchronous", asynchronous)
            if staleness is not None:
                values.whole("ShardedEmbedding", "staleness", staleness, 0)
                if not asynchronous:
                    raise InvalidArgumentError("staleness is of an asynchronous table: give asynchronous=True")
            if asynchronous and self._group is not None and is_elastic(self._group):
                refusals.refuse("elastic", "async table")
            if asynchronous and count is None:
                refusals.refuse("async kvstore", "growing")
            _check_size(count, embedding_dim, len(self._owners))
            if isinstance(begin, Tensor):
                if count is None:
                    raise InvalidArgumentError("a growing table begins without rows: weight must be a Normal or None")
                if tuple(begin.shape) != (count, embedding_dim):
                    raise InvalidArgumentError(f"weight is {list(begin.shape)}, not [{count}, {embedding_dim}]")
            return SparseUpdate.of(optimizer, lr)

        self._update = compare_settings(
            check,
            lambda update: [f"the embedding: {given}", f"its optimizer: {update.describe()}"],
            self._group,
            doing="make the sharded embedding",
            advice="Give all ranks the same arguments",
        )
        self.num_embeddings, self.embedding_dim, self.mode = count, embedding_dim, mode
        self._size, self._drawn, self._dtype, self._wire = size, drawn, dtype, wire
        self._averages, self._asynchronous, self._staleness = reduce == "mean", asynchronous, staleness
        self._deal()
        if isinstance(self._shard, FixedShard):
            self._shard.fill(begin)
        self._warned = False  # that rows are not in state_dict()

    def _deal(self) -> None:
        """Rows without values, for the ranks that there are."""
        group, ranks = self._group, len(self._owners)
        rank = 0 if group is None else self._owners.index(places(group)[group.rank()])
        self._rank, self._ranks = rank, ranks
        self._shard: Shard
        if isinstance(self._size, Growing):
            self._shard = GrowingShard(
                rank, ranks, self.embedding_dim, self._update, self._dtype, self._size, self._drawn
            )
        else:
            self._shard = FixedShard(RowOwners(self._size, rank, ranks), self.embedding_dim, self._update, self._dtype)
        divisor = float(ranks) if self._averages else 1.0
        if self._asynchronous:
            members = Members.of(group, 0)
            self._exchange: RowExchange = AsyncRowExchange(
                self._shard, members, self._update, self._wire, divisor, self._staleness
            )
        else:
            among = group if ranks > 1 else None
            self._exchange = RowExchange(self._shard, among, self._update, self._wire, divisor)
        self._used: list[tuple[Lookup, Tensor]] = []  # since the last step
        self._ahead: tuple[Tensor, Lookup] | None = None
        self._rows_ahead: Pending | None = None

    @property
    def local_rows(self) -> int:
        """How many rows this rank has."""
        return self._shard.count(self._update.step)

    def forward(self, ids: Tensor, offsets: Tensor | None = None) -> Tensor:
        """``[bags, dim]``, or with mode "none" ``[*ids.shape, dim]``.

        Args:
            ids: integers, of any shape with mode "none"; else ``[n]`` with `offsets`, or ``[bags, n]``.
            offsets: where each bag begins, ``[bags]``.

        Raises:
            InvalidArgumentError: ids that are not rows, or shapes that do not fit.
            MismatchError: another rank's are not.
        """
        self._require_owners()
        training = torch.is_grad_enabled() and self.training
        try:
            flat, begins = self._bags(ids, offsets)
            lookup, pending = self._prefetched(flat)
        except (InvalidArgumentError, InvalidStateError) as error:
            self._exchange.refuse(error)
            raise
        if lookup is None:
            lookup = self._exchange.look_up(flat, training)
        if pending is None:
            pending = self._exchange.begin_rows(lookup, self._update.step)
        rows = self._exchange.decoded(pending)
        if training:
            rows.requires_grad_()
            self._used.append((lookup, rows))
        found = sum_bags(rows, lookup.inverse, begins, self.mode == "mean")
        return found.view(*ids.shape, self.embedding_dim) if self.mode == "none" else found

    def prefetch(self, ids: Tensor) -> None:
        """Begin to look up the ids that the next forward has: on all ranks, after this step's forward.

        The ids travel at once. The rows do when `step` has updated them, so that results stay the same.
        """
        self._require_owners()
        try:
            if self._ahead is not None:
                raise InvalidStateError("prefetch was called before; forward has to use it first")
            flat = self._flat(ids)
        except (InvalidArgumentError, InvalidStateError) as error:
            self._exchange.refuse(error)
            raise
        self._ahead = flat.clone(), self._exchange.look_up(flat, True)

    @torch.no_grad()
    def step(self) -> None:
        """Send the gradients of all forwards since the last step to the owners, which update the rows; on all ranks."""
        self._require_owners()
        used, self._used = self._used, []
        self._exchange.push(used)
        if self._ahead is not None:
            self._rows_ahead = self._exchange.begin_rows(self._ahead[1], self._update.step)

    @torch.no_grad()
    def rows(self, ids: Tensor) -> Tensor:
        """The rows of these ids, ``[*ids.shape, dim]``, without a gradient; on all ranks, each with its own ids.

        An id of a growing table that has no row reads as zeros.
        """
        self._require_owners()
        try:
            flat = self._flat(ids)
        except InvalidArgumentError as error:
            self._exchange.refuse(error)
            raise
        lookup = self._exchange.look_up(flat, False)
        found = self._exchange.decoded(self._exchange.begin_rows(lookup, self._update.step))
        return sum_bags(found, lookup.inverse, None, False).view(*ids.shape, self.embedding_dim)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write each rank's rows and optimizer state to a file of `folder`; on all ranks.

        The files saved there before count until all new ones are written, and are removed then.

        Raises:
            SystemResourceError: a file cannot be written; on all ranks.
        """
        self._require_owners()
        path, rank, ranks = Path(folder), self._rank, self._ranks
        step = self._exchange.step_of(self._update.step)
        self._together(lambda: saved.write(path, self._shard, self._update, self._shape(), step, rank, ranks), "save")
        self._together(lambda: saved.write_index(path, step, ranks) if rank == 0 else None, "save")

    def barrier(self) -> None:
        """Of an asynchronous table: wait until all ranks have come here, and all that they have pushed counts."""
        self._exchange.barrier()

    def close(self) -> None:
        """Of an asynchronous table: leave, and serve the others until all ranks have left. Idempotent."""
        self._exchange.close()

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Read the files of `save` at any number of ranks; the folder has to have the files of all; on all ranks. In an
        elastic job whose table has lost rows it deals them to the ranks that are left.

        Raises:
            SystemResourceError: a file cannot be read; on all ranks.
            InvalidArgumentError: it is of another table or optimizer.
        """
        if self._group is not None and (owners := places(self._group)) != self._owners:
            self._owners = owners
            self._deal()
        self._together(lambda: saved.read(Path(folder), self._shard, self._update, self._shape(), str(self)), "load")

    def extra_repr(self) -> str:
        size = "growing" if self.num_embeddings is None else self.num_embeddings
        return f"{size}, {self.embedding_dim}, mode={self.mode}, {self._update.describe()}"

    # Private methods.

    def _require_owners(self) -> None:
        """In an elastic job. All ranks that are left have gone through the change by then (`job.elastic`)."""
        if self._group is None or len(self._owners) == 1 or (there := places(self._group)) == self._owners:
            return
        lost = [one for one in self._owners if one not in there]
        raise MembershipChanged(
            f"rows of this ShardedEmbedding were lost with {ranks_by_number(lost)}: load() its last save,"
            " which deals them to the ranks that are left, and the model of the same step",
            rank=self._group.rank(),
            peer=lost[0],
        )

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self._warned:
            self._warned = True
            name = prefix.rstrip(".") or "a ShardedEmbedding"
            _log.warning("the rows of %s are not in state_dict(): save(folder) writes them, on all ranks", name)

    def _flat(self, ids: Tensor) -> Tensor:
        if not isinstance(ids, Tensor):
            raise InvalidArgumentError(f"ids must be a tensor of integers, not {type(ids).__name__}")
        if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
            raise InvalidArgumentError(f"ids must be integers, not {ids.dtype}")
        if ids.device.type != "cpu":
            raise InvalidArgumentError(f"ids must be on the CPU, as the table is, not on {ids.device}")
        return ids.reshape(-1).to(torch.int64).contiguous()

    def _bags(self, ids: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor | None]:
        flat = self._flat(ids)
        if self.mode == "none":
            if offsets is not None:
                raise InvalidArgumentError('offsets are for bags, and the mode is "none"')
            return flat, None
        if ids.dim() == 2 and offsets is None:
            return flat, torch.arange(0, ids.shape[0], dtype=torch.int64, device="cpu") * ids.shape[1]
        if ids.dim() != 1 or offsets is None:
            raise InvalidArgumentError("ids must be [bags, n], or [n] with offsets")
        begins = self._flat(offsets)
        right = len(begins) == 0 and len(flat) == 0
        if len(begins):
            right = int(begins[0]) == 0 and int(begins[-1]) <= len(flat) and bool((begins[1:] >= begins[:-1]).all())
        if not right:
            raise InvalidArgumentError(f"offsets must ascend from 0 to at most the number of ids, {len(flat)}")
        return flat, begins

    def _prefetched(self, flat: Tensor) -> tuple[Lookup | None, Pending | None]:
        """The lookup that `prefetch` has begun; raises InvalidStateError where it was for other ids."""
        if self._ahead is None:
            return None, None
        if not torch.equal(self._ahead[0], flat):
            raise InvalidStateError("forward has other ids than prefetch had: on all ranks, prefetch the next batch's")
        (_, lookup), pending = self._ahead, self._rows_ahead
        self._ahead = self._rows_ahead = None
        return lookup, pending

    def _shape(self) -> list[int]:
        return [self.num_embeddings or 0, self.embedding_dim]

    def _together(self, work: Callable[[], None], what: str) -> None:
        if self._group is None:
            work()
        else:
            together(work, self._group, f"ShardedEmbedding.{what}")


def _check_size(rows: int | None, dim: int, ranks: int) -> None:
    if dim < 1 or (rows is not None and rows < 1):
        raise InvalidArgumentError(f"a table of {rows} rows of {dim} cannot be made")
    if rows is not None and (rows > _MOST_ROWS or rows > ranks * (2**31 - 1)):
        raise InvalidArgumentError(
            f"a table has at most {_MOST_ROWS:,} rows, and 2^31 of them on a rank, not {rows:,}: take a growing one"
        )
