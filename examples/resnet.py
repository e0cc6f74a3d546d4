"""ResNet-18 on CIFAR-10, or without it on scikit-learn's digits scaled up to 32 x 32 pixels in three colours.

    python launch.py --nproc-per-node 2 examples/resnet.py                               # digits, on a CPU
    python launch.py --nproc-per-node 4 examples/resnet.py --data cifar-10-batches-py --width 64 --epochs 30
    python examples/resnet.py --width 8 --epochs 2                                      # one rank, no launcher

CIFAR-10 is not downloaded. The python version (170 MB) is at https://www.cs.toronto.edu/~kriz/cifar.html:
    curl -O https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz && tar xf cifar-10-python.tar.gz
Its files are pickles; they are read by a reader that can make arrays and nothing else.

At the end: accuracy on the test images, shared among the ranks. One below --min-accuracy makes the exit code 1.
"""

from __future__ import annotations

import argparse
import codecs
import importlib
import itertools
import pickle
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

import ringdp

TEST_DIGITS = 360
CIFAR_PIXELS = 3 * 32 * 32


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    training, test = load_cifar(options.data) if options.data else load_digits(options.seed)
    ringdp.init()
    device = ringdp.device()
    torch.manual_seed(options.seed)
    network: nn.Module = ResNet18(options.width).to(device)
    if device.type == "cuda":  # faster there; on CPUs torch 2.13 crashes in convolutions of 4 channels laid out so
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if options.sync_bn:
        network = nn.SyncBatchNorm.convert_sync_batchnorm(network)  # mean and variance over all ranks' images
    model = ringdp.RingDP(network)
    loss = train(model, training, options)
    accuracy = evaluate(model, test, options.batch_size)
    passed = accuracy >= options.min_accuracy
    if ringdp.rank() == 0:
        ranks, parameters = ringdp.world_size(), sum(p.numel() for p in model.parameters())
        norm = "SyncBatchNorm" if options.sync_bn else "BatchNorm"
        print(f"{ranks} rank{'s' if ranks > 1 else ''} on {device.type}, {parameters:,} parameters, {norm},", end=" ")
        print(f"{options.epochs} epochs of {len(training):,} images, loss {loss:.4f}")
        print(
            f"  {'ok    ' if passed else 'FAILED'} accuracy on {len(test):,} other images: {accuracy:.4f}"
            f" (at least {options.min_accuracy:.2f})",
            flush=True,
        )
    ringdp.shutdown()
    return 0 if passed else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, help="folder with data_batch_1 to _5 and test_batch of CIFAR-10; digits without it")
    add("--epochs", type=positive, default=3, help="passes over the training images (default %(default)s)")
    add("--batch-size", type=positive, default=32, help="images per rank and step (default %(default)s)")
    add("--lr", type=float, default=0.05, help="highest learning rate of SGD, momentum 0.9 (default %(default)s)")
    add(
        "--width", type=positive, default=16, help="channels of the first stage; ResNet-18 has 64 (default %(default)s)"
    )
    add("--sync-bn", action="store_true", help="normalise over the images of all ranks, not of each by itself")
    add("--min-accuracy", type=float, default=0.0, help="accuracy to reach on the test images (default %(default)s)")
    add("--seed", type=int, default=0, help="seed of the split, the weights and the order (default %(default)s)")
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


# The images: uint8 [3, 32, 32] and their class, 0 to 9.


def load_digits(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """1,437 to train with and 360 to test with."""
    try:
        from sklearn import datasets
    except ModuleNotFoundError as error:
        sys.exit(f"the digits come with scikit-learn, which is not installed ({error}): pip install scikit-learn")
    digits = datasets.load_digits()
    small = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) * (255 / 16)
    large = functional.interpolate(small, size=(32, 32), mode="bilinear").round().to(torch.uint8).expand(-1, 3, -1, -1)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    test, training = order[:TEST_DIGITS], order[TEST_DIGITS:]
    return TensorDataset(large[training], labels[training]), TensorDataset(large[test], labels[test])


def load_cifar(folder: Path) -> tuple[TensorDataset, TensorDataset]:
    """All of ``data_batch_1`` to ``data_batch_5``, and ``test_batch``."""
    parts = [load_batch(folder / f"data_batch_{number}") for number in range(1, 6)]
    images, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return TensorDataset(images, labels), TensorDataset(*load_batch(folder / "test_batch"))


