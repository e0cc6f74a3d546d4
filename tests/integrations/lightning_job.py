"""What tests/integrations/test_lightning.py runs on two ranks: `python -m tests.integrations.lightning_job FOLDER`."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.utils.data import DataLoader, IterableDataset

from ringdp import RingDP
from ringdp.integrations import RingDPTrainerStrategy
from tests.integrations import training


class Batches(IterableDataset):  # type: ignore[type-arg]
    """This rank's batches of the training, from ``first`` on."""

    def __init__(self, first: int, count: int) -> None:
        self.numbers = range(first, first + count)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (training.batch(number, dist.get_rank()) for number in self.numbers)


class Module(pl.LightningModule):
    def __init__(self, *, automatic: bool = True) -> None:
        super().__init__()
        self.net = training.build(seed=0)
        self.automatic_optimization = automatic
        self.seen: dict[str, Any] = {}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return training.optimizer_of(self.net)

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        loss = training.loss_of(self.net, *batch)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        self.log("loss", loss.detach(), sync_dist=True)
        return loss

    def on_train_end(self) -> None:
        wrapper = self.trainer.strategy.model
        self.seen = {
            "wrapped": type(wrapper) is RingDP,
            "backend": dist.get_backend(),
            "reductions": wrapper.stats().steps,
            "hook": wrapper._get_ddp_logging_data().get("comm_hook"),
        }


def fitted(
    folder: Path,
    *,
    batches: int,
    first: int = 0,
    automatic: bool = True,
    checkpoint: str | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    strategy = arguments.pop("strategy", None) or RingDPTrainerStrategy()
    module = Module(automatic=automatic)
    trainer = pl.Trainer(
        accelerator="cpu", devices=training.RANKS, strategy=strategy, default_root_dir=folder,
        max_epochs=1 if checkpoint is None else 2, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **arguments,
    )  # fmt: skip
    trainer.fit(module, DataLoader(Batches(first, batches), batch_size=None), ckpt_path=checkpoint, weights_only=False)
    path = folder / f"after{first + batches}.ckpt"
    trainer.save_checkpoint(path)
    loss = float(trainer.callback_metrics["loss"])
    return {"weights": training.weights(module.net), "loss": loss, "checkpoint": str(path), **module.seen}


def main() -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    folder = Path(sys.argv[1])
    accumulated: dict[str, Any] = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}
    hooked = RingDPTrainerStrategy(ddp_comm_hook=fp16_compress_hook)
    results = {
        "trained": fitted(folder, batches=9, **accumulated),
        "manual": fitted(folder, batches=3, automatic=False),
        "hooked": fitted(folder, batches=3, strategy=hooked),
        "named": fitted(folder, batches=3, strategy="ringdp"),
    }
    first = fitted(folder, batches=2)
    results["resumed"] = fitted(folder, batches=1, first=2, checkpoint=first["checkpoint"])
    torch.save(results, folder / f"rank{dist.get_rank()}.pt")


if __name__ == "__main__":
    main()
