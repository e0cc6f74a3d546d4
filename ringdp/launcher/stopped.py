"""Ranks whose process is stopped (SIGSTOP, a shell's Ctrl-Z), for which the others wait as long as that lasts."""

from __future__ import annotations

import signal
import time
from collections.abc import Collection

from ringdp.launcher import processes

LOOK_S = 1.0
"""At most so much of the time between two looks counts: this process may have been stopped itself, with its ranks."""


class StoppedRanks:
    """Ends ranks of this host that have been stopped for too long (``--evict-after``). Used by the agent's loop alone.

    Args:
        limit_s: seconds for which a rank may be stopped.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._looked_s: float | None = None
        self._stopped_s: dict[int, float] = {}  # by pid: for how long, as far as it was seen
        self._ended: dict[int, str] = {}

    def look(self, pids: Collection[int], *, others: bool) -> None:
        """Kill those that have been stopped for longer than the limit.

        Args:
            pids: of the ranks that have not ended.
            others: there are ranks on other hosts. Without any, the last ranks that run are left alone, stopped or not.
        """
        now_s = time.monotonic()
        passed_s = 0.0 if self._looked_s is None else min(now_s - self._looked_s, LOOK_S)
        self._looked_s = now_s
        before = self._stopped_s
        self._stopped_s = {
            pid: before[pid] + passed_s if pid in before else 0.0 for pid in pids if processes.is_stopped(pid)
        }
        if not others and len(self._stopped_s) == len(pids):
            return
        for pid, seconds in self._stopped_s.items():
            if seconds >= self._limit_s and pid not in self._ended:
                self._ended[pid] = f"it had been stopped for {seconds:.3g} s: --evict-after {self._limit_s:g}"
                processes.send([pid], signal.SIGKILL)

    def why(self, pid: int) -> str:
        """The reason for which this process was killed; empty if it was not."""
        return self._ended.get(pid, "")
