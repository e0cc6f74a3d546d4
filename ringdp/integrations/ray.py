"""Ray Train: ``TorchTrainer(…, torch_config=RingConfig())``, and `prepare_model` in its workers."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch

from ringdp.ddp.wrapper import RingDP
from ringdp.integrations.libraries import imported
from ringdp.job.devices import default_backend

if TYPE_CHECKING:
    import ray.train as ray_train
    import ray.train.torch as ray_torch
else:
    ray_train = imported("ray.train", package="ray[train]>=2.60")
    ray_torch = imported("ray.train.torch", package="ray[train]>=2.60")


@dataclasses.dataclass
class RingConfig(ray_torch.TorchConfig):
    """Ray's TorchConfig with ``ring`` as the process group.

    ``backend="auto"`` is ``ring`` for workers without GPUs and ``cpu:ring,cuda:nccl`` for those with. (In place of None
    the TorchTrainer writes Ray's own choice into the configuration.)
    """

    backend: str = "auto"

    @property
    def backend_cls(self) -> type:
        """The class that sets the process group up in the workers."""
        return RingBackend


class RingBackend(ray_torch.TorchConfig().backend_cls):  # type: ignore[misc]
    """Ray's backend for torch, in workers that have the backend ``ring``."""

    def on_start(self, worker_group: Any, backend_config: RingConfig) -> None:
        """Called by Ray when the workers run: they import ringdp, which registers the backend, and make the group."""
        worker_group.execute(_register)
        if backend_config.backend == "auto":
            gpus = worker_group.get_resources_per_worker().get("GPU", 0)
            backend = default_backend("cuda" if gpus else "cpu")
            backend_config = dataclasses.replace(backend_config, backend=backend)
        super().on_start(worker_group, backend_config)


def prepare_model(
    model: torch.nn.Module, move_to_device: bool | torch.device = True, **ringdp_arguments: Any
) -> torch.nn.Module:
    """As ``ray.train.torch.prepare_model`` with RingDP as the wrapper; one worker alone gets the bare model.

    Args:
        model: moved to this worker's device.
        move_to_device: as Ray's.
        ringdp_arguments: for RingDP's constructor.
    """
    model = ray_torch.prepare_model(model, move_to_device=move_to_device, parallel_strategy=None)
    if ray_train.get_context().get_world_size() == 1:
        return model
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return RingDP(model, **({"device_ids": None if device.type == "cpu" else [device]} | ringdp_arguments))


def _register() -> None:
    import ringdp.job.backend

    ringdp.job.backend.register_backend()