def load_batch(path: Path) -> tuple[Tensor, Tensor]:
    """One file of CIFAR-10's python version. Another file ends the program with a message."""
    try:
        with open(path, "rb") as file:
            batch = ArraysOnly(file, encoding="bytes").load()
        images, labels = torch.as_tensor(batch[b"data"]), torch.as_tensor(batch[b"labels"])
    except FileNotFoundError:
        sys.exit(f"{path} is not there: --data names the folder that cifar-10-python.tar.gz unpacks to (see --help)")
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        sys.exit(f"{path} is not a file of CIFAR-10's python version: {type(error).__name__}: {error}")
    count = len(labels) if labels.dim() == 1 else -1
    if images.dtype != torch.uint8 or images.shape != (count, CIFAR_PIXELS) or labels.is_floating_point():
        found = f"{images.dtype} {list(images.shape)} and {labels.dtype} {list(labels.shape)}"
        sys.exit(f"{path} holds {found} where CIFAR-10 has uint8 [n, {CIFAR_PIXELS}] and n labels")
    if count and not 0 <= int(labels.min()) <= int(labels.max()) < 10:
        sys.exit(f"{path} has labels from {int(labels.min())} to {int(labels.max())}: CIFAR-10's are 0 to 9")
    return images.view(count, 3, 32, 32).clone(), labels.long()


class ArraysOnly(pickle.Unpickler):
    """Reads NumPy arrays, numbers, text and containers; anything else in a pickle could be a program."""

    def find_class(self, module: str, name: str) -> Any:
        import numpy

        if name == "_reconstruct" and module in ("numpy.core.multiarray", "numpy._core.multiarray"):
            home = "numpy._core.multiarray" if hasattr(numpy, "_core") else "numpy.core.multiarray"
            return importlib.import_module(home)._reconstruct
        allowed: dict[tuple[str, str], Callable[..., Any]] = {
            ("numpy", "ndarray"): numpy.ndarray,
            ("numpy", "dtype"): numpy.dtype,
            ("_codecs", "encode"): latin1_bytes,  # how Python 3 writes bytes for Python 2
        }
        if (module, name) not in allowed:
            raise pickle.UnpicklingError(f"{module}.{name} has no business in there")
        return allowed[module, name]


def latin1_bytes(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes written as {encoding}")
    return codecs.encode(text, "latin1")


# The network (He et al., Deep Residual Learning for Image Recognition, 2015; the first layers as for small images).


class ResNet18(nn.Module):
    """Images ``[n, 3, 32, 32]`` to logits ``[n, 10]``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        stages = [
            nn.Sequential(Block(before, after, stride=1 if before == after else 2), Block(after, after))
            for before, after in itertools.pairwise(widths)
        ]
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(8 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.stages(self.first(x)).mean(dim=(2, 3)))
        return out


class Block(nn.Module):
    """Two convolutions, and a connection that adds their input to their output."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride=stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.convolutions(x) + self.shortcut(x))


# Training and evaluation.


def train(model: ringdp.RingDP, dataset: TensorDataset, options: argparse.Namespace) -> float:
    """Returns the last step's loss, mean over the ranks."""
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(dataset, seed=options.seed, drop_last=True)
    loader = DataLoader(dataset, batch_size=options.batch_size, sampler=sampler, drop_last=True)
    if len(loader) == 0:
        sys.exit(f"{len(dataset)} images are too few for {ringdp.world_size()} ranks x {options.batch_size} images")
    steps = options.epochs * len(loader)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=steps)
    draw = torch.Generator().manual_seed(options.seed * 10_007 + ringdp.rank())
    model.train()
    with tqdm(total=steps, desc="training", disable=ringdp.rank() != 0) as bar:
        for epoch in range(options.epochs):
            sampler.set_epoch(epoch)
            for images, labels in loader:
                x = prepared(shifted(images, draw))
                if options.data:
                    x = torch.where(torch.rand(len(x), 1, 1, 1, generator=draw) < 0.5, x.flip(3), x)
                optimizer.zero_grad()
                logits = model(x.to(ringdp.device()))
                loss = functional.cross_entropy(logits, labels.to(ringdp.device()))
                loss.backward()
                optimizer.step()
                schedule.step()
                bar.update()
    return float(ringdp.metrics.mean(loss.item()))


def prepared(images: Tensor) -> Tensor:
    """uint8 to float32 in -1..1."""
    return images.float() / 127.5 - 1


def shifted(images: Tensor, draw: torch.Generator) -> Tensor:
    """The batch moved by up to two pixels, at random."""
    down, right = torch.randint(5, (2,), generator=draw).tolist()
    return functional.pad(images, (2, 2, 2, 2))[:, :, down : down + 32, right : right + 32]


@torch.no_grad()
def evaluate(model: ringdp.RingDP, dataset: TensorDataset, batch_size: int) -> float:
    """Accuracy over all images, each seen by one rank.

    The module itself is asked, not RingDP, since not all ranks have equally many batches. Running means and variances
    are rank 0's on all ranks, as RingDP would have made them before the next forward.
    """
    for buffer in model.buffers():
        dist.broadcast(buffer, 0)
    network = model.module.eval()
    images, labels = (tensor[ringdp.rank() :: ringdp.world_size()] for tensor in dataset.tensors)
    right = 0
    for x, y in zip(images.split(batch_size), labels.split(batch_size), strict=True):
        logits = network(prepared(x).to(ringdp.device()))
        right += int((logits.argmax(dim=1).cpu() == y).sum())
    return ringdp.metrics.mean(right / max(len(labels), 1), len(labels))


if __name__ == "__main__":
    sys.exit(main())
