"""ShardedEmbedding: a table of which each rank has a part, and an optimizer that runs where the rows are."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ringdp.errors import InvalidArgumentError, InvalidStateError, SystemResourceError
from ringdp.job.byte_collectives import alone, require_member, together
from ringdp.kvstore.agreement import compare_tables
from ringdp.nn.exchange import Lookup, Pending, RowExchange
from ringdp.nn.owners import RowOwners
from ringdp.nn.sparse_updates import SparseUpdate
from ringdp.nn.wire import check_wire

_BLOCK_ROWS = 1 << 14
_MODES = ("sum", "mean", "none")
_FORMAT = 1


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

    Args:
        num_embeddings: rows of the table.
        embedding_dim: numbers of a row.
        mode: how a bag becomes a vector: "sum", "mean", or "none": no bags, a vector for each id.
        optimizer: "sgd", "adagrad", "rowwise_adagrad" or "adam"; see `ringdp.nn.sparse_updates`.
        lr, eps, betas: its settings.
        wire: how rows and gradients travel: "exact", "bfloat16", or "int8" with a scale for each row.
        reduce: "mean" divides the gradients by the number of ranks, as RingDP does; "sum" does not.
        weight: all rows, ``[num_embeddings, embedding_dim]``, the same on all ranks; None: normal numbers, the same
            for any number of ranks.
        std, seed: of those.
        dtype: of the rows: float32 or float64.
        group: whose ranks; the default group if None.

    Raises:
        InvalidArgumentError: a value that cannot be used.
        MismatchError: the ranks' arguments differ.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        mode: str = "sum",
        optimizer: str = "adagrad",
        lr: float = 0.01,
        eps: float = 1e-10,
        betas: tuple[float, float] = (0.9, 0.999),
        wire: str = "exact",
        reduce: str = "mean",
        weight: Tensor | None = None,
        std: float = 1.0,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        if num_embeddings < 1 or embedding_dim < 1:
            raise InvalidArgumentError(f"a table of {num_embeddings} rows of {embedding_dim} cannot be made")
        for name, value, known in (("mode", mode, _MODES), ("reduce", reduce, ("mean", "sum"))):
            if value not in known:
                raise InvalidArgumentError(f"{name} must be one of {', '.join(known)}, not {value!r}")
        if dtype not in (torch.float32, torch.float64):
            raise InvalidArgumentError(f"rows are float32 or float64, not {dtype}")
        if weight is not None and tuple(weight.shape) != (num_embeddings, embedding_dim):
            raise InvalidArgumentError(f"weight is {list(weight.shape)}, not [{num_embeddings}, {embedding_dim}]")
        check_wire(wire)
        self._update = SparseUpdate(optimizer, lr, eps, betas)
        solitary = group is None and alone("ringdp.nn.ShardedEmbedding")
        self._group = None if solitary else require_member(group, "ringdp.nn.ShardedEmbedding")
        rank, ranks = (0, 1) if self._group is None else (self._group.rank(), self._group.size())
        words = f"{num_embeddings} x {embedding_dim} {dtype}, {mode}, {wire}, {reduce}, seed {seed}, std {std}"
        compare_tables(
            [f"the embedding: {words}", f"its optimizer: {self._update.words()}"],
            self._group,
            "Give all ranks the same arguments",
        )
        self.num_embeddings, self.embedding_dim, self.mode = num_embeddings, embedding_dim, mode
        self._owners = RowOwners(num_embeddings, rank, ranks)
        self._exchange = RowExchange(self._owners, self._group if ranks > 1 else None, wire)
        self._divisor = float(ranks) if reduce == "mean" else 1.0
        self._table = self._initial(weight, std, seed, dtype)
        self._state = self._update.new_state(self._owners.count, embedding_dim, dtype)
        self._used: list[tuple[Lookup, Tensor]] = []  # since the last step
        self._ahead: tuple[Tensor, Lookup] | None = None
        self._rows_ahead: Pending | None = None

    @property
    def local_rows(self) -> int:
        """How many rows this rank has."""
        return self._owners.count

    def forward(self, ids: Tensor, offsets: Tensor | None = None) -> Tensor:
        """``[bags, dim]``, or with mode "none" ``[*ids.shape, dim]``.

        Args:
            ids: integers, of any shape with mode "none"; else ``[n]`` with `offsets`, or ``[bags, n]``.
            offsets: where each bag begins, ``[bags]``.

        Raises:
            InvalidArgumentError: ids that are not rows, or shapes that do not fit.
            MismatchError: another rank's are not.
        """
        flat, begins = self._bags(ids, offsets)
        if self._ahead is not None and torch.equal(self._ahead[0], flat):
            lookup, pending = self._ahead[1], self._rows_ahead
        elif self._ahead is not None:
            raise InvalidStateError("forward has other ids than prefetch had: on all ranks, prefetch the next batch's")
        else:
            lookup, pending = self._exchange.look_up(flat), None
        self._ahead = self._rows_ahead = None
        if pending is None:
            pending = self._exchange.begin_rows(lookup, self._table)
        rows = self._exchange.finish(pending, self._table.dtype)
        if torch.is_grad_enabled() and self.training:
            rows.requires_grad_()
            self._used.append((lookup, rows))
        if begins is None:
            return rows[lookup.inverse].view(*ids.shape, self.embedding_dim)
        if not len(flat):
            return rows.new_zeros(len(begins), self.embedding_dim) + rows.sum()  # 0, of which backward knows
        return functional.embedding_bag(lookup.inverse, rows, begins, mode=self.mode)

    def prefetch(self, ids: Tensor) -> None:
        """Begin to look up the ids that the next forward has: on all ranks, after this step's forward.

        The ids travel at once. The rows do when `step` has updated them, so that results stay the same.
        """
        if self._ahead is not None:
            raise InvalidStateError("prefetch was called before; forward has to use it first")
        flat = ids.reshape(-1).to(torch.int64)
        self._ahead = flat.clone(), self._exchange.look_up(flat)

    @torch.no_grad()
    def step(self) -> None:
        """Send the gradients of all forwards since the last step to the owners, which update the rows; on all ranks."""
        used, self._used = self._used, []
        on_their_way = []
        for lookup, rows in used:
            gradient = torch.zeros_like(rows) if rows.grad is None else rows.grad
            on_their_way.append((lookup, self._exchange.begin_gradients(lookup, gradient, self._table)))
        wanted = [lookup.wanted.to(torch.int64) for lookup, _ in on_their_way]
        gradients = [self._exchange.finish(pending, self._table.dtype) for _, pending in on_their_way]
        if wanted:
            distinct, inverse = torch.unique(torch.cat(wanted), return_inverse=True)
            sums = torch.zeros(len(distinct), self.embedding_dim, dtype=self._table.dtype)
            sums.index_add_(0, inverse, torch.cat(gradients)).div_(self._divisor)
            self._update.apply(self._table, self._state, distinct, sums)
        if self._ahead is not None:
            self._rows_ahead = self._exchange.begin_rows(self._ahead[1], self._table)

    @torch.no_grad()
    def rows(self, ids: Tensor) -> Tensor:
        """The rows of these ids, ``[*ids.shape, dim]``, without a gradient; on all ranks, each with its own ids."""
        lookup = self._exchange.look_up(ids.reshape(-1).to(torch.int64))
        found = self._exchange.finish(self._exchange.begin_rows(lookup, self._table), self._table.dtype)
        return found[lookup.inverse].view(*ids.shape, self.embedding_dim)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write each rank's rows and optimizer state to a file of `folder`; on all ranks.

        What was saved there before counts until all files are written, and is removed then.

        Raises:
            SystemResourceError: a file cannot be written; on all ranks.
        """
        self._together(lambda: self._write(Path(folder)), "save")
        self._together(lambda: self._write_index(Path(folder)), "save")

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Read what `save` wrote at any number of ranks; the folder has to have the files of all; on all ranks.

        Raises:
            SystemResourceError: a file cannot be read; on all ranks.
            InvalidArgumentError: it is of another table or optimizer.
        """
        self._together(lambda: self._read(Path(folder)), "load")

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode}, {self._update.words()}"

    # Inside.

    def _bags(self, ids: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if ids.is_floating_point() or ids.is_complex():
            raise InvalidArgumentError(f"ids must be integers, not {ids.dtype}")
        flat = ids.reshape(-1).to(torch.int64)
        if self.mode == "none":
            return flat, None
        if ids.dim() == 2 and offsets is None:
            return flat, torch.arange(0, ids.shape[0], dtype=torch.int64) * ids.shape[1]
        if ids.dim() != 1 or offsets is None:
            raise InvalidArgumentError("ids must be [bags, n], or [n] with offsets")
        return flat, offsets.to(torch.int64)

    def _initial(self, weight: Tensor | None, std: float, seed: int, dtype: torch.dtype) -> Tensor:
        owners = self._owners
        mine = torch.arange(owners.rank, owners.rows, owners.ranks)
        if weight is not None:
            return weight.detach().to(dtype)[owners.ids(mine)].clone()
        table = torch.empty(owners.count, self.embedding_dim, dtype=dtype)
        for number, begin in enumerate(range(0, owners.rows, _BLOCK_ROWS)):
            generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
            count = min(_BLOCK_ROWS, owners.rows - begin)
            block = torch.randn(count, self.embedding_dim, generator=generator, dtype=dtype).mul_(std)
            first = (owners.rank - begin) % owners.ranks
            here = block[first :: owners.ranks]
            at = (begin + first) // owners.ranks
            table[at : at + len(here)] = here
        return table

    def _together(self, work: Any, what: str) -> None:
        if self._group is None:
            work()
        else:
            together(work, self._group, f"ShardedEmbedding.{what}")

    def _file(self, folder: Path, step: int, rank: int, ranks: int) -> Path:
        return folder / f"rows-step-{step}-rank-{rank}-of-{ranks}.pt"

    def _write(self, folder: Path) -> None:
        content = {
            "ringdp_sharded_embedding": _FORMAT,
            "shape": [self.num_embeddings, self.embedding_dim],
            "optimizer": self._update.name,
            "step": self._update.step,
            "rows": self._table,
            "state": self._state,
        }
        with _writing(self._file(folder, self._update.step, self._owners.rank, self._owners.ranks)) as file:
            torch.save(content, file)

    def _write_index(self, folder: Path) -> None:
        if self._owners.rank == 0:
            step, ranks = self._update.step, self._owners.ranks
            with _writing(folder / "index") as file:
                file.write(f"{step} {ranks}\n".encode())
            current = {self._file(folder, step, rank, ranks) for rank in range(ranks)}
            for path in set(folder.glob("rows-step-*-rank-*-of-*.pt")) - current:
                path.unlink(missing_ok=True)

    def _read(self, folder: Path) -> None:
        owners = self._owners
        step, ranks = map(int, (folder / "index").read_text().split())
        mine = torch.arange(owners.rank, owners.rows, owners.ranks)
        for rank in range(ranks):
            path = self._file(folder, step, rank, ranks)
            content = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
            expected = [_FORMAT, [self.num_embeddings, self.embedding_dim], self._update.name]
            if [content.get(name) for name in ("ringdp_sharded_embedding", "shape", "optimizer")] != expected:
                raise InvalidArgumentError(f"{path} is not of this table: {self}")
            there = (mine % ranks == rank).nonzero().view(-1)
            source = mine[there] // ranks
            self._table[there] = content["rows"][source].to(self._table.dtype)
            for name, tensor in self._state.items():
                tensor[there] = content["state"][name][source].to(tensor.dtype)
            self._update.step = content["step"]


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[Any]:
    """A file that gets its name when it is whole and on the disk."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(unfinished, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except (OSError, RuntimeError) as error:  # torch.save hides what the system said
        raise SystemResourceError(f"{path} could not be written: {error}") from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
