"""What each rank of rounds_deaths.py does: train until its launcher is killed, and write down what counts."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ringdp
from benchmarks.compression.quality_runs import gpt_loss, small_gpt_options, text, windows_of
from benchmarks.far.rounds_late import SLOWER, is_slow
from examples.char_lm import GPT

ROUNDS = 1_000_000


class Training:
    """Of one rank."""

    def __init__(self, folder: Path, given: dict[str, Any]) -> None:
        self.folder, self._given = folder, given
        self._text, _, alphabet = text()
        self.options = small_gpt_options(steps=1)
        torch.manual_seed(given["seed"])
        self.module: nn.Module = GPT(alphabet, self.options)
        self.inner = torch.optim.AdamW(self.module.parameters(), lr=self.options.lr, betas=(0.9, 0.95))
        self._draw = torch.Generator().manual_seed(given["seed"] * 10_007 + os.getpid())
        self._counted = open(folder / f"counted-{os.getpid()}", "a", buffering=1)  # noqa: SIM115  # until it is killed
        self._slow_from: float | None = None
        self.made = 0  # steps, of this process

    def step(self, model: nn.Module) -> None:
        began = time.monotonic()
        self.inner.zero_grad()
        gpt_loss(model, windows_of(self._text, self.options, self._draw)).backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        wanted_s = self._given["step_ms"] / 1e3 * (SLOWER if self._is_slow() else 1.0)
        time.sleep(max(0.0, wanted_s - (time.monotonic() - began)))
        self.inner.step()
        self.made += 1

    def count(self, steps: int) -> None:
        """So many of this rank's are in a mean now."""
        self._counted.write(f"{time.time()} {steps * self.options.batch_size}\n")

    def save(self) -> None:
        if ringdp.rank() == 0 and (self.folder / "save").exists() and not (self.folder / "model.pt").exists():
            torch.save(self.module.state_dict(), made := self.folder / "model.new")
            made.rename(self.folder / "model.pt")

    def _is_slow(self) -> bool:
        if self._slow_from is None and (path := self.folder / "slow").exists():
            self._slow_from = float(path.read_text() or "nan")
        since_s = 0.0 if self._slow_from is None else time.time() - self._slow_from
        ranks = ringdp.world_size()
        return self._slow_from is not None and is_slow(ringdp.rank(), ranks, since_s, self._given["period"])


def in_rounds(training: Training, given: dict[str, Any], **options: Any) -> None:
    rounds = ringdp.DiLoCo(training.module, training.inner, every=given["every"], **options)
    job = ringdp.elastic.Job(rounds, training.inner)
    made = {}  # by step of the rounds; a newcomer has those of others before its own
    before = counted = 0
    for _ in job.rounds(ROUNDS):
        training.step(training.module)
        made[rounds.step] = training.made
        step = rounds.counted[0]
        if step > before:
            if step in made:
                training.count(made[step] - counted)
                counted = made[step]
            before = step
            with rounds.global_parameters():
                training.save()


def in_steps(training: Training, given: dict[str, Any]) -> None:
    model = ringdp.RingDP(training.module)
    job = ringdp.elastic.Job(model, training.inner)
    loader = job.loader(torch.utils.data.TensorDataset(torch.arange(10_000_000)), given["ranks"], shuffle=False)
    for _ in job.epochs(1):
        for _ in loader:
            training.step(model)
            training.count(1)
            training.save()


def main() -> None:
    folder = Path(sys.argv[1])
    given = json.loads((folder / "settings.json").read_text())
    torch.set_num_threads(1)
    ringdp.init(device="cpu")
    training = Training(folder, given)
    if given["way"] == "steps":
        in_steps(training, given)
    elif given["way"] == "waits":
        in_rounds(training, given)
    else:
        in_rounds(training, given, quorum=given["quorum"], grace=given["grace"])


if __name__ == "__main__":
    main()
