"""Factorise ratings: tables of users and films that are spread over the ranks, beside a small dense part in RingDP.

    python launch.py --nproc-per-node 4 examples/recommender.py
    python examples/recommender.py                              # one rank, no launcher

The ratings are made up in MovieLens's shape: popular films are rated often (by Zipf's law), users and films have a few
hidden tastes, and there is noise, below which no error on unseen ratings can fall. At the end: is the error close to
that noise. A check that fails makes the exit code 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from tqdm import trange

import ringdp

TASTES, NOISE = 4, 0.5


class Scores(nn.Module):
    """How a user rates a film: the product of their vectors, and a small net over both."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2 * dim, 16), nn.ReLU(), nn.Linear(16, 1))
        self.mean = nn.Parameter(torch.zeros(1))

    def forward(self, users: Tensor, films: Tensor) -> Tensor:
        return (users * films).sum(1) + self.net(torch.cat([users, films], 1)).squeeze(1) + self.mean


class Ratings:
    """Made of a seed: any rank can make any part."""

    def __init__(self, users: int, films: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.users = torch.randn(users, TASTES, generator=generator)
        self.films = torch.randn(films, TASTES, generator=generator) / TASTES**0.5
        self.seed = seed
        self.popularity = 1.0 / torch.arange(1, films + 1).float()

    def sample(self, count: int, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Users, films, and ratings around 3.5."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        users = torch.randint(len(self.users), (count,), generator=generator)
        films = torch.multinomial(self.popularity, count, replacement=True, generator=generator)
        noise = NOISE * torch.randn(count, generator=generator)
        return users, films, 3.5 + (self.users[users] * self.films[films]).sum(1) + noise


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--users", type=int, default=600, help="rows of one table (default %(default)s)")
    add("--films", type=int, default=300, help="rows of the other (default %(default)s)")
    add("--dim", type=int, default=8, help="numbers of a row (default %(default)s)")
    add("--steps", type=int, default=1000, help="(default %(default)s)")
    add("--batch-size", type=int, default=1024, help="ratings of all ranks in a step (default %(default)s)")
    add("--wire", choices=("exact", "bfloat16", "int8"), default="exact", help="how rows travel (default exact)")
    add("--seed", type=int, default=0, help="(default %(default)s)")
    add("--max-error", type=float, default=0.57, help="root of the mean square on unseen ratings (default %(default)s)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    ringdp.init()
    rank, ranks = ringdp.rank(), ringdp.world_size()
    ratings = Ratings(options.users, options.films, options.seed)
    sizes = {"optimizer": "adagrad", "lr": 0.1, "mode": "none", "wire": options.wire}
    users = ringdp.nn.ShardedEmbedding(options.users, options.dim, weight=ringdp.nn.Normal(std=0.1, seed=1), **sizes)
    films = ringdp.nn.ShardedEmbedding(options.films, options.dim, weight=ringdp.nn.Normal(std=0.1, seed=2), **sizes)
    torch.manual_seed(options.seed)
    model = ringdp.RingDP(Scores(options.dim))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    batch = [part[rank::ranks] for part in ratings.sample(options.batch_size, 0)]
    for step in trange(options.steps, disable=rank != 0, unit="step"):
        of_users, of_films, rating = batch
        following = [part[rank::ranks] for part in ratings.sample(options.batch_size, step + 1)]
        loss = (model(users(of_users), films(of_films)) - rating).square().mean()
        users.prefetch(following[0])  # on their way during backward
        films.prefetch(following[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        users.step()
        films.step()
        batch = following
    error = evaluate(model, users, films, batch, [part[rank::ranks] for part in ratings.sample(8192, 10**6)])
    passed = error <= options.max_error
    if rank == 0:
        print(
            f"{ranks} rank{'s' if ranks > 1 else ''}, {users.local_rows} users and {films.local_rows} films on rank 0"
        )
        print(
            f"  {'ok    ' if passed else 'FAILED'} error on 8,192 unseen ratings: {error:.4f}"
            f" (at most {options.max_error:.2f}; the noise is {NOISE:.2f})",
            flush=True,
        )
    ringdp.shutdown()
    return 0 if passed else 1


@torch.no_grad()
def evaluate(
    model: nn.Module,
    users: ringdp.nn.ShardedEmbedding,
    films: ringdp.nn.ShardedEmbedding,
    fetched: list[Tensor],
    unseen: list[Tensor],
) -> float:
    """Over all ranks; `fetched` is what the last step has prefetched."""
    users(fetched[0])
    films(fetched[1])
    squares = (model(users.rows(unseen[0]), films.rows(unseen[1])) - unseen[2]).square().mean()
    return float(ringdp.metrics.mean(squares, len(unseen[2]))) ** 0.5


if __name__ == "__main__":
    sys.exit(main())
