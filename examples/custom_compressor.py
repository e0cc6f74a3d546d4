"""A compressor of one's own: a sign and a scale for each block, with error feedback, on torch's DDP.

    python launch.py --nproc-per-node 2 examples/custom_compressor.py
    torchrun --nproc-per-node 2 examples/custom_compressor.py --backend gloo       # the same on torch's own backend
    python examples/custom_compressor.py                                           # one rank: nothing to compress

It trains a small network on scikit-learn's handwritten digits with gradients of 1.1 bits an element. It checks the
compressor first (`ringdp.testing.check_compressor`), and the ranks' parameters last. Exit code 1 where the ranks'
parameters differ or the test accuracy is too low. docs/start/custom_compressors.md explains it step by step.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import ringdp
from ringdp.compression import Compression, Info
from ringdp.hooks import ddp_hook
from ringdp.testing import check_compressor

TEST_IMAGES = 360
BLOCK = 256


@ringdp.compression.register("block sign")
class Sign:
    """Each element becomes its sign times the mean magnitude of its block: 1 bit, and 4 bytes a block."""

    error_feedback = True  # without it, small elements would never count

    def compress(self, x: Tensor, info: Info) -> tuple[Tensor, ...]:
        blocks = functional.pad(x, (0, -x.numel() % BLOCK)).view(-1, BLOCK)
        bits = (blocks >= 0).view(-1, 8) << torch.arange(8)
        return bits.sum(1).to(torch.uint8), blocks.abs().mean(1)

    def decompress(self, payload: tuple[Tensor, ...], info: Info) -> Tensor:
        packed, scale = payload
        signs = (packed.unsqueeze(1) >> torch.arange(8) & 1).view(-1, BLOCK) * 2.0 - 1.0
        return (signs * scale.unsqueeze(1)).view(-1)[: info.numel]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    ringdp.init(options.backend if "RANK" in os.environ else None)
    try:
        if dist.get_rank() == 0:
            print(check_compressor("block sign"))
        images, labels = load_digits(options.seed)
        model = train(images[TEST_IMAGES:], labels[TEST_IMAGES:], options)
        passed = check(model, images[:TEST_IMAGES], labels[:TEST_IMAGES], options)
    finally:
        ringdp.shutdown()
    return 0 if passed else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--backend", choices=("ring", "gloo"), default="ring", help="of torch.distributed (default %(default)s)")
    add("--epochs", type=int, default=20, help="passes over the 1,437 training images (default %(default)s)")
    add("--batch-size", type=int, default=32, help="images per rank and step (default %(default)s)")
    add("--lr", type=float, default=0.02, help="learning rate of SGD with momentum 0.9 (default %(default)s)")
    add("--seed", type=int, default=0, help="seed of the split, the weights and the order (default %(default)s)")
    add("--min-accuracy", type=float, default=0.94, help="test accuracy to reach (default %(default)s)")
    return parser.parse_args(arguments)


def load_digits(seed: int) -> tuple[Tensor, Tensor]:
    """Images ``[1797, 64]`` in -1..1 and their digits, in an order of the seed's."""
    try:
        from sklearn import datasets
    except ModuleNotFoundError as error:
        sys.exit(f"the digits come with scikit-learn, which is not installed ({error}): pip install scikit-learn")
    digits = datasets.load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(seed))
    return torch.tensor(digits.data, dtype=torch.float32)[order] / 8 - 1, torch.tensor(digits.target)[order]


def train(images: Tensor, labels: Tensor, options: argparse.Namespace) -> DistributedDataParallel:
    torch.manual_seed(options.seed)
    network = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, 10))
    model = DistributedDataParallel(network)
    # The last layer stays exact.
    model.register_comm_hook(*ddp_hook(Compression("block sign", [("4.weight", None)]), model=model))
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    rank, ranks, loss = dist.get_rank(), dist.get_world_size(), torch.zeros(())
    for epoch in range(options.epochs):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))[rank::ranks]
        for batch in order[: len(labels) // ranks].split(options.batch_size):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images[batch]), labels[batch])
            loss.backward()  # gradients are compressed, exchanged and averaged while this runs
            optimizer.step()
    if rank == 0:
        print(f"{ranks} rank{'s' if ranks > 1 else ''}, backend {dist.get_backend()}, loss {loss.item():.4f}")
    return model


@torch.no_grad()
def check(model: DistributedDataParallel, images: Tensor, labels: Tensor, options: argparse.Namespace) -> bool:
    """Whether the ranks' parameters are the same to the bit and good enough; rank 0 prints both."""
    accuracy = (model(images).argmax(dim=1) == labels).float().mean().item()
    mine = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])
    everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, mine)
    same, enough = all(torch.equal(mine, other) for other in everybody), accuracy >= options.min_accuracy
    if dist.get_rank() == 0:
        print(f"  {'ok    ' if same else 'FAILED'} parameters bit-identical on all ranks")
        print(
            f"  {'ok    ' if enough else 'FAILED'} test accuracy: {accuracy:.4f} (at least {options.min_accuracy:.2f})"
        )
    return same and enough


if __name__ == "__main__":
    sys.exit(main())
