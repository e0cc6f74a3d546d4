"""Linear regression on scikit-learn's diabetes data: several ranks compute what one process does, to the last digits.

    python launch.py --nproc-per-node 4 examples/linear_regression.py
    python examples/linear_regression.py                        # one rank, no launcher

Each rank holds a share of the patients, and the shares are not equally large. RingDP averages the ranks' gradients, so
each rank's loss counts by its share. The same model is trained in this process alone on all patients, and the largest
difference of any weight is printed. A difference above --tolerance makes the exit code 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

import ringdp

TEST_PATIENTS = 92


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    ringdp.init(device="cpu")  # 350 rows of 10 numbers: a GPU would wait for its orders
    x, y, test_x, test_y = load_diabetes(options.seed)
    mine = slice(ringdp.rank(), None, ringdp.world_size())  # patients are dealt out like cards
    together = train(ringdp.RingDP(build(options.seed)), x[mine], y[mine], len(x), options)
    alone = train(build(options.seed), x, y, len(x), options)
    difference = max((a - b).abs().max().item() for a, b in zip(together.parameters(), alone.parameters(), strict=True))
    error = ringdp.metrics.mean(squared_error(together, test_x[mine], test_y[mine]), len(test_x[mine]))
    same = difference <= options.tolerance
    if ringdp.rank() == 0:
        ranks = ringdp.world_size()
        print(f"{ranks} rank{'s' if ranks > 1 else ''}, {len(x)} patients, {options.steps} steps")
        print(
            f"  explained variance on {len(test_x)} other patients: {1 - error / test_y.var(correction=0).item():.3f}"
        )
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
    add("--steps", type=int, default=300, help="steps, each over all patients (default %(default)s)")
    add("--lr", type=float, default=0.1, help="learning rate of SGD with momentum 0.9 (default %(default)s)")
    add("--seed", type=int, default=0, help="seed of the split and the weights (default %(default)s)")
    add("--tolerance", type=float, default=1e-12, help="largest difference of a weight (default %(default)s)")
    return parser.parse_args(arguments)


def load_diabetes(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """350 patients to train with, 92 to test with: ten figures each ``[10]`` and the disease's progress ``[1]``, all
    float64 with mean 0 and variance 1."""
    try:
        from sklearn import datasets
    except ModuleNotFoundError as error:
        sys.exit(f"the data come with scikit-learn, which is not installed ({error}): pip install scikit-learn")
    x, y = (torch.tensor(array, dtype=torch.float64) for array in datasets.load_diabetes(return_X_y=True))
    y = y.unsqueeze(1)
    x, y = ((t - t.mean(dim=0)) / t.std(dim=0) for t in (x, y))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    test, training = order[:TEST_PATIENTS], order[TEST_PATIENTS:]
    return x[training], y[training], x[test], y[test]


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(10, 1, dtype=torch.float64)


def train(model: nn.Module, x: Tensor, y: Tensor, patients: int, options: argparse.Namespace) -> nn.Module:
    """Gradient descent on the mean over `patients`, of which x and y are this process's share."""
    shared = isinstance(model, ringdp.RingDP)
    ranks = ringdp.world_size() if shared else 1
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    for _ in tqdm(range(options.steps), desc="training", disable=not shared or ringdp.rank() != 0):
        optimizer.zero_grad()
        # The mean over ranks of (ranks / patients) * (a rank's sum) is the mean over patients.
        loss = functional.mse_loss(model(x), y, reduction="sum") * ranks / patients
        loss.backward()
        optimizer.step()
    return model


@torch.no_grad()
def squared_error(model: nn.Module, x: Tensor, y: Tensor) -> float:
    return functional.mse_loss(model(x), y).item()


if __name__ == "__main__":
    sys.exit(main())
