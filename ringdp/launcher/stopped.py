"""Ranks whose process is stopped (SIGSTOP, a shell's Ctrl-Z), for which the others wait as long as that lasts."""

from __future__ import annotations

import signal
import time
from collections.abc import Collection

from ringdp.launcher import processes

LOOK_S = 1.0
"""At most so much of the time between two looks counts: this process may have been stopped itself, with its ranks."""


NEWCOMER_S = 2.0
"""Seconds for which a newcomer may be stopped: the others may be sending it the state, and wait for it."""


class StoppedRanks:
    """Ends ranks of this host that have been stopped for too long. Used by the agent's loop alone.

    Args:
        limit_s: seconds for which a rank may be stopped (``--evict-after``); None: as long as it is, but for newcomers.
    """

    def __init__(self, limit_s: float | None) -> None:
        self._limit_s = limit_s
        self._looked_s: float | None = None
        self._stopped_s: dict[int, float] = {}  # by pid: for how long, as far as it was seen
        self._ended: dict[int, str] = {}

    def look(self, pids: Collection[int], *, others: bool, newcomers: Collection[int] = ()) -> None:
        """Kill those that have been stopped for longer than the limit.

        Args:
            pids: of the ranks that have not ended.
            others: there are ranks on other hosts. Without any, the last ranks that run are left alone, stopped or not.
            newcomers: of these, those that are no members of their job yet.
        """
        now_s = time.monotonic()
        passed_s = 0.0 if self._looked_s is None else min(now_s - self._looked_s, LOOK_S)
        self._looked_s = now_s
        before = self._stopped_s
        self._stopped_s = {
            pid: before[pid] + passed_s if pid in before else 0.0
            for pid in (newcomers if self._limit_s is None else pids)
            if processes.is_stopped(pid)
        }
        if not others and len(self._stopped_s) == len(pids):
            return
        for pid, seconds in self._stopped_s.items():
            words = f"--evict-after {self._limit_s:g}" if self._limit_s is not None else ""
            limit_s = self._limit_s or NEWCOMER_S
            if pid in newcomers and limit_s >= NEWCOMER_S:
                words, limit_s = "the others may not wait longer for one that joins", NEWCOMER_S
            if seconds >= limit_s and pid not in self._ended:
                self._ended[pid] = f"it had been stopped for {seconds:.3g} s: {words}"
                processes.send([pid], signal.SIGKILL)

    def why(self, pid: int) -> str:
        """The reason for which this process was killed; empty if it was not."""
        return self._ended.get(pid, "")
