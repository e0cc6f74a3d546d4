"""Faults as data: which rank meets what, in which step and phase. The training program asks them at each phase."""

from __future__ import annotations

import functools
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

BEFORE = ("forward", "new parameters", "first", "between", "second", "third", "first bucket", "last", "last bucket")
"""A rank that dies there has no part in the step. The others are "after backward", "optimizer" and those of a save."""
PHASES = ("forward", "first bucket", "last bucket", "after backward", "optimizer")
OUTLIVES_S = 5.0


@dataclass(frozen=True)
class Fault:
    """Of `rank` at the start of the job. `action` runs in its process and may end it, by signal `ends`."""

    rank: int
    step: int
    phase: str
    action: Callable[[], None]
    ends: int = 0


@dataclass(frozen=True)
class Kill:
    """By a signal; so many `children` outlive the process for some seconds."""

    number: int = signal.SIGKILL
    children: int = 0

    def __call__(self) -> None:
        for _ in range(self.children):
            if os.fork() == 0:
                time.sleep(OUTLIVES_S)
                os._exit(0)
        os.kill(os.getpid(), self.number)


@dataclass(frozen=True)
class Stop:
    seconds: float

    def __call__(self) -> None:
        if os.fork() == 0:
            time.sleep(self.seconds)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)


def close_pollers() -> None:
    """The descriptors by which the core waits."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if "eventpoll" in os.readlink(f"/proc/self/fd/{name}"):
                os.close(int(name))
        except OSError:
            continue


@dataclass(frozen=True)
class Faults:
    """`Faults().kill(0, 3).stop(2, 6, seconds=1)`: a plan, to which each method adds one fault."""

    all: tuple[Fault, ...] = ()

    def _with(self, rank: int, step: int, phase: str, action: Callable[[], None], ends: int = 0) -> Faults:
        return replace(self, all=(*self.all, Fault(rank, step, phase, action, ends)))

    def kill(
        self, rank: int, step: int, phase: str = "last bucket", number: int = signal.SIGKILL, children: int = 0
    ) -> Faults:
        return self._with(rank, step, phase, Kill(number, children), ends=number)

    def stop(self, rank: int, step: int, phase: str = "first bucket", seconds: float = 1.0) -> Faults:
        return self._with(rank, step, phase, Stop(seconds))

    def sleep(self, rank: int, step: int, phase: str, seconds: float) -> Faults:
        return self._with(rank, step, phase, functools.partial(time.sleep, seconds))

    def do(self, rank: int, step: int, phase: str, action: Callable[[], None]) -> Faults:
        return self._with(rank, step, phase, action)

    def close_pollers(self, rank: int, step: int, phase: str) -> Faults:
        return self._with(rank, step, phase, close_pollers)

    def at(self, rank: int, step: int) -> Callable[[str], None]:
        """What the program calls at each phase of a step."""
        mine = [fault for fault in self.all if (fault.rank, fault.step) == (rank, step)]

        def here(phase: str) -> None:
            for fault in mine:
                if fault.phase == phase:
                    fault.action()

        return here

    def ended(self) -> dict[int, int]:
        """By rank, the signal that ends it."""
        return {fault.rank: fault.ends for fault in self.all if fault.ends}

    def members(self, world: int, steps: Iterable[int]) -> list[tuple[int, ...]]:
        """Who has made each step: a rank that dies behind its backward has."""
        deaths = [fault for fault in self.all if fault.ends]
        return [
            tuple(
                rank
                for rank in range(world)
                if not any(it.rank == rank and (it.step, it.phase not in BEFORE) < (step, True) for it in deaths)
            )
            for step in steps
        ]


def sampled(cases: Sequence[Any], most: int) -> list[Any]:
    """So many of them for the default tier, always the same; the others are slow."""
    chosen = random.Random(40).sample(range(len(cases)), most)
    marks = [() if number in chosen else pytest.mark.slow for number in range(len(cases))]
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
        for case, mark in zip(cases, marks, strict=True)
    ]


QUICK_SEEDS = 1_000_000


def drawn(most: int, quick: int) -> list[Any]:
    """Seeds for jobs that are drawn: `quick` for the default tier, and 0, 1, … below `most` for the slow one.
    DRAWS=900: below that; DRAWS=900:1200: these."""
    begin, _, end = os.environ.get("DRAWS", f"0:{most}").rpartition(":")
    slow = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(int(begin or 0), int(end))]
    return [*range(QUICK_SEEDS, QUICK_SEEDS + quick), *slow]
