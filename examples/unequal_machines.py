"""Ranks that are not equally fast: batches follow their speed, and the result is that of one process.

    python launch.py --nproc-per-node 2 examples/unequal_machines.py
    python examples/unequal_machines.py                         # one rank, no launcher

A small network learns scikit-learn's digits. The last rank sleeps for each sample twice as long as the others, as a
machine of half their speed would. BalancedSampler gives it fewer samples, from some step on; the samples of each step's
global batch stay the same, and each rank counts by its samples (weight="samples"). The same network is trained in this
process alone on the same batches, and the largest difference of any weight is printed; one above --tolerance makes the
exit code 1. The divergence guard watches that all ranks have the same weights.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import ringdp


class Machine(nn.Module):
    """A network on a machine that takes this long for each sample."""

    def __init__(self, network: nn.Module, seconds: float) -> None:
        super().__init__()
        self.network, self.seconds = network, seconds

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds * len(x))
        return self.network(x)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    ringdp.init(device="cpu")
    ranks, rank = ringdp.world_size(), ringdp.rank()
    data, network = load_digits(), build(options.seed)
    slower = options.slower if rank == ranks - 1 else 1.0
    model = ringdp.RingDP(Machine(network, slower * options.sleep_ms * 1e-3), weight="samples", guard=20)
    sampler = ringdp.data.BalancedSampler(data, options.batch_size, seed=options.seed)
    sampler.watch(model)
    began = time.perf_counter()
    taken = train(model, data, sampler, options)
    rate = len(data) * options.epochs / (time.perf_counter() - began)
    model.check_replicas()

    # All ranks' samples of each step, for one process.
    everything = [torch.cat(parts).tolist() for parts in zip(*gathered(taken), strict=True)]
    alone = build(options.seed)
    train(alone, data, everything, options)
    difference = max((a - b).abs().max().item() for a, b in zip(network.parameters(), alone.parameters(), strict=True))
    same = difference <= options.tolerance
    if rank == 0:
        print(f"{ranks} rank{'s' if ranks > 1 else ''}, {options.epochs} epochs, {rate:.0f} samples per second")
        print(f"  samples of a batch of {options.batch_size}, by rank: {', '.join(map(str, sampler.counts))}")
        print(
            f"  {'ok    ' if same else 'FAILED'} RingDP against one process: largest difference of a weight"
            f" {difference:.1e} (limit {options.tolerance:.0e})",
            flush=True,
        )
    ringdp.shutdown()
    return 0 if same else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--epochs", type=int, default=4, help="passes over the images (default %(default)s)")
    add("--batch-size", type=int, default=64, help="samples of a step, over all ranks (default %(default)s)")
    add("--lr", type=float, default=0.1, help="learning rate (default %(default)s)")
    add("--seed", type=int, default=0, help="seed of the weights and the order (default %(default)s)")
    add("--sleep-ms", type=float, default=0.5, help="what a sample takes on a fast machine (default %(default)s)")
    add("--slower", type=float, default=2.0, help="times as long on the last rank (default %(default)s)")
    add("--tolerance", type=float, default=1e-12, help="largest difference of a weight (default %(default)s)")
    return parser.parse_args(arguments)


def load_digits() -> TensorDataset:
    """1,797 images: their number, 64 grey values in float64, and the digit."""
    try:
        from sklearn import datasets
    except ModuleNotFoundError as error:
        sys.exit(f"the data come with scikit-learn, which is not installed ({error}): pip install scikit-learn")
    x, y = datasets.load_digits(return_X_y=True)
    return TensorDataset(torch.arange(len(x)), torch.tensor(x / 16), torch.tensor(y))


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()


def train(
    model: nn.Module,
    data: TensorDataset,
    batches: ringdp.data.BalancedSampler | list[list[int]],
    options: argparse.Namespace,
) -> list[Tensor]:
    """SGD over these batches; the samples that this process took in each step."""
    loader = DataLoader(data, batch_sampler=batches)
    shared = isinstance(batches, ringdp.data.BalancedSampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr)
    taken = []
    for _ in tqdm(range(options.epochs if shared else 1), desc="training", disable=not shared or ringdp.rank() != 0):
        for indices, x, y in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(x), y)  # of this rank's samples, which RingDP weighs by their number
            loss.backward()
            optimizer.step()
            taken.append(indices)
    return taken


def gathered(taken: list[Tensor]) -> list[list[Tensor]]:
    """Every rank's samples of each step, by rank."""
    if ringdp.world_size() == 1:
        return [taken]
    by_rank: list[list[Tensor]] = [[] for _ in range(ringdp.world_size())]
    torch.distributed.all_gather_object(by_rank, taken)
    return by_rank


if __name__ == "__main__":
    sys.exit(main())
