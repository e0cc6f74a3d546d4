"""A sharded embedding beside whole tables on each rank: samples a second, and memory.

    python -m benchmarks embedding --ranks 4               4 ranks on this machine
    python -m benchmarks embedding --hosts 4 --rate 1gbit  4 ranks on hosts of their own (needs root)

A sample is a bag of ids, drawn by Zipf's law and scattered over the table; a small dense net turns its vector into a
number; all is trained with SGD. The ways:

    sharded        ringdp.nn.ShardedEmbedding, the dense part in RingDP; with prefetch, and rows as bfloat16 and int8
    DDP on gloo    nn.EmbeddingBag(sparse=True) and the dense part, whole on each rank, in torch's DDP; also on ring

First all train a small table, and must give the same rows. Then they are timed one after the other, because each copy
of the table fills memory, `--turns` times over. Times are medians of blocks, of the slowest rank; memory is a rank's
part of the table.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.lib import session
from benchmarks.lib.measure import format_size, format_time, table

SHARDED = {
    "sharded": "exact",
    "sharded, prefetch": "exact",
    "sharded, bfloat16, prefetch": "bfloat16",
    "sharded, int8, prefetch": "int8",
}
WHOLE = {"DDP on gloo": "gloo", "DDP on ring": "ring"}
WAYS = (*SHARDED, *WHOLE)
_RATE, _SMALL_ROWS, _CHECKED_STEPS, _POOL = 0.05, 1009, 3, 8

Batch = tuple[Tensor, Tensor]


def make_dense(dim: int) -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(dim, 64), nn.ReLU(), nn.Linear(64, 1))


def zipf_batches(rows: int, samples: int, ids: int, exponent: float, rank: int) -> list[Batch]:
    """Ids and where bags begin. The k-th most popular row has about probability k^-exponent: the integral's inverse."""
    generator = torch.Generator().manual_seed(11 + rank)
    offsets = torch.arange(0, samples * ids, ids)
    batches = []
    for _ in range(_POOL):
        uniform = torch.rand(samples * ids, generator=generator, dtype=torch.float64)
        place = (1 - uniform + uniform * float(rows + 1) ** (1 - exponent)) ** (1 / (1 - exponent))
        popularity = (place.long() - 1).clamp_(0, rows - 1)
        batches.append((popularity * 7_368_787 % rows, offsets))
    return batches


class Whole(nn.Module):
    """The table and the dense part on each rank."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        rows, dim = weight.shape
        self.bags = nn.EmbeddingBag(rows, dim, mode="sum", sparse=True, _weight=weight)
        self.dense = make_dense(dim)

    def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
        return self.dense(self.bags(ids, offsets))


def initial(rows: int, dim: int) -> Tensor:
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(1)).mul_(0.1)


class Trainee:
    """A way of training. `step(batch, next)` on all ranks; `rows(ids)`; `held` is the bytes of this rank's table."""

    step: Callable[[Batch, Batch], None]
    rows: Callable[[Tensor], Tensor]
    held: int

    def __init__(self, way: str, rows: int, dim: int, groups: dict[str, dist.ProcessGroup]) -> None:
        if way in SHARDED:
            self._sharded(way, rows, dim, groups["ring"])
        else:
            self._whole(rows, dim, groups[WHOLE[way]])

    def _sharded(self, way: str, rows: int, dim: int, group: dist.ProcessGroup) -> None:
        import ringdp

        found = ringdp.nn.ShardedEmbedding(
            rows,
            dim,
            optimizer="sgd",
            lr=_RATE,
            wire=SHARDED[way],
            weight=initial(rows, dim) if rows == _SMALL_ROWS else ringdp.nn.Normal(std=0.1),
            group=group,
        )
        dense = ringdp.RingDP(make_dense(dim), process_group=group)
        optimizer = torch.optim.SGD(dense.parameters(), lr=_RATE)

        def step(batch: Batch, following: Batch) -> None:
            optimizer.zero_grad()
            loss = dense(found(*batch)).square().mean()
            if way.endswith("prefetch"):
                found.prefetch(following[0])
            loss.backward()
            optimizer.step()
            found.step()

        self.step, self.rows, self.held = step, found.rows, found.local_rows * dim * 4

    def _whole(self, rows: int, dim: int, group: dist.ProcessGroup) -> None:
        module = Whole(initial(rows, dim))
        model = nn.parallel.DistributedDataParallel(module, process_group=group, init_sync=False)
        optimizer = torch.optim.SGD(module.parameters(), lr=_RATE)

        def step(batch: Batch, following: Batch) -> None:
            optimizer.zero_grad()
            model(*batch).square().mean().backward()
            optimizer.step()

        self.step, self.held = step, rows * dim * 4
        self.rows = lambda ids: module.bags.weight.detach()[ids]


