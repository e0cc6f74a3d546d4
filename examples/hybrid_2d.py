"""RingDP along one dimension of a mesh, tensor parallelism or pipeline stages along the other.

    python launch.py --nproc-per-node 4 examples/hybrid_2d.py --mode tp     # 2 replicas, each over 2 ranks
    python launch.py --nproc-per-node 4 examples/hybrid_2d.py --mode pp
    python examples/hybrid_2d.py                                            # one rank, no launcher: a mesh of 1x1

Trains residual blocks on scikit-learn's handwritten digits. At the end: is the loss of the first steps the one a single
process gets on the joined batches, do all replicas have the same parameters to the bit, is the test accuracy high
enough. A check that fails makes the exit code 1.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ringdp

TEST_IMAGES = 360
WIDTH = 64  # of the images, flat, and of what goes from block to block
BLOCKS = 4
MICROBATCHES = 4
LOSS_TOLERANCE = 1e-4

Batch = tuple[Tensor, Tensor]
Step = Callable[[Tensor, Tensor], Tensor]  # this replica's batch -> its mean loss, on every rank of the replica


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    ringdp.init()
    mesh = make_mesh(options)
    training_set, test_set = load_digits(options.seed)
    trainer = TensorParallel(mesh, options) if options.mode == "tp" else Pipelined(mesh, options)
    losses = train(trainer, training_set, mesh, options)
    alone = losses_of_one_process(training_set, mesh, options)
    checks = [same_losses(losses, alone), same_replicas(trainer), enough_accuracy(trainer.whole(), test_set, options)]
    if ringdp.rank() == 0:
        shape = f"{counted(mesh.shape[0], 'replica')} x {counted(mesh.shape[1], 'rank')}"
        print(f"{shape}, mode {options.mode}, backend {dist.get_backend()}", end=", ")
        print(f"{len(losses)} steps, loss {losses[-1]:.4f}")
        for passed, text in checks:
            print(f"  {'ok    ' if passed else 'FAILED'} {text}", flush=True)
    ringdp.shutdown()
    return 0 if all(passed for passed, _ in checks) else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--mode", choices=("tp", "pp"), default="tp", help="what is inside a replica (default %(default)s)")
    add("--inner", type=positive, help="ranks per replica (default 2, or 1 where the number of ranks is odd)")
    add("--epochs", type=positive, default=12, help="passes over the 1,437 training images (default %(default)s)")
    add("--batch-size", type=positive, default=32, help="images per replica and step (default %(default)s)")
    add("--lr", type=float, default=0.05, help="learning rate of SGD with momentum 0.9 (default %(default)s)")
    add("--seed", type=int, default=0, help="seed of the split, the weights and the order (default %(default)s)")
    add("--check-steps", type=positive, default=20, help="steps to repeat in one process (default %(default)s)")
    add("--min-accuracy", type=float, default=0.95, help="test accuracy to reach (default %(default)s)")
    options = parser.parse_args(arguments)
    if options.batch_size % MICROBATCHES:
        parser.error(f"--batch-size {options.batch_size} is no multiple of {MICROBATCHES}, the microbatches of a step")
    return options


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


def counted(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def make_mesh(options: argparse.Namespace) -> DeviceMesh:
    world = ringdp.world_size()
    inner = options.inner or (2 if world % 2 == 0 else 1)
    if world % inner:
        sys.exit(f"{world} ranks are no whole number of replicas of --inner {inner} ranks")
    if inner > BLOCKS:
        sys.exit(f"--inner {inner} is more than the model's {BLOCKS} blocks")
    return init_device_mesh("cpu", (world // inner, inner), mesh_dim_names=("replicate", "inner"))


def load_digits(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """1,437 images to train with and 360 to test with: ``[64]`` float32 in -1..1, and the digit."""
    try:
        from sklearn import datasets
    except ModuleNotFoundError as error:
        sys.exit(f"the digits come with scikit-learn, which is not installed ({error}): pip install scikit-learn")
    digits = datasets.load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 8 - 1
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    test, training = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return TensorDataset(images[training], labels[training]), TensorDataset(images[test], labels[test])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(functional.gelu(self.up(self.norm(x))))
        return x + hidden


def build(seed: int) -> nn.Sequential:
    """Blocks, then a layer that tells digits apart; ``[images, 64]`` to ``[images, 10]``."""
    torch.manual_seed(seed)
    return nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, 10))


class TensorParallel:
    """The first matrix of each block is split by columns, the second by rows, over a replica's ranks."""

    def __init__(self, mesh: DeviceMesh, options: argparse.Namespace) -> None:
        model = build(options.seed)
        plan = {f"{i}.up": ColwiseParallel() for i in range(BLOCKS)}
        plan |= {f"{i}.down": RowwiseParallel() for i in range(BLOCKS)}  # type: ignore[misc]
        parallelize_module(model, mesh["inner"], plan)  # type: ignore[arg-type]
        self.model = ringdp.RingDP(model, device_mesh=mesh["replicate"])
        self.parameters = list(self.model.parameters())

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        loss = functional.cross_entropy(self.model(images), labels)
        loss.backward()  # gradients are averaged over the replicas while this runs
        return loss.detach()

    def whole(self) -> dict[str, Tensor]:
        """The parameters as one process would have them; all ranks of a replica call it."""
        state = self.model.module.state_dict()
        return {name: part.full_tensor() if isinstance(part, DTensor) else part for name, part in state.items()}


