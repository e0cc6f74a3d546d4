"""A compressor in C: built with the machine's C compiler, checked, and used by RingDP.

    python launch.py --nproc-per-node 2 examples/c_compressor.py
    python examples/c_compressor.py                          # one rank: nothing to compress

c_compressor.c has the functions. Rank 0 builds a shared library of it and gives its bytes to the other ranks: all must
have the same file. `ringdp.testing.check_compressor` tries what the functions promise, then a small network learns what
another one computes, with gradients of 8.1 bits an element. Exit code 1 where the ranks' parameters differ or the loss
is not low enough; without a C compiler it says so and ends.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import ringdp
from ringdp.compression import CCompressor
from ringdp.testing import check_compressor

SOURCE = Path(__file__).with_suffix(".c")
# Contraction would round a * b + c once where another rank rounds twice.
FLAGS = ["-std=c99", "-O3", "-fPIC", "-shared", "-ffp-contract=off"]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    ringdp.init()
    try:
        with tempfile.TemporaryDirectory() as folder:
            library = everybodys_library(Path(folder))
            if library is None:
                return 0
            compressor = ringdp.compression.load(library, error_feedback=True)
            passed = run(compressor, options)
    finally:
        ringdp.shutdown()
    return 0 if passed else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=200, help="of training (default %(default)s)")
    add("--batch-size", type=int, default=64, help="samples per rank and step (default %(default)s)")
    add("--lr", type=float, default=0.05, help="learning rate of SGD with momentum 0.9 (default %(default)s)")
    add("--seed", type=int, default=0, help="seed of both networks and of the samples (default %(default)s)")
    add("--max-loss", type=float, default=0.01, help="mean squared error to reach (default %(default)s)")
    return parser.parse_args(arguments)


def compiler() -> list[str] | None:
    """The C compiler that Python was built with, or the machine's, or None."""
    for words in (os.environ.get("CC"), sysconfig.get_config_var("CC"), "cc"):
        command = shlex.split(words or "")
        if command and shutil.which(command[0]):
            return command
    return None


def everybodys_library(folder: Path) -> Path | None:
    """The library, in `folder` on every rank; None where rank 0 has no C compiler."""
    path = folder / "libshift8.so"
    content: list[bytes | None] = [None]
    command = compiler()
    if dist.get_rank() == 0 and command is None:
        print("skipped: there is no C compiler on this machine (apt-get install gcc)")
    elif dist.get_rank() == 0 and command is not None:
        headers = f"-I{ringdp.compression.include_dir()}"
        subprocess.run([*command, *FLAGS, headers, str(SOURCE), "-o", str(path)], check=True)
        content = [path.read_bytes()]
    dist.broadcast_object_list(content, src=0)
    if content[0] is None:
        return None
    if dist.get_rank() != 0:
        path.write_bytes(content[0])
    return path


def run(compressor: CCompressor, options: argparse.Namespace) -> bool:
    """Check, train, check: rank 0 prints what came out."""
    speaks, ranks = dist.get_rank() == 0, dist.get_world_size()
    if speaks:
        print(check_compressor(compressor))
    torch.manual_seed(options.seed)
    teacher, network = (nn.Sequential(nn.Linear(32, 128), nn.Tanh(), nn.Linear(128, 8)) for _ in range(2))
    model = ringdp.RingDP(network, compression=ringdp.Compression(rules=[("*", compressor)]))  # biases, too
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9)
    samples = torch.Generator().manual_seed(options.seed * ranks + dist.get_rank())
    for _ in range(options.steps):
        x = torch.randn(options.batch_size, 32, generator=samples)
        optimizer.zero_grad()
        (model(x) - teacher(x).detach()).square().mean().backward()
        optimizer.step()
    with torch.no_grad():
        x = torch.randn(1000, 32, generator=torch.Generator().manual_seed(options.seed + 1))
        loss = (model.module(x) - teacher(x)).square().mean().item()
        mine = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])
    everybody = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(everybody, mine)
    same, enough = all(torch.equal(mine, other) for other in everybody), loss <= options.max_loss
    if speaks:
        print(f"{ranks} rank{'s' if ranks > 1 else ''}, {options.steps} steps")
        print(f"  {'ok    ' if same else 'FAILED'} parameters bit-identical on all ranks")
        print(f"  {'ok    ' if enough else 'FAILED'} loss {loss:.5f} (at most {options.max_loss})")
    return same and enough


if __name__ == "__main__":
    sys.exit(main())
