"""Ray Train with ring as its process group: two workers train on scikit-learn's digits, and end with the same bits.

    pip install "ray[train]>=2.60" pandas
    python examples/ray_train.py                                # Ray starts the workers: no ringrun here

Without a cluster Ray makes one of this machine; `--address auto` takes the one that runs here. ringdp must be installed
on all of its nodes. Weights that differ between the workers, or a poor accuracy, make the exit code 1.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import ray
import ray.train
import torch
from ray.train.torch import TorchTrainer
from torch import Tensor, nn

from ringdp.integrations import RingConfig


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="ring in Ray Train")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--address", help="of the cluster, for ray.init")
    options = parser.parse_args(arguments)
    own = {} if options.address else {"num_cpus": options.workers + 1, "include_dashboard": False}
    ray.init(options.address, **own)
    with tempfile.TemporaryDirectory() as folder:
        result = TorchTrainer(
            work,
            train_loop_config={"epochs": options.epochs},
            torch_config=RingConfig(),  # the one line that makes it ring
            scaling_config=ray.train.ScalingConfig(num_workers=options.workers, resources_per_worker={"CPU": 1}),
            run_config=ray.train.RunConfig(name="digits", storage_path=folder),
        ).fit()
    ray.shutdown()
    found = result.metrics
    workers = f"{found['workers']} workers on {found['backend']}"
    print(f"{workers}: accuracy {found['accuracy']:.3f}, {found['hashes']} set of weights")
    return 0 if found["hashes"] == 1 and found["accuracy"] > 0.9 else 1


def work(settings: dict[str, Any]) -> None:
    """The training of each worker."""
    import torch.distributed as dist

    import ringdp
    from ringdp.integrations.ray import prepare_model

    images, labels = load_digits()
    test = torch.arange(len(labels)) % 5 == 0
    mine = torch.arange(len(labels))[~test][ringdp.rank() :: ringdp.world_size()]
    model = prepare_model(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps = len(labels[~test]) // ringdp.world_size() // 32  # the same on each worker
    for _ in range(settings["epochs"]):
        for batch in mine[torch.randperm(len(mine))][: 32 * steps].split(32):
            nn.functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
    right = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
    weights = b"".join(it.detach().numpy().tobytes() for it in model.parameters())
    hashes: list[Any] = [None] * ringdp.world_size()
    dist.all_gather_object(hashes, hashlib.sha256(weights).hexdigest())
    found = {
        "accuracy": right,
        "hashes": len(set(hashes)),
        "workers": ringdp.world_size(),
        "backend": dist.get_backend(),
    }
    with tempfile.TemporaryDirectory() as folder:  # Ray keeps the numbers that come with a checkpoint
        torch.save(model.state_dict(), f"{folder}/model.pt")
        kept = ray.train.Checkpoint.from_directory(folder) if ringdp.rank() == 0 else None
        ray.train.report(found, checkpoint=kept)


def load_digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits as load

    data = load()
    return torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)


if __name__ == "__main__":
    sys.exit(main())
