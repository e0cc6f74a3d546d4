"""Train with checkpoints, die, and go on as if nothing had happened: the same loss at every step, to the bit.

    python launch.py --nproc-per-node 2 --max-restarts 3 examples/checkpoint_resume.py --kills 3
    python examples/checkpoint_resume.py                        # one rank, no launcher; Ctrl-C and start it again

With --kills a rank chosen at random kills itself at a step chosen at random (SIGKILL), the launcher starts all ranks
again, and they continue from the newest checkpoint that is whole: model, optimizer, learning rate, the place in the
epoch, and every rank's random generators, on which dropout and the shifting of images depend. In the end the ranks
train once more without dying and without checkpoints, and compare. A difference makes the exit code 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import os
import random
import shutil
import signal
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


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    ringdp.init()
    images = load_digits()
    training = Training(images, options)
    begun_at = training.resume()
    training.run(options.steps, kill_at=kill_step(options, begun_at))
    again = Training(images, dataclasses.replace(options, folder=None))
    again.run(options.steps)
    passed = report(training, again, begun_at)
    if ringdp.rank() == 0 and options.temporary and options.folder is not None:
        shutil.rmtree(options.folder)
    ringdp.shutdown()
    return 0 if passed else 1


@dataclasses.dataclass(frozen=True)
class Options:
    """Command line."""

    steps: int
    batch_size: int
    every: int
    keep: int
    kills: int
    seed: int
    folder: Path | None
    temporary: bool


def parse(arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=positive, default=120, help="steps to train (default %(default)s)")
    add("--batch-size", type=positive, default=32, help="images per rank and step (default %(default)s)")
    add("--every", type=positive, default=10, help="steps between two checkpoints (default %(default)s)")
    add("--keep", type=positive, default=3, help="checkpoints to keep (default %(default)s)")
    add("--kills", type=int, default=0, help="how often to die; needs --max-restarts (default %(default)s)")
    add(
        "--seed",
        type=int,
        default=0,
        help="seed of weights, order, dropout, and of who dies when (default %(default)s)",
    )
    add("--folder", type=Path, help="for the checkpoints (default checkpoint_resume_files, removed at the end)")
    given = vars(parser.parse_args(arguments))
    allowed = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if given["kills"] > allowed:
        parser.error(f"--kills {given['kills']} needs launch.py --max-restarts {given['kills']}; it allows {allowed}")
    temporary = given["folder"] is None
    return Options(**given | {"folder": given["folder"] or Path("checkpoint_resume_files")}, temporary=temporary)


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


def kill_step(options: Options, begun_at: int) -> int | None:
    """The step at which this rank is to die in this attempt, or None; all ranks draw the same."""
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if attempt >= options.kills:
        return None
    draw = random.Random(f"{options.seed} {attempt}")
    victim, step = draw.randrange(ringdp.world_size()), draw.randrange(begun_at, options.steps)
    if victim != ringdp.rank():
        return None
    print(f"attempt {attempt}: rank {victim} will be killed at step {step}", file=sys.stderr, flush=True)
    return step


def load_digits() -> TensorDataset:
    """1,797 images ``[1, 8, 8]`` float32 in 0..1, and the digit."""
    try:
        from sklearn import datasets
    except ModuleNotFoundError as error:
        sys.exit(f"the digits come with scikit-learn, which is not installed ({error}): pip install scikit-learn")
    digits = datasets.load_digits()
    return TensorDataset(
        torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
    )


class Training:
    """Everything that a checkpoint has to bring back."""

    def __init__(self, images: TensorDataset, options: Options) -> None:
        torch.manual_seed(options.seed)  # the same weights everywhere,
        network = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.3),
            nn.Linear(16 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )
        torch.manual_seed(options.seed * 10_007 + ringdp.rank())  # but each rank draws its own dropout and shifts
        self.options = options
        self.images = images
        self.model = ringdp.RingDP(network)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 5e-3, total_steps=options.steps)
        self.sampler: DistributedSampler[Any] = DistributedSampler(images, seed=options.seed, drop_last=True)
        if len(self.sampler) < options.batch_size:
            sys.exit(f"{len(images)} images are too few for {ringdp.world_size()} ranks x {options.batch_size} images")
        self.epoch = 0
        self.batch = 0  # within the epoch
        self.losses: list[float] = []  # mean over the ranks, of every step since the beginning

    def save(self) -> None:
        shared = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "epoch": self.epoch,
            "batch": self.batch,
            "losses": torch.tensor(self.losses, dtype=torch.float64),
        }
        assert self.options.folder is not None
        own = checkpoint.rng_state()
        checkpoint.save(self.options.folder, len(self.losses), shared, own, keep=self.options.keep)

    def resume(self) -> int:
        """Continue where the newest checkpoint is, if there is one; at which step that is."""
        assert self.options.folder is not None
        found = checkpoint.load(self.options.folder)
        if found is None:
            return 0
        if found.own is None:
            sys.exit(f"{found.path} was written by {found.world_size} ranks, these are {ringdp.world_size()}")
        self.settle_buckets()
        self.model.load_state_dict(found.shared["model"])
        self.optimizer.load_state_dict(found.shared["optimizer"])
        self.scheduler.load_state_dict(found.shared["scheduler"])
        self.epoch, self.batch = found.shared["epoch"], found.shared["batch"]
        self.losses = found.shared["losses"].tolist()
        checkpoint.set_rng_state(found.own)
        if ringdp.rank() == 0:
            print(f"continuing from step {found.step}, {found.path}", flush=True)
        return found.step

    def settle_buckets(self) -> None:
        """A backward for nothing. After its first one RingDP lays its buckets out anew, in the order in which gradients
        came; with more than two ranks the order of addition, so the last bit, depends on where in a bucket a gradient
        lies. The run that is continued had its first backward long ago."""
        images, labels = self.images.tensors
        functional.cross_entropy(self.model(images[:2]), labels[:2]).backward()
        self.optimizer.zero_grad()

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's batches from the current place on, epoch after epoch; keeps count of the place."""
        images, labels = self.images.tensors
        while True:
            self.sampler.set_epoch(self.epoch)
            order = torch.tensor(list(self.sampler))
            full = [part for part in order.split(self.options.batch_size) if len(part) == self.options.batch_size]
            while self.batch < len(full):
                chosen = full[self.batch]
                self.batch += 1
                yield shifted(images[chosen]), labels[chosen]
            self.epoch, self.batch = self.epoch + 1, 0

    def run(self, steps: int, kill_at: int | None = None) -> None:
        self.model.train()
        batches = self.batches()
        saving = self.options.folder is not None
        bar = tqdm(
            total=steps,
            initial=len(self.losses),
            desc="training" if saving else "the same without dying",
            disable=ringdp.rank() != 0,
        )
        while len(self.losses) < steps:
            if len(self.losses) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            images, labels = next(batches)
            self.optimizer.zero_grad()
            loss = functional.cross_entropy(self.model(images), labels)
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.losses.append(ringdp.metrics.mean(loss.item()))
            bar.update()
            if saving and len(self.losses) % self.options.every == 0:
                self.save()
        bar.close()


