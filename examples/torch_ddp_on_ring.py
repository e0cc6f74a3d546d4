"""A plain PyTorch DDP script: only the import and the name of the backend are ringdp's.

    torchrun --nproc-per-node 2 examples/torch_ddp_on_ring.py
    torchrun --nproc-per-node 2 examples/torch_ddp_on_ring.py --backend gloo      # to compare
    python examples/torch_ddp_on_ring.py                                          # one rank, no launcher

It trains a small CNN on scikit-learn's handwritten digits. ring's own launcher starts it just as well:
python launch.py --nproc-per-node 2 examples/torch_ddp_on_ring.py. On two ranks ring and gloo print the same checksum of
the parameters. Exit code 1 where the ranks' parameters differ or the test accuracy is too low.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ringdp  # noqa: F401  (registers the backend; where ringdp is installed, importing torch does that already)

TEST_IMAGES = 360


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if "RANK" in os.environ:
        dist.init_process_group(options.backend)
    else:
        alone = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(options.backend, store=alone, rank=0, world_size=1)
    try:
        training_set, test_set = load_digits(options.seed)
        model = train(training_set, options)
        passed = check(model, test_set, options)
    finally:
        dist.destroy_process_group()
    return 0 if passed else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--backend", choices=("ring", "gloo"), default="ring", help="of torch.distributed (default %(default)s)")
    add("--epochs", type=positive, default=20, help="passes over the 1,437 training images (default %(default)s)")
    add("--batch-size", type=positive, default=32, help="images per rank and step (default %(default)s)")
    add("--lr", type=float, default=0.05, help="learning rate of SGD with momentum 0.9 (default %(default)s)")
    add("--seed", type=int, default=0, help="seed of the split, the weights and the order (default %(default)s)")
    add("--min-accuracy", type=float, default=0.97, help="test accuracy to reach (default %(default)s)")
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


def load_digits(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """1,437 images to train with and 360 to test with: ``[1, 8, 8]`` float32 in -1..1, and the digit."""
    try:
        from sklearn import datasets
    except ModuleNotFoundError as error:
        sys.exit(f"the digits come with scikit-learn, which is not installed ({error}): pip install scikit-learn")
    digits = datasets.load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    test, training = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return TensorDataset(images[training], labels[training]), TensorDataset(images[test], labels[test])


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def train(dataset: TensorDataset, options: argparse.Namespace) -> DistributedDataParallel:
    model = DistributedDataParallel(build(options.seed))
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    sampler: DistributedSampler[tuple[torch.Tensor, ...]] = DistributedSampler(dataset, seed=options.seed)
    loader = DataLoader(dataset, batch_size=options.batch_size, sampler=sampler, drop_last=True)
    if len(loader) == 0:
        sys.exit(f"{len(dataset)} images are too few for {dist.get_world_size()} ranks x {options.batch_size} images")
    begin = time.perf_counter()
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images), labels)
            loss.backward()  # gradients are averaged over the ranks while this runs
            optimizer.step()
    seconds = time.perf_counter() - begin
    steps, ranks = options.epochs * len(loader), dist.get_world_size()
    if dist.get_rank() == 0:
        print(
            f"{ranks} rank{'s' if ranks > 1 else ''}, backend {dist.get_backend()}, {steps} steps, {seconds:.1f} s,"
            f" {steps * options.batch_size * ranks / seconds:,.0f} samples/s, loss {loss.item():.4f}"
        )
    return model


@torch.no_grad()
def check(model: nn.Module, dataset: TensorDataset, options: argparse.Namespace) -> bool:
    """Whether the ranks' parameters are the same to the bit and good enough; rank 0 prints both."""
    model.eval()
    images, labels = dataset.tensors
    accuracy = (model(images).argmax(dim=1) == labels).float().mean().item()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().numpy().tobytes())
    digests: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    same, enough = len(set(digests)) == 1, accuracy >= options.min_accuracy
    if dist.get_rank() == 0:
        print(f"  {'ok    ' if same else 'FAILED'} parameters bit-identical on all ranks: {digests[0][:16]}…")
        print(
            f"  {'ok    ' if enough else 'FAILED'} test accuracy: {accuracy:.4f} (at least {options.min_accuracy:.2f})"
        )
    return same and enough


if __name__ == "__main__":
    sys.exit(main())
