"""The time of turns: by steps, or, where ranks are not equally fast, by a time that all ranks have agreed on."""

from __future__ import annotations

import struct
import time
from typing import Any

import torch
import torch.distributed as dist

from ringdp.job.backend import named
from ringdp.job.byte_collectives import all_gather_bytes, device_for
from ringdp.job.elastic import as_unit
from ringdp.rounds.exchange import Flight
from ringdp.rounds.schedule import Schedule, TimedSchedule, Turn


class Pace:
    """A schedule and the times of this rank's steps. One thread.

    Args:
        schedule: by steps or by time.
        who: in the names of operations.
        group: of the ranks that are averaged over; None for one rank alone.
        together: ranks that a RingDP keeps in step with this one; None where there are none.
    """

    def __init__(
        self,
        schedule: Schedule | TimedSchedule,
        who: str,
        group: dist.ProcessGroup | None,
        together: dist.ProcessGroup | None,
    ) -> None:
        self.schedule, self._who, self._group, self._together = schedule, who, group, together
        self._opening: Flight | None = None  # whose records begin the next turn
        self._ended_s: float | None = None  # the last step, and what it brought
        self._stepping_s, self._timed_steps = 0.0, 0  # since a fragment last left, without what steps brought

    def turn(self, began_s: float, called: bool = False) -> Turn:
        """A step has ended at that time. `called`: others wait for this rank."""
        if self._ended_s is not None:
            self._stepping_s += began_s - self._ended_s
            self._timed_steps += 1
        if isinstance(self.schedule, Schedule):
            return self.schedule.advance(called)
        if (flight := self._opening) is not None and flight.records_came_s is not None:
            self.schedule.begin_turn(flight.records_came_s, [one.step_s for one in flight.records()])
            self._opening = None
        turn = self.schedule.advance(self._agreed(self.schedule.due(began_s)))
        if turn.meets:
            self._meet(self.schedule)
        return turn

    def ended(self) -> float:
        """Called with the time when the actions of the step are done."""
        self._ended_s = time.monotonic()
        return self._ended_s

    def leaves(self, flight: Flight) -> None:
        self._opening = None if flight.exact else flight

    def step_s(self) -> float:
        """Seconds of a step since this was last asked; 0: not known."""
        mean_s = self._stepping_s / self._timed_steps if self._timed_steps else 0.0
        self._stepping_s, self._timed_steps = 0.0, 0
        return mean_s

    def load(self, state: dict[str, Any]) -> None:
        """Load a `state` of the schedule."""
        self.schedule.load(state)
        self._opening = self._ended_s = None
        self._stepping_s, self._timed_steps = 0.0, 0

    def _meet(self, schedule: TimedSchedule) -> None:
        """Exchange the ranks' paces: the first turn begins."""
        paces = [mine := self.step_s()]
        if self._group is not None:
            what, group = f"{self._who}: seconds of a step", self._group
            with named(what):
                lines = as_unit(group, what, lambda: all_gather_bytes(struct.pack("<d", mine), group, room=8))
            paces = [struct.unpack("<d", one)[0] for one in lines]
        schedule.begin_turn(time.monotonic(), paces)

    def _agreed(self, due: bool) -> bool:
        """The answer of the first of the ranks that are kept in step: their clocks may differ."""
        group, what = self._together, f"{self._who}: is the turn over?"
        if group is None or group.size() == 1:
            return due

        def of_the_first() -> bool:
            answer = torch.tensor([due], dtype=torch.uint8, device=device_for(group))
            dist.broadcast(answer, group=group, group_src=0)
            return bool(answer)

        with named(what):
            return as_unit(group, what, of_the_first)