def shifted(images: Tensor) -> Tensor:
    """Each image moved by up to one pixel, at random."""
    padded = functional.pad(images, (1, 1, 1, 1))
    down, right = torch.randint(3, (2,)).tolist()
    return padded[:, :, down : down + 8, right : right + 8]


def report(training: Training, again: Training, begun_at: int) -> bool:
    """Whether both runs agree in every bit, on all ranks."""
    different = [step for step, pair in enumerate(zip(training.losses, again.losses, strict=True)) if len({*pair}) > 1]
    all_same: list[bool] = [False] * ringdp.world_size()
    dist.all_gather_object(all_same, digest(training) == digest(again))
    differing = [rank for rank, same in enumerate(all_same) if not same]
    if ringdp.rank() == 0:
        attempts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) + 1
        steps = len(training.losses)
        print(
            f"{steps} steps in {attempts} attempts, the last one from step {begun_at}: loss {training.losses[-1]:.6f}"
        )
        where = f"differ first at step {different[0]}" if different else "bit-identical to a run that never died"
        print(f"  {'FAILED' if different else 'ok    '} {steps} losses: {where}")
        where = f"differ on ranks {differing}" if differing else f"bit-identical, {digest(training)[:16]}…"
        print(f"  {'FAILED' if differing else 'ok    '} parameters on every rank, buffers: {where}", flush=True)
    return not (differing or different)


def digest(training: Training) -> str:
    """Of the parameters and, on rank 0, of the buffers: the others get its buffers with the next forward."""
    tensors = list(training.model.parameters()) + (list(training.model.buffers()) if ringdp.rank() == 0 else [])
    whole = hashlib.sha256()
    for tensor in tensors:
        whole.update(tensor.detach().flatten().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
