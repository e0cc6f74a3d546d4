"""What tests/integrations/test_elastic.py runs: `ringrun --elastic -m tests.integrations.elastic_job FOLDER LIBRARY`.

The second rank is killed in the first epoch of two. The others write down how many steps they made, and their weights.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import ringdp

PLACE = int(os.environ["RANK"])
VICTIM, DIES_IN, EPOCHS = 1, 4, 2


class Net(nn.Module):
    """Counts its forwards, and is killed in one of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(8, 1)
        self.forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        if PLACE == VICTIM and self.forwards == DIES_IN:
            os.kill(os.getpid(), signal.SIGKILL)
        loss: Tensor = self.layer(x).square().mean()
        return loss


def data() -> TensorDataset:
    return TensorDataset(torch.randn(120, 8, generator=torch.Generator().manual_seed(2)))


def by_accelerate(net: Net, folder: Path) -> list[float]:
    """Gathers metrics behind each epoch, which needs the number of ranks."""
    from ringdp.integrations import RingAccelerator

    accelerator = RingAccelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.SGD(net.parameters(), 0.1), DataLoader(data(), batch_size=4)
    )
    gathered = []
    for _ in range(EPOCHS):
        for (x,) in loader:
            loss = model(x)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        gathered.append(float(accelerator.gather(torch.tensor([1.0])).sum()))
    accelerator.wait_for_everyone()
    return [*gathered, float(accelerator.num_processes)]


def by_lightning(net: Net, folder: Path) -> list[float]:
    import pytorch_lightning as pl

    from ringdp.integrations import RingDPTrainerStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss: Tensor = self.net(batch[0])
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=RingDPTrainerStrategy(),
        max_epochs=EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(Module(), DataLoader(data(), batch_size=4))
    return [float(trainer.current_epoch)]


def by_transformers(net: Net, folder: Path) -> list[float]:
    from transformers import TrainingArguments

    from ringdp.integrations import RingTrainer

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            return {"loss": self.net(x)}

    ringdp.init(device="cpu")
    arguments = TrainingArguments(
        str(folder / "out"),
        per_device_train_batch_size=4,
        num_train_epochs=EPOCHS,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=5,
    )
    rows = [{"x": x, "labels": torch.zeros(1)} for x in data().tensors[0]]
    trainer = RingTrainer(model=Named(), args=arguments, train_dataset=rows)
    trainer.train()
    return [float(trainer.state.epoch or 0)]


LIBRARIES = {"accelerate": by_accelerate, "lightning": by_lightning, "transformers": by_transformers}


def main() -> None:
    folder, library = Path(sys.argv[1]), sys.argv[2]
    net = Net()
    told = LIBRARIES[library](net, folder)
    weights = [one.detach().clone() for one in net.parameters()]
    torch.save({"told": told, "steps": net.forwards, "weights": weights}, folder / f"place{PLACE}.pt")
    ringdp.shutdown()


if __name__ == "__main__":
    main()
