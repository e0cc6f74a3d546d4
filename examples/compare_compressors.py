"""Train the same small network with every compressor, several times, and compare accuracy, bytes and time.

    python launch.py --nproc-per-node 4 examples/compare_compressors.py --seeds 5 --csv compressors.csv
    RINGDP_RATE=100mbit RINGDP_TRANSPORT=tcp python launch.py --nproc-per-node 2 examples/compare_compressors.py
    python examples/compare_compressors.py                       # one rank, no launcher: nothing to compress

The second line shows what a slower network would make of it: every rank sends no more than its share of that rate. Each
seed trains every compressor from the same weights on the same images, scikit-learn's handwritten digits. With
`--module` compressors of your own are in the table, by the names that it registers. `topk-dgc` is top-k with momentum
on the ranks, which the optimizer then has not. If the exact training is not good enough, the exit code is 1.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import importlib
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

import ringdp
from ringdp import compression

TEST_IMAGES = 360
MOMENTUM, RAMP_STEPS = 0.9, 20
COMPRESSORS = (
    "exact,fp16,bf16,int8,int6,int5,int4,nf4,qsgd,terngrad,sign,signsgd,topk,topk-dgc,randomk,powersgd"  # by bits
)
LR_FACTORS = {"signsgd": 0.01}  # all that it sends is as large as 1


@dataclasses.dataclass(frozen=True)
class Result:
    """Of one training, over all ranks."""

    compressor: str
    seed: int
    accuracy_percent: float
    bytes_sent_per_step: float  # mean over the ranks, frame headers included
    step_ms: float  # median, the slowest rank's


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    ringdp.init(device="cpu")
    if options.module:
        importlib.import_module(options.module)
    images, labels = load_digits()
    results = []
    runs = [(name, seed) for seed in range(options.seeds) for name in options.compressors]
    for name, seed in tqdm(runs, desc="training", disable=ringdp.rank() != 0):
        results.append(train(name, seed, images, labels, options))
    exact = [it.accuracy_percent for it in results if it.compressor == "exact"]
    good = not exact or min(exact) >= options.min_accuracy
    if ringdp.rank() == 0:
        report(results, options)
        if exact:
            words = f"accuracy without compression: {min(exact):.2f} %, at least {options.min_accuracy:.2f} %"
            print(f"  {'ok    ' if good else 'FAILED'} {words}", flush=True)
        if options.csv is not None:
            write(options.csv, results)
    ringdp.shutdown()
    return 0 if good else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--compressors", default=COMPRESSORS, help="names, exact is none (default %(default)s)")
    add("--module", metavar="NAME", help="a Python module to import first, which registers compressors")
    add("--seeds", type=positive, default=3, help="trainings of each, with seeds from 0 on (default %(default)s)")
    add("--epochs", type=positive, default=10, help="passes over the 1,437 training images (default %(default)s)")
    add("--batch-size", type=positive, default=32, help="images per rank and step (default %(default)s)")
    add("--lr", type=float, default=0.05, help="learning rate of SGD with momentum 0.9 (default %(default)s)")
    add("--min-accuracy", type=float, default=90.0, help="percent that exact must reach (default %(default)s)")
    add("--csv", type=Path, metavar="FILE", help="write a row for each training there")
    options = parser.parse_args(arguments)
    options.compressors = options.compressors.split(",")
    return options


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


def load_digits() -> tuple[Tensor, Tensor]:
    """1,797 images ``[1, 8, 8]`` float32 in -1..1, in a fixed random order, and their digits."""
    try:
        from sklearn import datasets
    except ModuleNotFoundError as error:
        sys.exit(f"the digits come with scikit-learn, which is not installed ({error}): pip install scikit-learn")
    digits = datasets.load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)[order] / 8 - 1, torch.tensor(digits.target)[
        order
    ]


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def batches(count: int, seed: int, options: argparse.Namespace) -> Iterator[Tensor]:
    """Which training images this rank takes in each step."""
    draw = torch.Generator().manual_seed(seed)
    each = options.batch_size * ringdp.world_size()
    for _ in range(options.epochs):
        order = torch.randperm(count, generator=draw)
        for begin in range(0, count - each + 1, each):
            yield order[begin : begin + each][ringdp.rank() :: ringdp.world_size()]


def compressor(name: str, options: argparse.Namespace) -> compression.Compressor | None:
    if name == "exact":
        return None
    if name == "topk-dgc":
        return compression.TopK(0.01, ramp_steps=RAMP_STEPS, error_feedback=compression.DGC(MOMENTUM))
    return compression.get(name)


def optimizer_of(network: nn.Module, name: str, options: argparse.Namespace) -> torch.optim.Optimizer:
    """SGD with momentum, but none for weights whose momentum is on the ranks; biases are sent exactly and keep it."""
    weights = [it for it in network.parameters() if it.dim() > 1 and it.numel() >= 1024]
    others = [it for it in network.parameters() if it.dim() <= 1 or it.numel() < 1024]
    groups = [
        {"params": weights, "momentum": 0.0 if name == "topk-dgc" else MOMENTUM},
        {"params": others, "momentum": MOMENTUM},
    ]
    return torch.optim.SGD(groups, lr=options.lr * LR_FACTORS.get(name, 1.0))


def train(name: str, seed: int, images: Tensor, labels: Tensor, options: argparse.Namespace) -> Result:
    model = ringdp.RingDP(build(seed), compression=compressor(name, options))
    optimizer = optimizer_of(model.module, name, options)
    seconds = []
    sent_before = ringdp.traffic().bytes_sent
    for rows in batches(len(labels) - TEST_IMAGES, seed, options):
        begin = time.perf_counter()
        optimizer.zero_grad()
        functional.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    sent = (ringdp.traffic().bytes_sent - sent_before) / len(seconds)
    with torch.no_grad():
        right = model.module(images[-TEST_IMAGES:]).argmax(dim=1) == labels[-TEST_IMAGES:]
    slowest = torch.tensor([statistics.median(seconds)], dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    accuracy, bytes_sent = 100 * right.double().mean().item(), ringdp.metrics.mean(sent, 1)
    return Result(name, seed, accuracy, bytes_sent, 1000 * slowest.item())


def report(results: Sequence[Result], options: argparse.Namespace) -> None:
    ranks = ringdp.world_size()
    print(f"{ranks} rank{'s' if ranks > 1 else ''}, {options.seeds} seeds, {options.epochs} epochs")
    print(f"{'compressor':12} {'accuracy, %':>16} {'bytes per step':>16} {'of exact':>9} {'ms per step':>12}")
    exact = [it.bytes_sent_per_step for it in results if it.compressor == "exact"]
    for name in options.compressors:
        mine = [it for it in results if it.compressor == name]
        accuracy = [it.accuracy_percent for it in mine]
        spread = statistics.stdev(accuracy) if len(accuracy) > 1 else 0.0
        sent = statistics.fmean(it.bytes_sent_per_step for it in mine)
        share = f"{sent / statistics.fmean(exact):.3f}" if exact and sum(exact) else ""
        took = statistics.median(it.step_ms for it in mine)
        cells = f"{statistics.fmean(accuracy):9.2f} ± {spread:4.2f} {sent:16,.0f} {share:>9} {took:12.2f}"
        print(f"{name:12} {cells}", flush=True)


def write(path: Path, results: Sequence[Result]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.DictWriter(file, [field.name for field in dataclasses.fields(Result)])
        rows.writeheader()
        rows.writerows(dataclasses.asdict(it) for it in results)


if __name__ == "__main__":
    sys.exit(main())
