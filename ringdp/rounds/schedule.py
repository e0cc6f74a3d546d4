"""The steps at which fragments leave and land: pure functions of steps, or of steps and a clock.

A round is `every` steps long. Fragment k of F leaves (k + 1) / F of the way through it, and lands `delay` steps later,
at the latest when its next turn comes. This module has no tensors and no communication.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ringdp import values

MEASURED_STEPS = 3  # of an unequal job, before its first round


@dataclasses.dataclass(frozen=True)
class Turn:
    """The actions of a step, in their order; fragments by number.

    Attributes:
        lands: before others leave.
        leaves: with this rank's changes.
        lands_at_once: of those that have left, without delay.
        exact: parameters are averaged as they are: warm-up.
        meets: all ranks exchange their paces, before their first round.
        last: it ends the round: `finish`.
    """

    lands: tuple[int, ...] = ()
    leaves: tuple[int, ...] = ()
    lands_at_once: tuple[int, ...] = ()
    exact: bool = False
    meets: bool = False
    last: bool = False


class _Fragments:
    """What is in flight, and when each fragment left."""

    def __init__(self, count: int, delay: int) -> None:
        self.count, self.delay = count, delay
        self.due: dict[int, int] = {}  # the step at which it lands, by fragment in flight, in the order they left
        self.left = [0] * count  # the step at which each fragment last left

    def turn(self, step: int, leaves: Sequence[int], *, exact: bool = False, at_once: bool = False) -> Turn:
        lands = self._landing(step, leaves)
        now = at_once or exact or self.delay == 0
        for one in leaves:
            self.left[one] = step
            if not now:
                self.due[one] = step + self.delay
        return Turn(lands, tuple(leaves), tuple(leaves) if now else (), exact=exact)

    def last(self, step: int, leaves: Sequence[int]) -> Turn:
        """Everything lands, and then these at once."""
        lands = self._landing(step, range(self.count))
        return dataclasses.replace(self.turn(step, leaves, at_once=True), lands=lands, last=True)

    def stay(self, fragments: Sequence[int]) -> None:
        for one in fragments:
            self.due.pop(one, None)
            self.left[one] = -1

    def _landing(self, step: int, leaving: Iterable[int]) -> tuple[int, ...]:
        ripe = tuple(one for one, when in self.due.items() if when <= step or one in leaving)
        for one in ripe:
            del self.due[one]
        return ripe

    def state(self) -> dict[str, Any]:
        return {"due": {str(one): when for one, when in self.due.items()}, "left": list(self.left)}

    def load(self, state: dict[str, Any]) -> None:
        self.due = {int(one): int(when) for one, when in state["due"].items()}
        self.left = [int(one) for one in state["left"]]


class Schedule:
    """Turns by steps: the same on all ranks, which make the same number of steps.

    Args:
        every: steps of a round, or a function that says it for the round that begins after so many steps.
        fragments: how many.
        delay: steps from leaving to landing.
        warmup_steps: steps after each of which parameters are averaged as they are, before the first round.
    """

    def __init__(
        self, every: int | Callable[[int], int], fragments: int = 1, delay: int = 0, warmup_steps: int = 0
    ) -> None:
        self._every, self._warmup = every, warmup_steps
        self._fragments = _Fragments(fragments, delay)
        self._begin, self._length = warmup_steps, 0  # of the round; 0: not asked for yet
        self._finished = False
        self.step = self.round = 0

    def due(self, now_s: float) -> bool:
        del now_s
        return False

    def advance(self, due: bool = False) -> Turn:
        del due
        self.step += 1
        self._finished = False
        count = self._fragments.count
        if self.step <= self._warmup:
            return self._fragments.turn(self.step, range(count), exact=True)
        if self.step > self._begin + self._length:
            self._begin += self._length  # the round before ended there
            self._length = self._checked_length(self._begin)
        at = self.step - self._begin
        leaves = [k for k in range(count) if -(-(k + 1) * self._length // count) == at]
        self.round += at == self._length
        return self._fragments.turn(self.step, leaves)

    def finish(self) -> Turn:
        changed = [one for one, left in enumerate(self._fragments.left) if left < self.step]
        turn = self._fragments.last(self.step, changed)
        self._begin, self._length = max(self.step, self._warmup), 0
        self._finished = True
        return turn

    def stay(self, fragments: Sequence[int]) -> None:
        self._fragments.stay(fragments)

    def label(self) -> str:
        if self._finished:
            return f"finish after step {self.step}"
        return f"step {self.step}, every {self._length or 1}"

    def state(self) -> dict[str, Any]:
        numbers = {"step": self.step, "round": self.round, "begin": self._begin, "length": self._length}
        return numbers | {"warmup_steps": self._warmup} | self._fragments.state()

    def load(self, state: dict[str, Any]) -> None:
        self.step, self.round = int(state["step"]), int(state["round"])
        self._begin, self._length = int(state["begin"]), int(state["length"])
        self._warmup = int(state["warmup_steps"])
        self._fragments.load(state)

    def _checked_length(self, begin: int) -> int:
        length = self._every(begin) if callable(self._every) else self._every
        return values.whole(f"every({begin})", "its result", length, 1)


class OpenSchedule(Schedule):
    """Turns by steps of this rank's own, cut short where enough others have come; the ranks count turns together.

    Attributes:
        turn: how many are over, as far as this rank's training knows.
    """

    def __init__(self, every: int | Callable[[int], int], fragments: int = 1, warmup_steps: int = 0) -> None:
        super().__init__(every, fragments, 0, warmup_steps)
        self.turn = 0

    def advance(self, due: bool = False) -> Turn:
        self.step += 1
        self._finished = False
        count = self._fragments.count
        if self.step <= self._warmup:
            self._begin = self.step
            return self._fragments.turn(self.step, range(count), exact=True)
        if self._length == 0:
            self._length = -(-self._checked_length(self._begin) // count)
        due = due or self.step >= self._begin + self._length
        return self._fragments.turn(self.step, [self.turn % count] if due else ())

    def met(self, turn: int) -> None:
        """This rank's training goes on from the result of the turns before that one."""
        self.turn, self.round = turn, turn // self._fragments.count
        self._begin, self._length = self.step, 0

    def finish(self) -> Turn:
        self._finished = True
        return Turn(leaves=tuple(range(self._fragments.count)), last=True)

    def label(self) -> str:
        if self._finished:
            return f"finish after turn {self.turn}"
        return f"step {self.step}" if self.step <= self._warmup else f"turn {self.turn + 1}"

    def state(self) -> dict[str, Any]:
        return {"step": self.step, "met": self.turn, "begin": self._begin, "warmup_steps": self._warmup}

    def load(self, state: dict[str, Any]) -> None:
        self.step, self._warmup = int(state["step"]), int(state["warmup_steps"])
        self.met(int(state["met"]))
        self._begin = int(state["begin"])


