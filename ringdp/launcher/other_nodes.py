"""What the launchers of an elastic job's hosts tell each other through the store: that they live, and how ranks ended.

Each stays until all are over, or silent: one of them keeps the store, and one whose ranks are all lost cannot know
alone how the job ends.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from torch._C._distributed_c10d import Store

BEAT_S = 0.5
SILENCE_S = 10.0
"""Seconds without a word of another host's launcher, or of the store, after which it is gone."""

WELL, LOST = "well", "lost"
_log = logging.getLogger("ringdp.launch")


class OtherNodes:
    """Those of one job, seen by the launcher of one host. A thread of its own asks the store, which may not answer."""

    def __init__(self, store: Store, node: int, nodes: int, attempt: str) -> None:
        self._store, self._node, self._nodes = store, node, nodes
        self._prefix = f"ringdp/launchers/{attempt}"
        self._own = ""
        self._knows = False
        self._ends: dict[int, str] = {}
        self._known: dict[int, str] = {}
        now = time.monotonic()
        self._beats: dict[int, tuple[int, float]] = {other: (-1, now) for other in range(nodes) if other != node}
        self._answered = now
        self._broken: str | None = None
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="other nodes", daemon=True)
        self._thread.start()

    def end(self, how: str) -> bool:
        """The ranks of this host are over: `WELL`, some of them with exit code 0, or `LOST`. Returns when those of the
        other hosts are, or when nothing is heard of them any more: whether the job has ended well somewhere."""
        if self._own:  # told already
            return WELL in self._ends.values()
        self._own = how
        self._wait_for(self._ends)
        well = WELL in self._ends.values() or how == WELL
        self._knows = True  # who keeps the store waits until all others know as much
        self._wait_for(self._known)
        _log.info("the ranks here: %s; all: %s; all know: %s", how, self._ends, self._known)
        self._stop.set()
        self._wake.set()
        return well

    def _wait_for(self, told: dict[int, str]) -> None:
        while not self._store_is_gone() and not all(
            node in told or node in self._silent() for node in range(self._nodes)
        ):
            self._wake.set()
            time.sleep(0.02)

    def _store_is_gone(self) -> bool:
        return self._broken is not None or time.monotonic() - self._answered > SILENCE_S

    def _silent(self) -> list[int]:
        now = time.monotonic()
        return [other for other, (_, heard) in self._beats.items() if now - heard > SILENCE_S]

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._ask()
                self._wake.wait(BEAT_S)
                self._wake.clear()
        except Exception as error:  # the store, and with it the host that keeps it
            self._broken = str(error)
            _log.info("the store is gone: %s", error)

    def _ask(self) -> None:
        self._store.add(f"{self._prefix}/beat/{self._node}", 1)
        for other, (count, _) in self._beats.items():
            now_at = self._store.add(f"{self._prefix}/beat/{other}", 0)
            if now_at != count:
                self._beats[other] = (now_at, time.monotonic())
        self._tell("end", self._own, self._ends)
        self._tell("knows", "1" if self._knows else "", self._known)
        self._answered = time.monotonic()

    def _tell(self, what: str, own: str, told: dict[int, str]) -> None:
        """Write what there is to say of this host, and read what the others have said."""
        if own and self._node not in told:
            self._store.set(f"{self._prefix}/{what}/{self._node}", own)
            told[self._node] = own
        for other in self._beats:
            key = f"{self._prefix}/{what}/{other}"
            if other not in told and self._store.check([key]):
                told[other] = self._store.get(key).decode()


def of(agent: Any) -> OtherNodes:
    """Those of torch's agent, whose ranks have been started."""
    group = agent._worker_group
    store = agent._store.clone() if hasattr(agent._store, "clone") else agent._store
    return OtherNodes(store, group.group_rank, group.group_world_size, str(agent._remaining_restarts))
