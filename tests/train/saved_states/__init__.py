"""Compression states in files, and what made them: `tests/train/test_saved_states.py` loads them.

    python -m tests.train.saved_states.make NAME…     # or no name: all that are not there

A file stays as the commit wrote it that introduced it, so that later code is shown to read what earlier code wrote.
Gradients are given, and have the same bits on every machine.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ringdp.compression import DGC, EF21, Auto, Int4, Int8, PowerSGD, TopK
from ringdp.ddp.wrapper import RingDP
from ringdp.hooks import ddp_hook
from tests.train.compressed import Random
from tests.train.given_gradients import Given, hash_of, noise
from tests.train.test_auto_compression import force, network

FOLDER = Path(__file__).parent
SHAPES = {"wide": (12, 20), "tall": (17, 9), "flat": (7,)}
SAVED_AT = 3  # steps before
STEPS_AFTER = 2

COMPRESSIONS: dict[str, Callable[[], Any]] = {
    "int4": Int4,
    "int8": lambda: Int8(error_feedback=True),
    "int8 blocks": lambda: Int8(block=64, error_feedback=True),
    "int8 EF21": lambda: Int8(error_feedback=EF21()),
    "top k": lambda: TopK(0.1),
    "top k DGC": lambda: TopK(0.1, error_feedback=DGC(0.9)),
    "low rank": lambda: PowerSGD(2),
    "random": Random,
    "auto": lambda: Auto("aggressive"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Attributes:
    wrapper: "RingDP" or "DDP", which gets `ddp_hook`.
    """

    wrapper: str
    backend: str
    ranks: int
    compression: str
    warmup_steps: int = 0

    @property
    def name(self) -> str:
        warmup = f" after {self.warmup_steps}" if self.warmup_steps else ""
        return f"{self.wrapper} {self.backend} {self.ranks} {self.compression}{warmup}".replace(" ", "-")

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.pt"

    @property
    def group(self) -> str | None:
        """The backend for `run_ranks`."""
        return None if self.compression == "auto" else self.backend

    @property
    def same_bits_everywhere(self) -> bool:
        """PowerSGD's factors come from torch's matrix products."""
        return self.compression != "low rank"


CASES = [
    *(Case("RingDP", "ring", 2, one) for one in COMPRESSIONS),
    *(Case("RingDP", "gloo", 2, one) for one in ("int4", "top k", "int8 EF21")),
    *(Case("DDP", "gloo", 2, one) for one in COMPRESSIONS if one != "auto"),
    *(Case("DDP", "ring", 2, one) for one in ("int4", "top k")),
    *(Case(wrapper, "ring", 1, one) for wrapper in ("RingDP", "DDP") for one in ("int4", "top k")),
    Case("RingDP", "ring", 2, "int4", warmup_steps=4),
]


class Training:
    """One rank's."""

    def __init__(self, case: Case) -> None:
        self._given = Given(SHAPES)
        compression = COMPRESSIONS[case.compression]()
        rules = [("*", compression)]
        self._model: Any
        if case.wrapper == "RingDP":
            self._model = RingDP(
                self._given, compression=compression, rules=rules, bucket_cap_mb=0.0005, warmup_steps=case.warmup_steps
            )
            self.save, self.load = self._model.compression_state_dict, self._model.load_compression_state_dict
        else:
            self._model = DistributedDataParallel(self._given, bucket_cap_mb=0.0005)
            hook, function = ddp_hook(compression, rules=rules, model=self._model)
            self._model.register_comm_hook(hook, function)
            self.save, self.load = hook.state_dict, hook.load_state_dict
        if case.compression == "auto":
            force(self._model, "topk")

    def run(self, steps: range) -> list[dict[str, Tensor]]:
        """The averages of each step."""
        seen = []
        for step in steps:
            self._model.zero_grad()
            self._model(noise(SHAPES, dist.get_rank(), step)).backward()
            averages = {name: one.grad for name, one in self._given.named_parameters()}
            seen.append({name: one.clone() for name, one in averages.items() if one is not None})
        return seen


def joined(case: Case, folder: Path) -> contextlib.AbstractContextManager[None]:
    """The case's group. `run_ranks` makes it, but for "auto", which needs a network; its ranks meet in `folder`."""
    return network(folder, 10_000) if case.compression == "auto" else contextlib.nullcontext()


def went_on(case: Case, state: dict[str, Any]) -> list[Any]:
    """What the steps after `state` give, in a training that loads it; hashes where all machines have the same bits."""
    training = Training(case)
    training.load(state)
    seen = training.run(range(SAVED_AT, SAVED_AT + STEPS_AFTER))
    return [hash_of(one) for one in seen] if case.same_bits_everywhere else seen


def saved(case: Case, folder: Path) -> dict[str, Any]:
    """This rank's states after some steps, and the steps that follow each."""
    with joined(case, folder):
        training = Training(case)
        training.run(range(SAVED_AT))
        exact, mean = training.save(), training.save(consolidated=True)
        return {"exact": exact, "after exact": went_on(case, exact), "mean": mean, "after mean": went_on(case, mean)}
