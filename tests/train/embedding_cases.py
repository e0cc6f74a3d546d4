"""What ranks do in tests/train/test_sharded_embedding.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import ringdp
from ringdp.nn import Adagrad, Adam, Growing, Normal, ShardedEmbedding

ROWS, DIM, STEPS = 101, 6, 5
OPTIMIZERS: dict[str, Any] = {
    "sgd": "sgd",
    "adagrad": Adagrad(eps=1e-8),
    "rowwise_adagrad": Adagrad(eps=1e-8, rowwise=True),
    "adam": Adam(eps=1e-8),
}


def weight(dtype: torch.dtype) -> Tensor:
    return torch.randn(ROWS, DIM, dtype=dtype, generator=torch.Generator().manual_seed(1))


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Ids and offsets: of each rank another number of bags, some of them empty, and no bag at all now and then."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    bags = (3 * rank + 2 * step) % 5 if rank else step + 1
    lengths = torch.randint(0, 4, (bags,), generator=generator)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator) ** 2 % ROWS
    return ids, torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])[:bags]


def loss_of(vectors: Tensor) -> Tensor:
    return (vectors.square().sum() + vectors.sin().sum()) / 7


def train(
    optimizer: str, mode: str, dtype: torch.dtype, prefetch: bool, wire: str = "exact", steps: int = STEPS
) -> tuple[Tensor, int]:
    """All rows afterwards, and how many this rank has."""
    table = ShardedEmbedding(
        ROWS, DIM, mode=mode, optimizer=OPTIMIZERS[optimizer], lr=0.1, wire=wire, weight=weight(dtype), dtype=dtype
    )
    rank = dist.get_rank()
    for step in range(steps):
        vectors = table(*batch(step, rank))
        if prefetch and step + 1 < steps:
            table.prefetch(batch(step + 1, rank)[0])
        loss_of(vectors).backward()
        table.step()
    return table.rows(torch.arange(ROWS)), table.local_rows


def train_all(dtype: torch.dtype) -> dict[tuple[str, str, bool], tuple[Tensor, int]]:
    kinds = [(name, mode) for name in OPTIMIZERS for mode in ("sum", "mean")]
    return {
        (name, mode, prefetch): train(name, mode, dtype, prefetch) for name, mode in kinds for prefetch in (False, True)
    }


def initial() -> Tensor:
    return ShardedEmbedding(20_000, 3, weight=Normal(std=0.5, seed=4)).rows(torch.arange(20_000))


def save(folder: str) -> Tensor:
    table = _trained()
    table.save(folder)
    _more(table)
    return table.rows(torch.arange(ROWS))


def load(folder: str) -> Tensor:
    table = ShardedEmbedding(ROWS, DIM, optimizer="adam", lr=0.1, dtype=torch.float64)
    table.load(folder)
    _more(table)
    return table.rows(torch.arange(ROWS))


def _trained() -> ShardedEmbedding:
    table = ShardedEmbedding(ROWS, DIM, optimizer="adam", lr=0.1, dtype=torch.float64)
    _more(table)
    return table


def _more(table: ShardedEmbedding) -> None:
    for step in range(2):  # the same on all ranks: then the mean does not depend on their number
        ids, offsets = batch(step + 1, 2)
        loss_of(table(ids, offsets)).backward()
        table.step()


def refuse(how: str) -> None:
    """Rank 1 does something else than rank 0."""
    other = dist.get_rank() == 1
    table = ShardedEmbedding(
        ROWS,
        DIM + (how == "shape" and other),
        lr=0.5 if how == "lr" and other else 0.1,
        mode="sums" if how == "kind" and other else "sum",
    )
    ids = torch.tensor([3, ROWS if how == "id" and other else 5])
    if how == "step" and other:
        table(ids, torch.tensor([0]))
    if how == "float ids" and other:
        table(ids.float(), torch.tensor([0]))
    table(ids, torch.tensor([1 if how == "offsets" and other else 0])).sum().backward()
    table.step()


def beside_ringdp() -> tuple[float, float]:
    """A dense part in RingDP beside the table: the loss before and after."""
    table = ShardedEmbedding(ROWS, DIM, mode="none", optimizer="adagrad", lr=0.3, weight=Normal(0.1))
    torch.manual_seed(0)
    dense: Any = ringdp.RingDP(torch.nn.Linear(2 * DIM, 1))
    optimizer = torch.optim.Adam(dense.parameters(), lr=0.02)
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    losses = []
    for _ in range(60):
        pairs = torch.randint(0, ROWS, (64, 2), generator=generator)
        wanted = ((pairs[:, 0] % 2) == (pairs[:, 1] % 2)).float()
        features = table(pairs)
        product = features[:, 0] * features[:, 1]
        scores = dense(features.flatten(1)).squeeze(1) + product.sum(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        table.step()
        losses.append(float(loss))
    return losses[0], sum(losses[-5:]) / 5


def grow(optimizer: str, prefetch: bool, folder: str = "", ranks_of_batch: int = 4) -> dict[str, Any]:
    """A growing table over batches that are dealt to the ranks: what it has at the end, at any number of ranks.

    With `folder` it is saved half way, and a new table that loads it goes on.
    """
    rank, ranks, steps = dist.get_rank(), dist.get_world_size(), 14

    def make() -> ShardedEmbedding:
        return ShardedEmbedding(
            Growing(admit_after=3, evict_after=4),
            DIM,
            optimizer=OPTIMIZERS[optimizer],
            lr=0.1,
            reduce="sum",
            weight=Normal(seed=2),
            dtype=torch.float64,
        )

    def mine(step: int) -> tuple[Tensor, Tensor]:
        parts = [growing_batch(step, part) for part in range(rank, ranks_of_batch, ranks)]
        ids = torch.cat([part[0] for part in parts]) if parts else torch.empty(0, dtype=torch.int64)
        lengths = [torch.diff(offsets, append=torch.tensor([len(ids)])) for ids, offsets in parts]
        together = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cat(lengths).cumsum(0)[:-1]])
        return ids, together

    table, rows_by_step = make(), []
    for step in range(steps):
        vectors = table(*mine(step))
        last = step + 1 == steps or (folder and step == steps // 2)
        if prefetch and not last:
            table.prefetch(mine(step + 1)[0])
        loss_of(vectors).backward()
        table.step()
        rows_by_step.append(_rows_of_all(table))
        if folder and step == steps // 2:
            table.save(folder)
            table = make()
            table.load(folder)
    everything = torch.cat([growing_batch(step, part)[0] for step in range(steps) for part in range(ranks_of_batch)])
    ids = everything.unique()
    return {"ids": ids, "rows": table.rows(ids), "count": rows_by_step}


def _rows_of_all(table: ShardedEmbedding) -> int:
    return round(ringdp.metrics.mean(float(table.local_rows)) * dist.get_world_size())


def growing_batch(step: int, part: int) -> tuple[Tensor, Tensor]:
    """Ids of which others are popular as time goes by; any int64, in three bags."""
    generator = torch.Generator().manual_seed(1000 * step + part)
    ids = torch.randint(0, 12, (8,), generator=generator) + 3 * (step // 3)
    return (ids - 5) * 0x0123456789ABCDEF, torch.tensor([0, 2, 2])


def reload(folder: str) -> dict[str, Any]:
    """What `grow` has saved, at this number of ranks, some steps later without training."""
    table = ShardedEmbedding(
        Growing(3, 4), DIM, optimizer="adam", dtype=torch.float64, reduce="sum", weight=Normal(seed=2)
    )
    table.load(folder)
    ids = torch.cat([growing_batch(step, part)[0] for step in range(14) for part in range(4)]).unique()
    return {"rows": table.rows(ids), "count": _rows_of_all(table)}
