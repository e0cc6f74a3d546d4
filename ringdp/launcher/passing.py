"""SIGUSR1 and SIGUSR2 that reach the launcher are meant for its ranks: Slurm's ``--signal=B:USR1@120``, for example.

By default either of them ends a process. So a rank gets one only where it handles or ignores it, and until then the
launcher keeps it: a rank that imports torch, is about to be started again, or has no handler at all goes on.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from ringdp.launcher import processes

SETTLE_S = 1.0
"""Seconds that a rank which had no handler has to set another one: ``init`` sets one of its own for SIGUSR1."""

NOTICE_S = 1.0
"""Seconds until the line about ranks without a handler."""

SAME_S = 0.3
"""Seconds within which a signal that all processes of a Slurm step get reaches all of them."""


class PassedOn:
    """Signals on their way to the ranks of this node.

    A signal that is under way has reached the ranks in ``_reached``, once each; it is over when that are all that live.
    Used by the supervisor's main thread; `note` also by signal handlers, between its instructions.
    """

    def __init__(self) -> None:
        self._came: dict[int, float] = {}  # when, by the signal's number
        self._reached: dict[int, set[int]] = {}
        self._first_seen: dict[
            tuple[int, int], float
        ] = {}  # a signal and a pid that had no handler, and since when it has
        self._logged: set[int] = set()
        self._pids: Mapping[int, int] = {}  # by rank

    def note(self, number: int) -> None:
        """Note that the launcher has received this signal."""
        self._came[number] = time.monotonic()
        self._reached[number] = set()
        self._logged.discard(number)

    def all_got(self, number: int) -> None:
        """Note that the agent has received it, too: then the sender sent it to every process, and the ranks have it."""
        if number in self._came and time.monotonic() - self._came[number] < SAME_S:
            self._forget(number)

    def starting(self) -> None:
        """The ranks are started again: a signal that has not reached all of those before is for these."""
        self._pids = {}
        for reached in self._reached.values():
            reached.clear()

    def started(self, pids: Mapping[int, int]) -> None:
        """The ranks run; by rank, the process that the agent has started."""
        self._pids = dict(pids)

    @property
    def under_way(self) -> bool:
        """Whether there is something to do."""
        return bool(self._came)

    def deliver(self) -> list[str]:
        """Send the signals that can be sent, once `SAME_S` have passed; lines for the user."""
        now = time.monotonic()
        lines = []
        for number, came in list(self._came.items()):
            if now - came < SAME_S:
                continue
            reached = self._reached[number]
            reached |= {
                rank for rank, pid in self._pids.items() if rank not in reached and self._send(number, pid, now)
            }
            without = sorted(
                rank for rank, pid in self._pids.items() if rank not in reached and processes.is_alive(pid)
            )
            over = bool(reached) and not without
            if number not in self._logged and (over or now - came > NOTICE_S):
                self._logged.add(number)
                lines.append(self._line(number, sorted(reached), without))
            if over:
                self._forget(number)
        return lines

    def _send(self, number: int, pid: int, now: float) -> bool:
        """Whether this rank has got it now."""
        receiver = _process_of(pid)
        if not processes.takes(receiver, number):
            self._first_seen[number, pid] = 0.0
            return False
        since = self._first_seen.get((number, pid))
        if since == 0.0:
            since = self._first_seen[number, pid] = now
        if since is not None and now - since < SETTLE_S:
            return False
        processes.send([receiver], number)
        return True

    def _line(self, number: int, reached: list[int], without: list[int]) -> str:
        name = signal.Signals(number).name
        if not self._pids:
            return f"{name} came: the ranks get it when they run"
        parts = [f"{name} was passed on to {_ranks(reached)}"] if reached else [f"{name} came"]
        if without:
            has, them, get = ("has", "it", "gets") if len(without) == 1 else ("have", "them", "get")
            parts.append(
                f"{_ranks(without)} {has} no handler for it, so it would end {them}: {get} it with the first handler"
            )
        return "; ".join(parts)

    def _forget(self, number: int) -> None:
        del self._came[number], self._reached[number]
        self._first_seen = {key: since for key, since in self._first_seen.items() if key[0] != number}


def _process_of(pid: int) -> int:
    """The rank's own process: below one that is not Python, a shell script perhaps, the first that is.

    A shell with any trap has handlers for signals that end it all the same, so it gets none where Python is below it.
    """
    level = [pid]
    while level:
        if (found := next(filter(_is_python, level), None)) is not None:
            return found
        level = [child for parent in level for child in processes.children(parent)]
    return pid


def _is_python(pid: int) -> bool:
    try:
        return Path(os.readlink(f"/proc/{pid}/exe")).name.startswith(("python", "pypy"))
    except OSError:
        return False


def _ranks(ranks: list[int]) -> str:
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][-1] + 1:
            spans[-1][1:] = [rank]
        else:
            spans.append([rank])
    return f"rank{'s' if len(ranks) > 1 else ''} " + ", ".join("-".join(map(str, span)) for span in spans)
