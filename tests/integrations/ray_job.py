"""What tests/integrations/test_ray.py runs: `python -m tests.integrations.ray_job FOLDER`, a cluster of two workers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from ringdp.integrations import RingConfig
from tests.integrations import training

CPUS = 3  # of the cluster, whatever the machine has: one for each worker and one to spare
OBJECT_STORE_BYTES = 100 * 1024 * 1024


def work(settings: dict[str, Any]) -> None:
    from ringdp import RingDP
    from ringdp.integrations.ray import prepare_model

    rank = ray.train.get_context().get_world_rank()
    plain = training.build(seed=rank)
    model = prepare_model(plain, bucket_cap_mb=1)
    optimizer = training.optimizer_of(plain)
    for step in range(3):
        training.loss_of(model, *training.batch(step, rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    results = {
        "weights": training.weights(plain),
        "wrapped": type(model) is RingDP,
        "backend": dist.get_backend(),
        "world": dist.get_world_size(),
    }
    torch.save(results, Path(settings["folder"]) / f"rank{rank}.pt")
    ray.train.report({"done": 1})


def main() -> None:
    folder = sys.argv[1]
    ray.init(num_cpus=CPUS, include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, _temp_dir=f"{folder}/ray")
    trainer = TorchTrainer(
        work,
        train_loop_config={"folder": folder},
        torch_config=RingConfig(),
        scaling_config=ScalingConfig(num_workers=training.RANKS, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(name="ringdp", storage_path=folder),
    )
    trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
