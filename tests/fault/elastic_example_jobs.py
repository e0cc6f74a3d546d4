"""What the ranks of test_elastic_example.py do: train examples/checkpoint_resume.py, and lose ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

import ringdp
from examples import checkpoint_resume as example
from tests.fault.elastic_jobs import digests, joined

STEPS = 16


@dataclass(frozen=True)
class Loss:
    """Of the rank `place`, which has no part in that step; `late`: behind its optimizer's step."""

    place: int
    step: int
    late: bool = False


class Dropped(Exception):
    """By the script, of this rank."""


@dataclass
class Curve:
    """Of one rank: the mean loss of each step and the parameters at the end, in hexadecimal."""

    losses: list[str] = field(default_factory=list)
    parameters: str = ""


def train(folder: str, losses: tuple[Loss, ...], *, elastic: bool) -> Curve | None:
    """`elastic`: ranks are killed. Otherwise all leave their group there, and those that are left make another one."""
    with joined(folder, elastic=elastic) as place:
        options = example.Options(
            steps=STEPS, batch_size=32, every=1, keep=1, kills=0, seed=0, folder=None, temporary=False
        )
        training = example.Training(example.load_digits(), options)
        lose = _Killed(place) if elastic else _Scripted(place, folder, training, len(losses))
        _call_at(training, losses, lose)
        try:
            training.run(STEPS)
        except Dropped:
            return None
        return Curve([loss.hex() for loss in training.losses], digests(list(training.model.parameters())))


def _call_at(training: example.Training, losses: tuple[Loss, ...], lose: _Killed | _Scripted) -> None:
    """`lose` is called before a step's forward, in its backward, and behind its optimizer's step."""
    step_of_optimizer, batches = training.optimizer.step, training.batches

    def here(when: str) -> None:
        for loss in losses:
            if loss.step == len(training.losses) and loss.late == (when == "late"):
                lose(loss, when)

    def all_batches() -> Iterator[tuple[Tensor, Tensor]]:
        for batch in batches():
            here("forward")
            yield batch

    def step(*arguments: Any) -> Any:
        result = step_of_optimizer(*arguments)
        here("late")
        return result

    training.batches = all_batches  # type: ignore[method-assign]
    training.optimizer.step = step  # type: ignore[assignment, method-assign]
    first: Tensor = training.model.module[0].weight  # its gradient is the last one
    first.register_hook(lambda gradient: here("backward"))


@dataclass
class _Killed:
    place: int

    def __call__(self, loss: Loss, when: str) -> None:
        if loss.place == self.place and when in ("backward", "late"):
            os.kill(os.getpid(), signal.SIGKILL)


class _Scripted:
    def __init__(self, place: int, folder: str, training: example.Training, losses: int) -> None:
        self._place, self._folder, self._training, self._losses = place, folder, training, losses
        self._left = list(range(ringdp.world_size()))

    def __call__(self, loss: Loss, when: str) -> None:
        if when == "backward":
            return
        self._left.remove(loss.place)
        self._losses -= 1
        ringdp.shutdown()
        if loss.place == self._place:
            # As many groups as the others make: the processes are used again, and number their groups.
            for number in range(1 + self._losses):
                self._join(f"alone-{self._place}-{number}", 0, 1)
                ringdp.shutdown()
            raise Dropped
        self._join(f"store-{len(self._left)}", self._left.index(self._place), len(self._left))
        self._training.model = ringdp.RingDP(self._training.model.module)

    def _join(self, store: str, rank: int, size: int) -> None:
        ringdp.init(init_method=f"file://{self._folder}/{store}", rank=rank, world_size=size, timeout=30)
