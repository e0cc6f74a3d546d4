"""Mixed precision in one realistic loop: autocast, loss scaling, gradient accumulation, clipping, compressed gradients
and checkpoints, on scikit-learn's handwritten digits.

    python launch.py --nproc-per-node 2 examples/train_amp.py
    python launch.py --nproc-per-node 2 examples/train_amp.py --compression int4 --precision bfloat16
    python examples/train_amp.py                                # one rank, no launcher

Stop it and start it again with the same --folder: it goes on from the newest checkpoint, with the loss scale and its
growth counter as they were. At the end: do all ranks have the same parameters and the same scale to the bit, was the
overflow that --overflow-at puts into one rank's gradients skipped by all of them, is the accuracy high enough. A check
that fails makes the exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import logging
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DistributedSampler, TensorDataset
from tqdm import tqdm

import ringdp
from ringdp import checkpoint

TEST_IMAGES = 360


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    logging.basicConfig(format="%(message)s")  # for ringdp.amp, which logs skipped steps
    ringdp.init()
    training_set, test_set = load_digits()
    training = Training(training_set, options)
    training.resume()
    training.run()
    passed = report(training, test_set)
    ringdp.shutdown()
    return 0 if passed else 1


@dataclasses.dataclass(frozen=True)
class Options:
    """Command line."""

    epochs: int
    batch_size: int
    accumulate: int
    lr: float
    clip: float
    precision: str
    compression: str
    every: int
    overflow_at: int
    min_accuracy: float
    seed: int
    folder: Path | None


def parse(arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--epochs", type=positive, default=12, help="passes over the 1,437 training images (default %(default)s)")
    add("--batch-size", type=positive, default=16, help="images per rank and backward (default %(default)s)")
    add("--accumulate", type=positive, default=2, help="backwards per step (default %(default)s)")
    add("--lr", type=float, default=3e-3, help="learning rate of AdamW (default %(default)s)")
    add("--clip", type=float, default=1.0, help="largest norm of all gradients (default %(default)s)")
    add("--precision", choices=("float16", "bfloat16"), default="float16", help="of autocast (default %(default)s)")
    add("--compression", choices=("none", "int8", "int4"), default="int8", help="of gradients (default %(default)s)")
    add("--every", type=positive, default=50, help="steps between two checkpoints (default %(default)s)")
    add("--overflow-at", type=int, default=20, help="a step with an overflow on rank 0; -1: none (default %(default)s)")
    add("--min-accuracy", type=float, default=0.95, help="test accuracy to reach (default %(default)s)")
    add("--seed", type=int, default=0, help="seed of weights and order (default %(default)s)")
    add("--folder", type=Path, help="for checkpoints (default: none are written)")
    return Options(**vars(parser.parse_args(arguments)))


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


def load_digits() -> tuple[TensorDataset, TensorDataset]:
    """1,437 images to train with and 360 to test with: ``[64]`` float32 in 0..1, and the digit."""
    try:
        from sklearn import datasets
    except ModuleNotFoundError as error:
        sys.exit(f"the digits come with scikit-learn, which is not installed ({error}): pip install scikit-learn")
    digits = datasets.load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, training = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return TensorDataset(images[training], labels[training]), TensorDataset(images[test], labels[test])


class Training:
    """A run, and everything that a checkpoint has to bring back."""

    def __init__(self, images: TensorDataset, options: Options) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.images = images
        self.device = ringdp.device()
        network = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 128), nn.GELU(), nn.Linear(128, 10))
        compression = None if options.compression == "none" else options.compression
        self.model = ringdp.RingDP(network.to(self.device), compression=compression)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=options.lr)
        self.scaler = ringdp.amp.GradScaler(self.device.type, growth_interval=200)
        self.sampler: DistributedSampler[Any] = DistributedSampler(images, seed=options.seed, drop_last=True)
        self.per_epoch = len(self.sampler) // (options.batch_size * options.accumulate)
        if self.per_epoch == 0:
            sys.exit(f"{len(images)} images are too few for these ranks, --batch-size and --accumulate")
        self.step = 0
        self.skipped: list[int] = []
        if options.overflow_at >= 0 and ringdp.rank() == 0:
            next(network.parameters()).register_hook(self.overflow)

    def run(self) -> None:
        steps = self.options.epochs * self.per_epoch
        bar = tqdm(total=steps, initial=self.step, desc="training", disable=ringdp.rank() != 0)
        while self.step < steps:
            scale = self.scaler.get_scale()
            loss = self.one_step()
            self.skipped += [self.step] if self.scaler.get_scale() < scale else []
            self.step += 1
            bar.update()
            if self.step % 10 == 0:
                bar.set_postfix(loss=f"{loss:.3f}", scale=f"{self.scaler.get_scale():g}")
            if self.options.folder is not None and (self.step % self.options.every == 0 or self.step == steps):
                self.save()
        bar.close()

    def one_step(self) -> float:
        """Several backwards, of which the last one averages and compresses; then unscale, clip, step."""
        self.optimizer.zero_grad()
        total = 0.0
        for number, (images, labels) in enumerate(self.batches()):
            last = number == self.options.accumulate - 1
            with contextlib.nullcontext() if last else self.model.no_sync():
                with torch.autocast(self.device.type, getattr(torch, self.options.precision)):
                    loss = functional.cross_entropy(self.model(images), labels)
                self.scaler.scale(loss / self.options.accumulate).backward()
            total += loss.item() / self.options.accumulate
        self.scaler.unscale_(self.optimizer)  # gradients are finite on all ranks, or known not to be
        nn.utils.clip_grad_norm_(self.model.parameters(), self.options.clip)
        self.scaler.step(self.optimizer)  # nothing, after an overflow
        self.scaler.update()
        return total

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's images for the step."""
        epoch, place = divmod(self.step, self.per_epoch)
        self.sampler.set_epoch(epoch)
        order = torch.tensor(list(self.sampler))
        images, labels = self.images.tensors
        first = place * self.options.accumulate
        for chosen in order.split(self.options.batch_size)[first : first + self.options.accumulate]:
            yield images[chosen].to(self.device), labels[chosen].to(self.device)

    def overflow(self, gradient: Tensor) -> Tensor:
        return gradient.clone().fill_(math.inf) if self.step == self.options.overflow_at else gradient

    def save(self) -> None:
        shared = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "skipped": torch.tensor(self.skipped, dtype=torch.int64),
        }
        if self.options.compression != "none":  # what codes left out, for any number of ranks
            shared["compression"] = self.model.compression_state_dict(consolidated=True)
        assert self.options.folder is not None
        checkpoint.save(self.options.folder, self.step, shared)

    def resume(self) -> None:
        """Continue where the newest checkpoint is, if there is one."""
        found = None if self.options.folder is None else checkpoint.load(self.options.folder)
        if found is None:
            return
        self.step = found.step
        self.model.load_state_dict(found.shared["model"])
        self.optimizer.load_state_dict(found.shared["optimizer"])
        self.scaler.load_state_dict(found.shared["scaler"])
        if self.options.compression != "none":
            self.model.load_compression_state_dict(found.shared["compression"])
        self.skipped = found.shared["skipped"].tolist()
        if ringdp.rank() == 0:
            print(f"continuing from step {found.step} with loss scale {self.scaler.get_scale():g}", flush=True)


