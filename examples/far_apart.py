"""Ranks far apart: the same training twice, exact in every step and by rounds that send a fraction of the bytes.

    python launch.py --nproc-per-node 2 examples/far_apart.py
    python launch.py --nproc-per-node 4 examples/far_apart.py --sites 2    # exact inside a site, rounds between the two
    ringrun -H paris:2,oslo:2 examples/far_apart.py                        # two real ones
    sudo python -m benchmarks long_line --hosts 2 --per-host 2 --rate 20mbit -- python examples/far_apart.py
                                                                           # two in namespaces, 50 ms there and back
    python examples/far_apart.py                                           # one rank, no launcher

A small network learns scikit-learn's digits. First RingDP averages gradients over all ranks in every step. Then the
ranks of a site do that among themselves (where it has several), and DiLoCo averages between sites every --every steps,
in fragments, as 4-bit codes, while the ranks go on. Printed are both losses on images that were not trained on, the
seconds of both, and what a rank sent for each. The exit code is 1 if rounds end with a loss above --worst times the
exact one, or if the ranks do not have the same bits at the end.
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
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm

import ringdp

Data = tuple[Tensor, Tensor]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    ringdp.init(device="cpu")
    rank, ranks = ringdp.rank(), ringdp.world_size()
    training, unseen = load_digits(options.seed)

    network = build(options.seed)
    model = ringdp.RingDP(network)
    began = time.monotonic()
    train("exact", model, training, options)
    exact_s = time.monotonic() - began
    exact, exact_bytes = loss_on(network, unseen), options.steps * gradient_bytes(network)

    if options.sites:  # as if this rank were in another place than some others
        os.environ["RINGDP_SITE"] = f"site-{rank * options.sites // ranks}"
    inside, between = ringdp.levels()
    network = build(options.seed)
    site = network if inside is None else ringdp.RingDP(network, process_group=inside)
    began = time.monotonic()
    rounds_bytes = train("rounds", site, training, options, between)
    rounds_s = time.monotonic() - began
    rounds = loss_on(network, unseen)

    same = len(set(gathered(digest(network)))) == 1
    good = rounds <= options.worst * exact
    if rank == 0:
        places = 1 if between is None else between.size()
        where = f"{places} place{'s' if places > 1 else ''}"
        print(f"{ranks} rank{'s' if ranks > 1 else ''} in {where}, {options.steps} steps")
        print(f"  exact in every step: loss {exact:.4f}; {exact_s:.1f} s, {exact_bytes / 1e6:.2f} MB of gradients")
        print(f"  {'ok    ' if good else 'FAILED'} rounds of {options.every} steps: loss {rounds:.4f}", end="; ")
        print(f"{rounds_s:.1f} s, {rounds_bytes / 1e6:.2f} MB of codes between places")
        print(f"  {'ok    ' if same else 'FAILED'} parameters bit-identical on all ranks", flush=True)
    ringdp.shutdown()
    return 0 if good and same else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").strip(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=600, help="of each rank (default %(default)s)")
    add("--every", type=int, default=25, help="steps of a round (default %(default)s)")
    add(
        "--fragments",
        type=int,
        default=2,
        help="parts of the model that leave one after the other (default %(default)s)",
    )
    add("--delay", type=int, default=3, help="steps that a fragment is on its way (default %(default)s)")
    add("--compression", default="int4", help="of changes (default %(default)s)")
    add("--sites", type=int, default=0, help="pretend that the ranks are in so many places (default: their hosts)")
    add("--batch-size", type=int, default=16, help="images of a step and rank (default %(default)s)")
    add("--lr", type=float, default=1e-3, help="learning rate of AdamW (default %(default)s)")
    add("--seed", type=int, default=0, help="seed of the weights and the order (default %(default)s)")
    add("--worst", type=float, default=1.5, help="largest loss of rounds, in exact ones (default %(default)s)")
    return parser.parse_args(arguments)


def load_digits(seed: int) -> tuple[Data, Data]:
    """Images as rows of 64 grey values, and their digits: 1,437 to train on, 360 others."""
    try:
        from sklearn import datasets
    except ModuleNotFoundError as error:
        sys.exit(f"the data come with scikit-learn, which is not installed ({error}): pip install scikit-learn")
    x, y = datasets.load_digits(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    x, y = torch.tensor(x, dtype=torch.float32)[order] / 16, torch.tensor(y)[order]
    return (x[360:], y[360:]), (x[:360], y[:360])


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))


def train(
    name: str, model: nn.Module, data: Data, options: argparse.Namespace, between: dist.ProcessGroup | None = None
) -> int:
    """Every rank draws its own images. Returns the bytes that this rank has sent for rounds."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    rounds = None
    if name == "rounds":
        rounds = ringdp.DiLoCo(
            model,
            optimizer,
            every=options.every,
            fragments=ringdp.Fragments(options.fragments, options.delay),
            compression=options.compression,
            process_group=between,  # None: all ranks are in one place, and already equal
        )
    draw = torch.Generator().manual_seed(options.seed * 10_007 + ringdp.rank())
    for _ in tqdm(range(options.steps), desc=name, disable=ringdp.rank() != 0):
        rows = torch.randint(len(data[0]), (options.batch_size,), generator=draw)
        optimizer.zero_grad()
        functional.cross_entropy(model(data[0][rows]), data[1][rows]).backward()
        optimizer.step()  # rounds hang on this
    if rounds is None:
        return 0
    rounds.finish()
    return rounds.stats().bytes_sent


@torch.no_grad()
def loss_on(network: nn.Module, data: Data) -> float:
    return functional.cross_entropy(network(data[0]), data[1]).item()


def gradient_bytes(network: nn.Module) -> int:
    """What a rank sends to average all gradients once: 2 (n - 1) / n of them."""
    ranks = ringdp.world_size()
    return sum(4 * p.numel() for p in network.parameters()) * 2 * (ranks - 1) // ranks


def digest(network: nn.Module) -> str:
    content = b"".join(p.detach().numpy().tobytes() for p in network.parameters())
    return hashlib.sha256(content).hexdigest()


def gathered(text: str) -> list[str]:
    everything = [""] * ringdp.world_size()
    dist.all_gather_object(everything, text)
    return everything


if __name__ == "__main__":
    sys.exit(main())
