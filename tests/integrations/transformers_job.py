"""What tests/integrations/test_transformers.py runs: `python -m tests.integrations.transformers_job FOLDER RANKS`.

A tiny GPT-2 made from a configuration; with one rank, the plain Trainer on the batches of both.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import ringdp
from ringdp import RingDP
from ringdp.integrations import RingTrainer
from tests.integrations import training

SAMPLES = 24
LENGTH = 8


class Texts(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self) -> None:
        self.tokens = torch.randint(0, 32, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=32, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2,
            resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False,
        )
    )  # fmt: skip


def arguments(folder: Path, ranks: int, **more: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(folder / "out"), use_cpu=True, max_steps=4, per_device_train_batch_size=4 // ranks,
        gradient_accumulation_steps=2, max_grad_norm=0.5, learning_rate=0.1, optim="sgd",
        seed=7, report_to=[], logging_steps=1, save_strategy="steps", save_steps=2, disable_tqdm=True, **more,
    )  # fmt: skip


class Watched(RingTrainer):
    """Keeps what it trained with."""

    wrapper: Any = None

    def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        self.wrapper = model
        return super().training_step(model, *args, **kwargs)


def trained(folder: Path, ranks: int, checkpoint: str | None = None) -> dict[str, Any]:
    kind = Trainer if ranks == 1 else Watched
    trainer = kind(model=model(), args=arguments(folder, ranks), train_dataset=Texts(), eval_dataset=Texts())
    outcome = trainer.train(resume_from_checkpoint=checkpoint)
    found = {
        "weights": training.weights(trainer.model),
        "loss": outcome.training_loss,
        "eval_loss": trainer.evaluate()["eval_loss"],
        "bare": type(trainer.model) is GPT2LMHeadModel,
    }
    if ranks > 1:
        stats = trainer.wrapper.stats()
        found |= {"wrapped": type(trainer.wrapper) is RingDP, "reductions": stats.steps, "backend": dist.get_backend()}
    return found


def main() -> None:
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
    if ranks > 1:
        ringdp.init()
    results = {"trained": trained(folder, ranks)}
    if ranks > 1:
        results["resumed"] = trained(folder, ranks, checkpoint=str(folder / "out" / "checkpoint-2"))
    torch.save(results, folder / f"rank{os.environ.get('RANK', 0)}.pt")


if __name__ == "__main__":
    main()