def report(training: Training, test_set: TensorDataset) -> bool:
    """The checks that held, as text."""
    options = training.options
    whole = hashlib.sha256(repr(sorted(training.scaler.state_dict().items())).encode())
    for parameter in training.model.parameters():
        whole.update(parameter.detach().cpu().view(-1).view(torch.uint8).numpy().tobytes())
    digests: list[str] = [""] * ringdp.world_size()
    dist.all_gather_object(digests, whole.hexdigest())
    images, labels = (tensor.to(training.device) for tensor in test_set.tensors)
    with torch.no_grad():
        accuracy = float((training.model(images).argmax(dim=1) == labels).float().mean())
    expected = [options.overflow_at] if 0 <= options.overflow_at < training.step else []
    checks = {
        f"parameters and loss scale bit-identical on {len(digests)} ranks, {digests[0][:16]}…": len({*digests}) == 1,
        f"steps skipped: {training.skipped}, at least {expected}": {*expected} <= {*training.skipped},
        f"test accuracy: {accuracy:.4f} (at least {options.min_accuracy:.2f})": accuracy >= options.min_accuracy,
    }
    if ringdp.rank() == 0:
        ranks = f"{len(digests)} rank{'s' if len(digests) > 1 else ''}"
        scale = f"loss scale {training.scaler.get_scale():g}"
        print(f"{ranks}, {training.step} steps, {options.precision}, {scale}, compression {options.compression}")
        for text, passed in checks.items():
            print(f"  {'ok    ' if passed else 'FAILED'} {text}", flush=True)
    return all(checks.values())


if __name__ == "__main__":
    sys.exit(main())