class TimedSchedule:
    """Turns by time: the next fragment leaves when an F-th of the time of a round is over, after any number of steps.

    A turn begins when all ranks' records of the one before have come, at about the same moment on all, so clocks need
    not agree. The time of a round is such that ranks make `every` steps in it on average.

    Args:
        every: steps of a round, on average over the ranks.
        fragments: how many.
        delay: of a rank's own steps, from leaving to landing.
        warmup_steps: as `Schedule`.
    """

    def __init__(self, every: int, fragments: int = 1, delay: int = 0, warmup_steps: int = 0) -> None:
        self._every, self._warmup = every, warmup_steps
        self._fragments = _Fragments(fragments, delay)
        self._turn_s: float | None = None  # None: the ranks have not met yet
        self._began_s: float | None = None  # of this turn; None: at the next step
        self._waits = False  # for other ranks, which are still in the turn before
        self._finished = False
        self.step = self.turn = 0

    @property
    def round(self) -> int:
        return self.turn // self._fragments.count

    def due(self, now_s: float) -> bool:
        if self._began_s is None and not self._waits:
            self._began_s = now_s
        return self._turn_s is not None and self._began_s is not None and now_s >= self._began_s + self._turn_s

    def advance(self, due: bool) -> Turn:
        self.step += 1
        self._finished = False
        if self.step <= self._warmup:
            return self._fragments.turn(self.step, range(self._fragments.count), exact=True)
        if self._turn_s is None:
            return Turn(meets=self.step >= self._warmup + MEASURED_STEPS)
        if not due:
            return self._fragments.turn(self.step, ())
        leaves = [self.turn % self._fragments.count]
        self.turn += 1
        self._began_s, self._waits = None, True
        return self._fragments.turn(self.step, leaves)

    def begin_turn(self, at_s: float, step_s: Sequence[float]) -> None:
        """All ranks' numbers have come at `at_s`: their seconds of a step, where they are known (not 0)."""
        known = [one for one in step_s if one > 0]
        if known:
            rate = sum(1 / one for one in known) / len(known)
            self._turn_s = self._every / rate / self._fragments.count
        self._began_s, self._waits = at_s, False

    def finish(self) -> Turn:
        self._began_s, self._waits, self._finished = None, False, True
        return self._fragments.last(self.step, range(self._fragments.count))

    def stay(self, fragments: Sequence[int]) -> None:
        self._fragments.stay(fragments)

    def label(self) -> str:
        if self.step <= self._warmup:
            return f"step {self.step}"
        words = f"finish after turn {self.turn}" if self._finished else f"turn {self.turn}"
        return f"{words}, every {self._every} on average"

    def state(self) -> dict[str, Any]:
        numbers = {"step": self.step, "turn": self.turn, "turn_s": self._turn_s, "warmup_steps": self._warmup}
        return numbers | self._fragments.state()

    def load(self, state: dict[str, Any]) -> None:
        self.step, self.turn, self._turn_s = int(state["step"]), int(state["turn"]), state["turn_s"]
        self._warmup = int(state["warmup_steps"])
        self._began_s, self._waits = None, False
        self._fragments.load(state)
