"""The clocks of a store's workers: who is how far, and whose request may be answered. No threads, no network."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Waits:
    """A request may not be answered yet: these workers have to go on first.

    Attributes:
        clock: theirs.
    """

    workers: tuple[int, ...]
    clock: int


class Clocks:
    """Of all workers, as one owner knows them: their messages bring them, so none is ahead of the truth.

    A clock never goes back, and neither does `least`, the clock of the slowest worker that is there. A worker that has
    left counts no more.

    Args:
        workers: with their clocks.
        staleness: how many clocks a worker may be ahead of the slowest one; None: no limit.

    Attributes:
        least: of the workers that are there; when none is, of those that were last.
    """

    def __init__(self, workers: Mapping[int, int], staleness: int | None) -> None:
        self.staleness = staleness
        self._there = dict(workers)
        self.least = 0
        self._look()

    @property
    def workers(self) -> list[int]:
        """That have not left."""
        return list(self._there)

    def of(self, worker: int) -> int:
        """KeyError where it has left."""
        return self._there[worker]

    def reached(self, worker: int, clock: int) -> None:
        """Of a worker that has left, nothing."""
        if worker in self._there:
            self._there[worker] = max(clock, self._there[worker])
            self._look()

    def left(self, worker: int) -> None:
        """Also where it has left before."""
        self._there.pop(worker, None)
        self._look()

    def waits(self, clock: int) -> Waits | None:
        """None: a request of a worker at `clock` may be answered."""
        if self.staleness is None or self.least >= clock - self.staleness or not self._there:
            return None
        return Waits(tuple(self._slowest()), self.least)

    def behind(self) -> list[int]:
        """The slowest workers; [] where all are at one clock."""
        return self._slowest() if any(at > self.least for at in self._there.values()) else []

    def age(self, clock: int) -> int:
        """By how many clocks what a worker at `clock` gets now is older than what it gets where none is behind it."""
        return max(0, clock - self.least)

    def _slowest(self) -> list[int]:
        return [worker for worker, at in self._there.items() if at == self.least]

    def _look(self) -> None:
        if self._there:
            self.least = max(self.least, min(self._there.values()))
