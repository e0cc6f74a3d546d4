"""Train a small CNN on scikit-learn's handwritten digits with RingDP, then check what data parallelism promises.

    python launch.py --nproc-per-node 2 examples/digits.py
    python examples/digits.py                                   # one rank, no launcher

At the end: are the parameters of all ranks the same to the bit, is the loss after 20 steps the one a single process
gets on the joined batches, is the test accuracy high enough. A check that fails makes the exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import itertools
import sys
import time
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ringdp

TEST_IMAGES = 360
LOSS_TOLERANCE = 1e-4
REPORT_EVERY_S = 2.0


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    ringdp.init(device=None if options.device == "auto" else options.device)
    torch.backends.cudnn.allow_tf32 = False  # with TF32 a half batch's loss differs in the third digit
    training_set, test_set = load_digits(options.seed)
    run = train(training_set, options)
    accuracy = evaluate(run.model, test_set)
    alone = losses_of_one_process(training_set, options)
    checks = [same_parameters(run.model), same_losses(run.losses, alone), enough_accuracy(accuracy, options)]
    if ringdp.rank() == 0:
        summarise(run, checks)
    ringdp.shutdown()
    return 0 if all(check.passed for check in checks) else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--epochs", type=positive, default=20, help="passes over the 1,437 training images (default %(default)s)")
    add("--batch-size", type=positive, default=32, help="images per rank and step (default %(default)s)")
    add("--lr", type=float, default=0.05, help="learning rate of SGD with momentum 0.9 (default %(default)s)")
    add("--seed", type=int, default=0, help="seed of the split, the weights and the order (default %(default)s)")
    add("--device", choices=("cpu", "cuda", "auto"), default="cpu", help="auto: a GPU per rank if any (default cpu)")
    add("--check-steps", type=positive, default=20, help="steps to repeat in one process (default %(default)s)")
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
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def batches(dataset: TensorDataset, rank: int, options: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's batches of all epochs; any process can also ask for another rank's."""
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(
        dataset, num_replicas=ringdp.world_size(), rank=rank, seed=options.seed, drop_last=True
    )
    loader = DataLoader(dataset, batch_size=options.batch_size, sampler=sampler, drop_last=True)
    if len(loader) == 0:
        sys.exit(f"{len(dataset)} images are too few for {ringdp.world_size()} ranks x {options.batch_size} images")
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        yield from loader


def steps_of(dataset: TensorDataset, options: argparse.Namespace) -> int:
    return options.epochs * (len(dataset) // ringdp.world_size() // options.batch_size)


@dataclasses.dataclass(frozen=True)
class Run:
    """The results of training on this rank."""

    model: ringdp.RingDP
    losses: list[float]  # of each step, mean over the ranks
    seconds: float
    samples: int  # of all ranks
    bytes_sent: int  # by this rank, during the steps


def train(dataset: TensorDataset, options: argparse.Namespace) -> Run:
    device = ringdp.device()
    model = ringdp.RingDP(build(options.seed).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    losses = []
    steps = steps_of(dataset, options)
    sent_before = ringdp.traffic().bytes_sent
    begin = time.perf_counter()
    with progress(steps) as advance:
        for images, labels in batches(dataset, ringdp.rank(), options):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images.to(device)), labels.to(device))
            loss.backward()  # gradients are averaged over the ranks while this runs
            optimizer.step()
            losses.append(loss.detach())
            advance(loss)
    seconds = time.perf_counter() - begin
    bytes_sent = ringdp.traffic().bytes_sent - sent_before
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    mean /= ringdp.world_size()
    samples = steps * options.batch_size * ringdp.world_size()
    return Run(model, mean.tolist(), seconds, samples, bytes_sent)


def losses_of_one_process(dataset: TensorDataset, options: argparse.Namespace) -> list[float]:
    """The same first steps without any communication: each on the joined batches of all ranks."""
    device = ringdp.device()
    model = build(options.seed).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    losses = []
    of_each_rank = [batches(dataset, rank, options) for rank in range(ringdp.world_size())]
    for parts in itertools.islice(zip(*of_each_rank, strict=True), options.check_steps):
        images, labels = (torch.cat(tensors).to(device) for tensors in zip(*parts, strict=True))
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def evaluate(model: nn.Module, dataset: TensorDataset) -> float:
    images, labels = (tensor.to(ringdp.device()) for tensor in dataset.tensors)
    return (model(images).argmax(dim=1) == labels).float().mean().item()


@dataclasses.dataclass(frozen=True)
class Check:
    passed: bool
    text: str


def same_parameters(model: nn.Module) -> Check:
    """Every rank hashes its parameters and buffers; all hashes are one."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    digests: list[str] = [""] * ringdp.world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    different = [rank for rank, other in enumerate(digests) if other != digests[0]]
    where = f"ranks {different} differ from rank 0" if different else f"on {len(digests)} ranks, {digests[0][:16]}…"
    return Check(not different, f"parameters bit-identical: {where}")


def same_losses(together: list[float], alone: list[float]) -> Check:
    difference = max(abs(a - b) for a, b in zip(together, alone, strict=False))
    last = len(alone) - 1
    return Check(
        difference <= LOSS_TOLERANCE,
        f"loss after {len(alone)} steps: {together[last]:.6f}, one process on the joined batches {alone[last]:.6f};"
        f" largest difference {difference:.1e} (limit {LOSS_TOLERANCE:.0e})",
    )


def enough_accuracy(accuracy: float, options: argparse.Namespace) -> Check:
    return Check(
        accuracy >= options.min_accuracy, f"test accuracy: {accuracy:.4f} (at least {options.min_accuracy:.2f})"
    )


def summarise(run: Run, checks: Sequence[Check]) -> None:
    steps = len(run.losses)
    stats = run.model.stats()
    ranks = ringdp.world_size()
    print(
        f"{ranks} rank{'s' if ranks > 1 else ''}, backend {dist.get_backend()}, {ringdp.device()}, {steps} steps",
        end=", ",
    )
    print(f"{run.seconds:.1f} s, loss {run.losses[-1]:.4f}")
    print(f"  {run.samples / run.seconds:,.0f} samples/s")
    print(f"  {run.bytes_sent / steps:,.0f} bytes sent per step over ring by rank 0")
    print(f"  {1000 * stats.total_exposed_wait_s / steps:.2f} ms exposed communication per step")
    for check in checks:
        print(f"  {'ok    ' if check.passed else 'FAILED'} {check.text}", flush=True)


@contextlib.contextmanager
def progress(steps: int) -> Iterator[Progress]:
    bar = Progress(steps)
    try:
        yield bar
    finally:
        bar.close()


class Progress:
    """On rank 0 a bar where standard error is a terminal, else a line now and then; on the others nothing."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.done = 0
        self.begin = self.reported = time.perf_counter()
        self.shown = ringdp.rank() == 0
        self.bar = None
        if self.shown and sys.stderr.isatty():
            with contextlib.suppress(ModuleNotFoundError):
                from tqdm import tqdm

                self.bar = tqdm(total=steps, unit="step", desc="training")

    def __call__(self, loss: Tensor) -> None:
        self.done += 1
        if not self.shown:
            return
        if self.bar is not None:
            self.bar.update()
            if self.done % 10 == 0:
                self.bar.set_postfix(loss=f"{loss.item():.4f}")
        elif (now := time.perf_counter()) - self.reported >= REPORT_EVERY_S or self.done == self.steps:
            self.reported = now
            print(f"step {self.done}/{self.steps}, {now - self.begin:.1f} s, loss {loss.item():.4f}", flush=True)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


if __name__ == "__main__":
    sys.exit(main())
