"""One mode of one model on a rank: its steps, and whether they train what one process would."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.lib import models, session
from benchmarks.lib.ranks import Failed
from benchmarks.training import modes

CHECKED_STEPS = 3
PHASES = ("step", "forward", "backward", "optimizer")
OPTIMIZERS = ("sgd", "fused-adamw")


@dataclass
class Trainee:
    """A task in the wrapper of its mode, and the optimizer."""

    name: str
    mode: modes.Mode
    task: models.Task
    group: dist.ProcessGroup | None
    set_to_none: bool = True
    optimizer_name: str = "sgd"

    def __post_init__(self) -> None:
        self.module: nn.Module = self.task.module
        self.optimizer: Any = _optimizer(self.optimizer_name, self.module, self.task.learning_rate)
        self.scaler: Any = None
        if self.mode.scaler:
            import ringdp

            scalers: Any = ringdp.amp if self.mode.scaler == "ringdp" else torch.amp
            self.scaler = scalers.GradScaler("cpu", init_scale=256.0)

    def wrap(self) -> None:
        self.module = modes.wrap(self.mode, self.task.module, self.group)

    def step(self) -> tuple[float, tuple[float, ...]]:
        """One training step: the loss, and the seconds of each of PHASES."""
        start = perf_counter()
        self.optimizer.zero_grad(set_to_none=self.set_to_none)
        loss = self.task.loss(self.module, self.task.batch)
        forward_end = perf_counter()
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.mode.barrier:
            dist.all_reduce(torch.zeros(1), group=self.group)
        backward_end = perf_counter()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        end = perf_counter()
        phases = (end - start, forward_end - start, backward_end - forward_end, end - backward_end)
        return loss.item(), phases

    def check(self, wanted: tuple[float, list[Tensor]]) -> None:
        """Take CHECKED_STEPS steps: each parameter must change as in one process, and all ranks have the same bits.

        Where the ranks do not train together they are only taken. Raises Failed.
        """
        named = dict(self.task.module.named_parameters())
        before = [parameter.detach().clone() for parameter in named.values()]
        losses = [self.step()[0] for _ in range(CHECKED_STEPS)]
        if not self.mode.wrapper and dist.get_world_size() > 1:
            return
        first_loss, changes = wanted
        if abs(losses[0] - first_loss) > 1e-5 * abs(first_loss):
            raise Failed(f"{self.name}: the first loss is {losses[0]}, not {first_loss}; nothing is timed")
        if self.optimizer_name == "sgd":  # Adam divides by gradients that are next to nothing
            for (name, parameter), then, change in zip(named.items(), before, changes, strict=True):
                error = float((parameter.detach() - then - change).norm() / change.norm().clamp_min(1e-12))
                # of a change that is itself near float32's resolution of the parameter
                if not error <= self.mode.largest_error:
                    raise Failed(f"{self.name}: {name} changed otherwise than in one process, by {error:.2%}")
        digest = hashlib.sha256()
        for parameter in named.values():
            digest.update(parameter.detach().numpy().tobytes())
        digests: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(digests, digest.hexdigest())
        if len(set(digests)) != 1:
            raise Failed(f"{self.name}: the ranks' parameters differ; nothing is timed")


def _optimizer(name: str, module: nn.Module, learning_rate: float) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(module.parameters(), lr=learning_rate)
    return torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)


def reference(name: str, joined: session.Joined) -> tuple[float, list[Tensor]]:
    """What CHECKED_STEPS steps of SGD on all ranks' batches in one process do.

    Returns this rank's first loss and how much each parameter changed.
    """
    tasks = [models.make(name, rank=rank) for rank in range(joined.world_size)]
    module = tasks[0].module
    before = [parameter.detach().clone() for parameter in module.parameters()]
    optimizer = _optimizer("sgd", module, tasks[0].learning_rate)
    first_loss = 0.0
    for step in range(CHECKED_STEPS):
        optimizer.zero_grad()
        for rank, task in enumerate(tasks):
            loss = task.loss(module, task.batch)
            if step == 0 and rank == joined.rank:
                first_loss = loss.item()
            (loss / joined.world_size).backward()
        optimizer.step()
    return first_loss, [now.detach() - then for now, then in zip(module.parameters(), before, strict=True)]
