"""``compression="auto"`` in a wrapper: measures its steps and links, asks the tuner, and gives buckets their codes."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ringdp.compression import Compressor
from ringdp.ddp.compression.link_speed import LinkProbe, gather_numbers
from ringdp.ddp.compression.tuner import EXACT, Bucket, Choice, LinkCosts, Step, Tuner
from ringdp.hooks.compressed import CompressedHook
from ringdp.job.backend import inside_host
from ringdp.job.byte_collectives import all_gather_bytes
from ringdp.job.elastic import as_unit

_WINDOW_S = 0.5
_FIRST_STEPS = 1  # of the first window: on a slow network exact steps are long
_LEAST_STEPS, _MOST_STEPS = 3, 16
_STEPS_TO_SKIP = 1  # steps after a change that are not counted: memory is allocated

_log = logging.getLogger("ringdp.auto_compression")


@dataclasses.dataclass(frozen=True)
class Decision:
    """Attributes:
    step: from which synchronised step on.
    reason: what was decided and why, in one line.
    """

    step: int
    reason: str


class Owner(Protocol):
    """What an `AutoCompression` needs of the wrapper's ModelCompression."""

    reducer: Any
    group: dist.ProcessGroup

    @property
    def steps(self) -> int: ...


class AutoCompression:
    """Used by forward's thread, between steps, on all ranks in the same place.

    Args:
        owner: has the reducer with that plan of reductions.
        levels: the allowed codes by name, from mild to lossy.
        reduction_of: by level, its number in that plan.
        hook: makes the codes that the core cannot make.
        names: of all parameters, as the reducer numbers them.
    """

    def __init__(
        self,
        owner: Owner,
        levels: Mapping[str, Compressor],
        reduction_of: Mapping[str, int],
        hook: CompressedHook | None,
        names: Sequence[str],
    ) -> None:
        self._owner, self._levels, self._reduction_of, self._hook, self._names = (
            owner,
            levels,
            reduction_of,
            hook,
            names,
        )
        self._in_python = {level for level, it in levels.items() if getattr(it, "native", None) is None}
        self.decisions: list[Decision] = []
        self._layout: list[list[int]] = []
        self._watched: list[frozenset[int]] = []  # by bucket
        self._tuner: Tuner | None = None
        self._probe: LinkProbe | None = None
        self._applied: Choice = ()
        self._in_hook: set[int] = set()  # parameters whose residual the hook keeps
        self._last_forward: float | None = None
        self._last_step = 0
        self._times: list[float] = []
        self._waits: list[float] = []
        self._skipping = _STEPS_TO_SKIP
        self._length = _FIRST_STEPS

    def before_forward(self) -> None:
        """Before each forward that synchronises."""
        if torch._C._current_graph_task_id() != -1:  # a forward that is computed again, within a backward
            return
        now, step = time.monotonic(), self._owner.steps
        if step == self._last_step + 1 and self._last_forward is not None:
            self._times.append(now - self._last_forward)
            self._waits.append(self._owner.reducer.report.stats()["exposed_wait_s"])
        fresh = step != self._last_step
        self._last_step = step
        layout = self._owner.reducer.plan.layout()
        if layout != self._layout:
            self._begin_again(layout)
        elif fresh:
            self._count()
        self._last_forward = time.monotonic()

    def level_of(self, index: int) -> str:
        """The code by which parameter `index` is sent."""
        for level, members in zip(self._applied, self._watched, strict=False):
            if index in members:
                return level
        return EXACT

    def return_residuals(self) -> None:
        """Move all residuals to the core, for a checkpoint; the next forward moves them to where they are used."""
        self._move_residuals(set())
        self._applied = ()

    # Windows of steps.

    def _begin_again(self, layout: list[list[int]]) -> None:
        first, self._layout = not self._layout, layout
        rows = self._owner.reducer.report.bucket_rows()
        self._watched = [frozenset(row["parameters"]) for row in rows]
        self._tuner = Tuner(tuple(self._levels), len(rows))
        self._applied = ()
        self._skip_steps(_STEPS_TO_SKIP if first else 0)  # later ones have been in use for a step
        self._apply(self._tuner.choice)

    def _skip_steps(self, steps: int) -> None:
        self._skipping = steps
        self._times, self._waits = [], []

    def _count(self) -> None:
        tuner = self._tuner
        assert tuner is not None
        if self._applied != tuner.choice:
            self._apply(tuner.choice)  # after `return_residuals`
        if self._skipping:
            self._skip_steps(self._skipping - 1)
            return
        if len(self._times) < self._length:
            return
        group = self._owner.group
        step = as_unit(group, "the choice of compression", self._agreed_step)
        steps = len(self._times)
        self._times, self._waits = [], []
        self._length = min(max(math.ceil(_WINDOW_S / max(step.seconds, 1e-9)), _LEAST_STEPS), _MOST_STEPS)
        tuner.window(step, steps)
        if tuner.wants_probe:
            tuner.measured(*as_unit(group, "the measurement of links", self._measure_links))
        if tuner.reason:
            self._log_choice(tuner.reason)
        if tuner.choice != self._applied:
            self._apply(tuner.choice)
            self._skip_steps(_STEPS_TO_SKIP)

    def _measure_links(self) -> tuple[LinkCosts, float]:
        if self._probe is None:
            self._probe = LinkProbe(self._owner.group, self._levels, crowded=self._crowded())
        return self._probe.measure()

    def _agreed_step(self) -> Step:
        """The same result on all ranks: the wait of the rank that waits least, for which the others wait too."""
        reducer = self._owner.reducer
        times, rows = reducer.report.times(), reducer.report.bucket_rows()
        computed = (times["computed_ns"] - times["launched_ns"]) * 1e-9
        mine = [statistics.median(self._times), statistics.median(self._waits), computed]
        gathered = gather_numbers([*mine, *(row["launched_s"] for row in rows)], self._owner.group)
        slowest = gathered[int(gathered[:, 1].argmin())].tolist()
        buckets = tuple(
            Bucket(row["numel"], launched, row["free"]) for row, launched in zip(rows, slowest[3:], strict=True)
        )
        return Step(float(gathered[:, 0].max()), slowest[1], slowest[2], buckets)

    def _crowded(self) -> bool:
        """Whether some rank has no core to spare for coding."""

        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        here = 1 + sum(inside_host(self._owner.group))
        gathered = gather_numbers([cores / (here * max(torch.get_num_threads(), 1))], self._owner.group)
        return float(gathered.min()) < 2.0

    def _log_choice(self, reason: str) -> None:
        self.decisions.append(Decision(self._owner.steps, reason))
        if self._owner.group.rank() == 0:
            _log.info("compression auto, step %d: %s", self._owner.steps, reason)

    # The choice, applied.

    def _apply(self, choice: Choice) -> None:
        by_hook = {
            index
            for level, members in zip(choice, self._watched, strict=True)
            for index in members
            if level in self._in_python
        }
        self._move_residuals(by_hook)
        self._owner.reducer.choose([self._reduction_of.get(level, -1) for level in choice])
        self._applied = choice

    def _move_residuals(self, by_hook: set[int]) -> None:
        """Residuals move with the parameters, from the core to the hook and back."""
        hook, reducer = self._hook, self._owner.reducer
        if hook is None or by_hook == self._in_hook:
            return
        entering, leaving = sorted(by_hook - self._in_hook), sorted(self._in_hook - by_hook)
        residuals = {}
        for index in leaving:
            residual = hook.memory.take_residual(self._names[index])
            if residual is not None:
                residuals[index] = residual
        reducer.compression.give_residuals(residuals)
        for index, residual in reducer.compression.take_residuals(entering).items():
            hook.memory.give_residual(self._names[index], residual, self._owner.group)
        self._in_hook = set(by_hook)


def crosses_network(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether some ranks of the group reach each other by a network, loopback too; all of them call this."""
    if group.size() == 1:
        return False
    away = b"\0" if all(inside_host(group)) else b"\1"
    return b"\1" in all_gather_bytes(away, group, room=1, device=device)
