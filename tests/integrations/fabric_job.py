"""What tests/integrations/test_fabric.py runs on several ranks: `python -m tests.integrations.fabric_job FOLDER HOW`.

HOW is how processes start: `external` (a launcher did it), or Fabric's own `popen`, `spawn` and `fork`.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

from ringdp import RingDP
from ringdp.integrations import RingDPStrategy
from tests.integrations import training


def train(fabric: Any, *, steps: int, accumulate: int = 1, clip: float | None = None) -> dict[str, Any]:
    plain = training.build(seed=fabric.global_rank)  # other weights on each rank: RingDP takes rank 0's
    model, optimizer = fabric.setup(plain, training.optimizer_of(plain))
    for step in range(steps):
        for micro in range(accumulate):
            inputs, classes = training.batch(step * accumulate + micro, fabric.global_rank)
            with fabric.no_backward_sync(model, enabled=micro < accumulate - 1):
                fabric.backward(training.loss_of(model, inputs, classes) / accumulate)
        if clip is not None:
            fabric.clip_gradients(model, optimizer, max_norm=clip)
        optimizer.step()
        optimizer.zero_grad()
    wrapper = model._forward_module
    return {
        "weights": training.weights(plain),
        "wrapper": type(wrapper).__qualname__ if isinstance(wrapper, RingDP) else repr(wrapper),
        "backend": dist.get_backend(),
        "reductions": wrapper.stats().steps,
    }


def resume(fabric: Any, folder: Path) -> list[torch.Tensor]:
    """Two steps, saved, one more; a fresh model goes on from the file, and both must be where three steps lead."""
    path = folder / "checkpoint.ckpt"
    plain = training.build()
    model, optimizer = fabric.setup(plain, training.optimizer_of(plain))
    for index in range(2):
        one_step(fabric, model, optimizer, index)
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 2})
    fresh = training.build(seed=5)
    model, optimizer = fabric.setup(fresh, training.optimizer_of(fresh))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    fabric.load(path, state)
    one_step(fabric, model, optimizer, state["step"])
    return training.weights(fresh)


def one_step(fabric: Any, model: Any, optimizer: Any, index: int) -> None:
    fabric.backward(training.loss_of(model, *training.batch(index, fabric.global_rank)))
    optimizer.step()
    optimizer.zero_grad()


def collectives(fabric: Any) -> dict[str, Any]:
    rank = fabric.global_rank
    fabric.barrier()
    return {
        "mean": fabric.all_reduce(torch.tensor([1.0 + rank, 10.0]), reduce_op="mean"),
        "sum": fabric.all_reduce(torch.tensor([1 + rank, 10]), reduce_op="sum"),
        "gathered": fabric.all_gather(torch.tensor([rank, rank * rank])),
        "object": fabric.broadcast({"from": rank}, src=1),
    }


def shares(fabric: Any) -> list[int]:
    """What this rank is given of a data set of ten."""
    loader = fabric.setup_dataloaders(DataLoader(TensorDataset(torch.arange(10)), batch_size=2))
    return [int(value) for (values,) in loader for value in values]


def everything(fabric: Any, folder: Path) -> None:
    results = {
        "trained": train(fabric, steps=3, accumulate=3, clip=0.5),
        "resumed": resume(fabric, folder),
        "collectives": collectives(fabric),
        "shares": shares(fabric),
    }
    torch.save(results, folder / f"rank{fabric.global_rank}.pt")


def training_only(fabric: Any, folder: Path) -> None:
    torch.save({"trained": train(fabric, steps=3)}, folder / f"rank{fabric.global_rank}.pt")


def main() -> None:
    folder, how = Path(sys.argv[1]), sys.argv[2]
    strategy: Any = RingDPStrategy() if how == "external" else "ringdp" if how == "popen" else f"ringdp_{how}"
    fabric = Fabric(accelerator="cpu", devices=training.RANKS, strategy=strategy)
    function = functools.partial(everything if how == "external" else training_only, folder=folder)
    if how in ("spawn", "fork"):
        fabric.launch(function)
    else:
        fabric.launch()
        function(fabric)


if __name__ == "__main__":
    main()
