"""Factorise ratings on machines of unequal speed: tables that are spread over the ranks, and no rank waits for the
slowest.

    python launch.py --nproc-per-node 4 examples/factorisation.py --slow-ms 5
    python launch.py --nproc-per-node 4 examples/factorisation.py --staleness 0   # all wait for all, in every step
    python examples/factorisation.py                                               # one rank, no launcher

Rank 1 sleeps in each step, as a slow machine would. The ratings are made up: users and films have a few hidden tastes,
and there is noise, below which no error on unseen ratings can fall. At the end: is the error close to that noise, how
old the rows were, and how long this rank waited for slow ones. A check that fails makes the exit code 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import torch
from torch import Tensor

import ringdp

TASTES, NOISE = 4, 0.5


def sample(users: int, films: int, count: int, seed: int, number: int) -> tuple[Tensor, Tensor, Tensor]:
    """Users, films, and ratings around 0."""
    truth = torch.Generator().manual_seed(seed)
    tastes = torch.randn(users, TASTES, generator=truth)
    traits = torch.randn(films, TASTES, generator=truth) / TASTES**0.5
    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
    who = torch.randint(users, (count,), generator=generator)
    what = torch.randint(films, (count,), generator=generator)
    noise = NOISE * torch.randn(count, generator=generator)
    return who, what, (tastes[who] * traits[what]).sum(1) + noise


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--users", type=int, default=600, help="rows of one table (default %(default)s)")
    add("--films", type=int, default=300, help="rows of the other (default %(default)s)")
    add("--dim", type=int, default=8, help="numbers of a row (default %(default)s)")
    add("--steps", type=int, default=1500, help="of each rank (default %(default)s)")
    add("--batch-size", type=int, default=256, help="ratings of a rank in a step (default %(default)s)")
    add("--lr", type=float, default=0.1, help="learning rate of Adagrad (default %(default)s)")
    add("--staleness", type=int, default=None, help="steps that a rank may be ahead (default: any number)")
    add("--slow-ms", type=float, default=0.0, help="rank 1 sleeps so long in each step (default %(default)s)")
    add("--seed", type=int, default=0, help="of the ratings and the tables (default %(default)s)")
    add("--max-error", type=float, default=0.57, help="root of the mean square on unseen ratings (default %(default)s)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = parse(arguments)
    ringdp.init()
    users, films = (
        ringdp.nn.ShardedEmbedding(
            rows,
            chosen.dim,
            optimizer="adagrad",
            lr=chosen.lr,
            mode="none",
            reduce="sum",
            weight=ringdp.nn.Normal(std=0.3, seed=2 * chosen.seed + place),
            asynchronous=True,
            staleness=chosen.staleness,
        )
        for place, rows in enumerate((chosen.users, chosen.films))
    )
    of, rank, ranks = (chosen.users, chosen.films), ringdp.rank(), ringdp.world_size()
    began = time.monotonic()
    for step in range(chosen.steps):
        if rank == 1:
            time.sleep(chosen.slow_ms / 1000)
        who, what, rating = sample(*of, chosen.batch_size, chosen.seed, 1 + step * ranks + rank)
        error = (users(who) * films(what)).sum(1) - rating
        error.square().sum().div(chosen.batch_size).backward()
        users.step()
        films.step()
    took_s = time.monotonic() - began
    users.barrier()
    films.barrier()
    who, what, rating = sample(*of, 8192, chosen.seed, 0)
    with torch.no_grad():
        error = (users.rows(who) * films.rows(what)).sum(1) - rating
    root = float(error.square().mean().sqrt())
    passed = root <= chosen.max_error
    if rank == 0:
        said = f"{ranks} rank{'s' * (ranks > 1)}, staleness {chosen.staleness}"
        print(f"{said}: {chosen.steps / took_s:.0f} steps a second on rank 0")
        print(f"  {'ok    ' if passed else 'FAILED'} error on 8,192 unseen ratings: {root:.4f} (noise {NOISE})")
    users.close()
    films.close()
    ringdp.shutdown()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