class Pipelined:
    """Each rank of a replica has some of the layers; microbatches go through them, one after the other."""

    def __init__(self, mesh: DeviceMesh, options: argparse.Namespace) -> None:
        self.group = mesh["inner"].get_group()
        self.stage, self.stages = mesh["inner"].get_local_rank(), mesh["inner"].size()
        layers = list(build(options.seed).named_children())
        begin, end = (len(layers) * index // self.stages for index in (self.stage, self.stage + 1))
        self.model = ringdp.RingDP(nn.Sequential(dict_of(layers[begin:end])), device_mesh=mesh["replicate"])
        self.parameters = list(self.model.parameters())
        stage = PipelineStage(self.model, self.stage, self.stages, torch.device("cpu"), group=self.group)
        self.schedule = Schedule1F1B(stage, n_microbatches=MICROBATCHES, loss_fn=functional.cross_entropy)

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        losses: list[Tensor] = []
        inputs = [images] if self.stage == 0 else []
        last: dict[str, Any] = {"target": labels, "losses": losses} if self.stage == self.stages - 1 else {}
        self.schedule.step(*inputs, **last)  # gradients are averaged in the backward of the last microbatch
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.broadcast(loss, group_src=self.stages - 1, group=self.group)
        return loss

    def whole(self) -> dict[str, Tensor]:
        """The parameters as one process would have them; all ranks of a replica call it."""
        states: list[dict[str, Tensor]] = [{}] * self.stages
        dist.all_gather_object(states, self.model.module.state_dict(), group=self.group)
        return {name: tensor for state in states for name, tensor in state.items()}


def dict_of(layers: list[tuple[str, nn.Module]]) -> Any:
    """For nn.Sequential, so that a layer keeps the name it has in the whole model."""
    from collections import OrderedDict

    return OrderedDict(layers)


def batches(dataset: TensorDataset, replicas: int, replica: int, options: argparse.Namespace) -> Iterator[Batch]:
    """A replica's batches of all epochs; any process can also ask for another's."""
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(
        dataset, num_replicas=replicas, rank=replica, seed=options.seed, drop_last=True
    )
    loader = DataLoader(dataset, batch_size=options.batch_size, sampler=sampler, drop_last=True)
    if len(loader) == 0:
        sys.exit(f"{len(dataset)} images are too few for {replicas} replicas x {options.batch_size} images")
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        yield from loader


def train(
    trainer: TensorParallel | Pipelined, dataset: TensorDataset, mesh: DeviceMesh, options: argparse.Namespace
) -> list[float]:
    """The loss of each step, mean over the replicas."""
    optimizer = torch.optim.SGD(trainer.parameters, lr=options.lr, momentum=0.9)
    replicate = mesh["replicate"]
    losses = []
    for images, labels in batches(dataset, replicate.size(), replicate.get_local_rank(), options):
        optimizer.zero_grad()
        losses.append(trainer(images, labels))
        optimizer.step()
    mean = torch.stack(losses)
    dist.all_reduce(mean, group=replicate.get_group())
    return (mean / replicate.size()).tolist()


def losses_of_one_process(dataset: TensorDataset, mesh: DeviceMesh, options: argparse.Namespace) -> list[float]:
    """The same first steps without any communication: each on the joined batches of all replicas."""
    model = build(options.seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    replicas = mesh["replicate"].size()
    of_each = [batches(dataset, replicas, replica, options) for replica in range(replicas)]
    losses = []
    for parts in itertools.islice(zip(*of_each, strict=True), options.check_steps):
        images, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def same_losses(together: list[float], alone: list[float]) -> tuple[bool, str]:
    difference = max(abs(a - b) for a, b in zip(together, alone, strict=False))
    last = len(alone) - 1
    return difference <= LOSS_TOLERANCE, (
        f"equals one process: loss after {len(alone)} steps {together[last]:.6f}, on the joined batches"
        f" {alone[last]:.6f}; largest difference {difference:.1e} (limit {LOSS_TOLERANCE:.0e})"
    )


def same_replicas(trainer: TensorParallel | Pipelined) -> tuple[bool, str]:
    digest = hashlib.sha256()
    for _, tensor in sorted(trainer.whole().items()):
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    digests: list[str] = [""] * ringdp.world_size()
    dist.all_gather_object(digests, digest.hexdigest())
    different = [rank for rank, other in enumerate(digests) if other != digests[0]]
    where = f"ranks {different} differ from rank 0" if different else f"{digests[0][:16]}…"
    return not different, f"parameters of all replicas bit-identical: {where}"


@torch.no_grad()
def enough_accuracy(state: dict[str, Tensor], dataset: TensorDataset, options: argparse.Namespace) -> tuple[bool, str]:
    model = build(options.seed)
    model.load_state_dict(state)
    images, labels = dataset.tensors
    accuracy = (model(images).argmax(dim=1) == labels).float().mean().item()
    return accuracy >= options.min_accuracy, f"test accuracy: {accuracy:.4f} (at least {options.min_accuracy:.2f})"


if __name__ == "__main__":
    sys.exit(main())
