"""What a sampler watches: which of its batches are trained, and how fast."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from time import monotonic_ns
from typing import Any, Protocol

import torch

from ringdp.job.elastic import places, view_of


class Watched(Protocol):
    """A training whose forwards take batches. Its listener is called in each forward that records gradients.

    Attributes:
        steps: that have ended since it is watched, by `step_ended`.
        plan: the number of that by which the batches that are measured now are split.
    """

    steps: int
    plan: int

    def members(self) -> tuple[int, ...] | None:
        """The places of the ranks that have made the last step; None before there is one."""
        ...

    def remove(self) -> None: ...
    @property
    def begins_batch(self) -> bool:
        """Whether the forward that begins is the first one of its batch."""
        ...

    @property
    def in_step(self) -> bool:
        """Whether a forward has begun whose step has not ended, and may be repeated."""
        ...

    def forward_begins(self) -> None: ...
    def count_nothing(self) -> None:
        """In the forward that begins, where the ranks have weights."""
        ...

    def repeat_batch(self) -> None: ...
    def batch_ends(self) -> None:
        """Whatever forwards it has taken."""
        ...

    def step_ended(self, repeats: bool) -> bool:
        """Whether a step has ended, behind the last forward of a batch, since the last call. `repeats`: any forward
        may be the last one."""
        ...

    def trained(self, taken: int) -> int:
        """Of `taken` batches, those that are in a step that has ended."""
        ...

    def made(self, taken: int, trained: int) -> int:
        """Of `taken` batches, of which so many are trained, those that this rank's parameters have."""
        ...

    def give_back(self, keep: int) -> None:
        """Of the batches that are not trained, all but the first `keep` will be taken again."""
        ...

    def seconds(self) -> float | None:
        """The time of the last step; None where that is not known."""
        ...


class WatchedSteps:
    """A RingDP whose steps are measured."""

    def __init__(self, model: Any, listener: Callable[[], None], forwards: int) -> None:
        # Weak: the model keeps the sampler. In a circle they would be freed at any time, also in a worker's process.
        self._model: weakref.ref[Any] = weakref.ref(model)
        self._listener = listener
        self._forwards = forwards
        self._forward = 0
        self._began_ns = 0
        self._finished_ns = self._times()["finished_ns"]
        self.steps = 0
        self.plan = 0
        self._first_view = view_of(model.process_group)
        model._before_forward.append(listener)

    def _times(self) -> Mapping[str, int]:
        """Of the last backward that synchronised; of none where the model is gone."""
        model = self._model()
        return {"finished_ns": self._finished_ns, "computed_ns": 0} if model is None else model.reducer.report.times()

    def members(self) -> tuple[int, ...] | None:
        model = self._model()
        if model is None or (view := model.reducer.view()) < self._first_view or view == 0:
            return None
        return places(model.process_group, view)

    def remove(self) -> None:
        model = self._model()
        if model is not None:
            model._before_forward.remove(self._listener)

    @property
    def begins_batch(self) -> bool:
        return (self._forward - 1) % self._forwards == 0

    def forward_begins(self) -> None:
        self._forward += 1
        if self.begins_batch:
            self._began_ns = monotonic_ns()

    def count_nothing(self) -> None:
        model = self._model()
        if model is not None and "weight" in model.ringdp_features.settings():
            model.set_weight(0.0)

    def repeat_batch(self) -> None:
        model = self._model()
        if model is not None:
            model._repeat_batch()

    def batch_ends(self) -> None:
        self._forward = -(-self._forward // self._forwards) * self._forwards

    @property
    def in_step(self) -> bool:
        """Whether a forward has begun, and no backward synchronised since."""
        return self._began_ns > 0 and self._times()["finished_ns"] == self._finished_ns

    def step_ended(self, repeats: bool) -> bool:
        """By a backward that synchronises."""
        finished_ns = self._times()["finished_ns"]
        if finished_ns == self._finished_ns:
            return False
        self._finished_ns = finished_ns
        self.steps += 1
        return repeats or self._forward % self._forwards == 0

    def trained(self, taken: int) -> int:
        return taken

    def made(self, taken: int, trained: int) -> int:
        return trained

    def give_back(self, keep: int) -> None: ...

    def seconds(self) -> float | None:
        """From the last forward that began a batch to the last gradient; None where there was no such forward."""
        if not 0 < self._began_ns < self._times()["computed_ns"]:
            return None
        return (self._times()["computed_ns"] - self._began_ns) * 1e-9


class WatchedRounds:
    """A DiLoCo: a batch is trained when the round of its step counts. Nothing is measured. A step of its optimizers all
    of whose forwards count nothing changes nothing."""

    def __init__(self, rounds: Any, listener: Callable[[], None], forwards: int) -> None:
        self._rounds: weakref.ref[Any] = weakref.ref(rounds)
        self._forwards, self._forward = forwards, 0
        self._counted: tuple[int, int] = rounds.counted
        self._first_view = view_of(rounds.process_group)
        self._taken: deque[int] = deque()  # by batch that is not trained: the steps that had been made before it
        self.steps = self.plan = 0
        self._since_step = self._empty = 0  # forwards since the optimizers' last steps; those that count nothing
        self._stepped = False  # since the last forward

        def before(*_: Any) -> None:
            if torch.is_grad_enabled():
                listener()

        # Weak, as above.
        me = weakref.ref(self)

        def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            if (watched := me()) is not None:
                watched._before_step(optimizer)

        self._handles = [rounds.model.register_forward_pre_hook(before)]
        self._handles += [one.register_step_pre_hook(before_step) for one in rounds.optimizers]

    def members(self) -> tuple[int, ...] | None:
        rounds = self._rounds()
        if rounds is None or (view := rounds.counted[1]) < self._first_view or view == 0:
            return None
        return places(rounds.process_group, view)

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._stepped = True
        if self._since_step > 0 and self._empty == self._since_step:
            for group in optimizer.param_groups:  # which optimizers leave out, without gradient
                for parameter in group["params"]:
                    parameter.grad = None

    @property
    def begins_batch(self) -> bool:
        return (self._forward - 1) % self._forwards == 0

    @property
    def in_step(self) -> bool:
        return False

    def forward_begins(self) -> None:
        self._forward += 1
        if self._stepped:
            self._since_step = self._empty = 0
            self._stepped = False
        self._since_step += 1
        if self.begins_batch:
            rounds = self._rounds()
            self._taken.append(0 if rounds is None else rounds.step)

    def count_nothing(self) -> None:
        self._empty += 1

    def repeat_batch(self) -> None: ...
    def batch_ends(self) -> None: ...
    def step_ended(self, repeats: bool) -> bool:
        """By the mean of a round."""
        rounds = self._rounds()
        if rounds is None or rounds.counted == self._counted:
            return False
        self._counted = rounds.counted
        self.steps += 1
        return True

    def trained(self, taken: int) -> int:
        while self._taken and self._taken[0] < self._counted[0]:
            self._taken.popleft()
        return taken - len(self._taken)

    def made(self, taken: int, trained: int) -> int:
        rounds = self._rounds()
        return trained if rounds is None else taken - sum(before >= rounds.step for before in self._taken)

    def give_back(self, keep: int) -> None:
        while len(self._taken) > keep:
            self._taken.pop()

    def seconds(self) -> float | None:
        return None