def train_alike(ways: Sequence[str], dim: int, groups: dict[str, dist.ProcessGroup]) -> None:
    """Raises AssertionError where a way gives other rows than the first."""
    batches = zipf_batches(_SMALL_ROWS, 64, 5, 1.05, dist.get_rank())
    first: Tensor | None = None
    for way in ways:
        trainee = Trainee(way, _SMALL_ROWS, dim, groups)
        for number in range(_CHECKED_STEPS):
            trainee.step(batches[number], batches[number + 1])
        dist.barrier()
        if way.endswith("prefetch"):
            trainee.step(batches[_CHECKED_STEPS], batches[0])  # uses what was prefetched
            continue
        found = trainee.rows(torch.arange(_SMALL_ROWS))
        first = found if first is None else first
        assert torch.allclose(found, first, atol=1e-5), (
            f"{way} trains otherwise, by {float((found - first).abs().max())}"
        )


def _next_step(trainee: Trainee, turns: Iterator[tuple[Batch, Batch]]) -> None:
    trainee.step(*next(turns))


def run_rank(joined: session.Joined) -> None:
    given = joined.settings
    torch.set_num_threads(1)
    ranks = list(range(joined.world_size))
    groups: Any = {name: dist.new_group(ranks, backend=name) for name in ("ring", "gloo")}
    train_alike(given["ways"], given["dim"], groups)
    batches = zipf_batches(given["rows"], given["samples"], given["ids"], given["zipf"], joined.rank)
    distinct = statistics.mean(len(ids.unique()) for ids, _ in batches)
    seconds: dict[str, list[float]] = {way: [] for way in given["ways"]}
    held: dict[str, int] = {}
    for turn in range(given["turns"]):
        for way in given["ways"] if turn % 2 == 0 else reversed(given["ways"]):
            trainee = Trainee(way, given["rows"], given["dim"], groups)
            turns = itertools.cycle(zip(batches, batches[1:] + batches[:1], strict=True))
            step = functools.partial(_next_step, trainee, turns)
            session.block(step, given["steps"])  # not counted
            seconds[way] += [session.block(step, given["steps"]) for _ in range(given["blocks"])]
            most = torch.tensor([trainee.held])
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
            held[way] = int(most)
            del trainee, step
            gc.collect()
            dist.barrier()
    joined.deliver({"seconds": seconds, "held": held, "distinct": distinct})


def settings(args: argparse.Namespace) -> dict[str, Any]:
    names = ("rows", "dim", "samples", "ids", "zipf", "steps", "blocks", "turns", "ways")
    return {name: getattr(args, name) for name in names}


def report(result: dict[str, Any]) -> str:
    """The result as text."""
    found, given, ranks = result["rows"], result["settings"], result["place"]["ranks"]
    medians = {way: statistics.median(seconds) for way, seconds in found["seconds"].items()}
    sharded = next(it for way, it in medians.items() if way in SHARDED)
    cells = [
        [
            way,
            format_time(it),
            f"{ranks * given['samples'] / it:,.0f}",
            f"{it / sharded:.2f}",
            format_size(found["held"][way]),
        ]
        for way, it in medians.items()
    ]
    size = f"{given['rows']:,} rows of {given['dim']}"
    load = f"each rank {given['samples']} samples of {given['ids']} ids a step, {found['distinct']:,.0f} ids distinct"
    columns = [size, "step", "samples/s", "it / the first", "table, most on a rank"]
    return session.text(result, "sharded embedding", load, table(columns, cells))


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=10_000_000, help="of the table (default 10,000,000)")
    parser.add_argument("--dim", type=int, default=16, help="numbers of a row (default 16)")
    parser.add_argument("--samples", type=int, default=2048, help="of each rank in a step (default 2048)")
    parser.add_argument("--ids", type=int, default=8, help="of a sample (default 8)")
    parser.add_argument("--zipf", type=float, default=1.05, help="exponent of the popularity (default 1.05)")
    parser.add_argument("--turns", type=int, default=2, help="how often each way is made and timed (default 2)")
    parser.add_argument("--blocks", type=int, default=3, help="of each turn (default 3)")
    parser.add_argument("--steps", type=int, default=10, help="of a block (default 10)")
    parser.add_argument("--ways", default=";".join(WAYS), help="separated by ';' (default all)")


def check(args: argparse.Namespace) -> None:
    args.ways = session.chosen(args.ways, WAYS, ";")
    if not any(way in SHARDED for way in args.ways):
        raise ValueError("one of the ways must be sharded: the others are compared with it")
    if min(args.rows, args.dim, args.samples, args.ids, args.turns, args.blocks, args.steps) < 1 or args.zipf == 1:
        raise ValueError("sizes must be at least 1, and the exponent must not be 1")
