"""The launchers of a job's nodes exchange through the store that they live, and how their ranks ended.

Each stays until the job is over on all nodes: one of them keeps the store, and the end of the job depends on all.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from torch._C._distributed_c10d import Store

from ringdp.launcher.summary import duration

BEAT_S = 0.5
LOOK_S = 3.0
"""Seconds between two looks at the others' beats while the ranks of this node run."""

SOON_S = 0.1
"""The same as `BEAT_S` for the first seconds after the end of this node's ranks: the others mostly end with them."""

SILENCE_S = 10.0
"""Seconds without a beat of another node's launcher, or an answer of the store, after which it counts as lost."""

NOTICE_S, NOTICE_AGAIN_S = 3.0, 10.0
"""Seconds until the first line about nodes that this one waits for, and between two lines."""

FAREWELL_S = 3.0
"""Seconds for which a launcher whose ranks failed stays, so that the others can read it."""

FLUSH_S = 1.0
"""Seconds that the store has to take this node's entries."""

WELL, LOST, FAILED, AGAIN = "well", "lost", "failed", "again"
_NAMES = 8  # of nodes in one line
_log = logging.getLogger("ringdp.launch")


@dataclasses.dataclass(frozen=True)
class End:
    """How the ranks of a node ended in one attempt.

    Attributes:
        how: `WELL`; `LOST`, all of them, which an elastic job goes on without; `FAILED`; or `AGAIN`: they failed, and
            are started again, with those of all nodes.
        words: the failure, for the user of another node; empty where there is none.
    """

    how: str
    words: str = ""


class OtherNodeFailed(Exception):
    """The job has failed on another node, or how it goes on is not known. The text has the reason."""


class OtherNodes:
    """Those of one attempt of a job, seen by the launcher of one node.

    Entries of ``_ends`` come from the store and do not change. A thread of its own reads the store, which may not
    answer; it alone writes ``_ends``, ``_done``, ``_hosts``, ``_beats`` and ``_next``.
    """

    def __init__(
        self,
        store: Store,
        node: int,
        nodes: int,
        *,
        attempt: str,
        elastic: bool,
        say: Callable[[list[str], bool], None],
    ) -> None:
        """
        Args:
            store: of the launchers, the same on all nodes.
            node: this one's number.
            nodes: how many there are.
            attempt: the same on all nodes, and another one after each restart.
            elastic: a node's failure does not end the others.
            say: is given lines for the user, by the thread, and whether another node's launcher shows the same.
        """
        self._store, self._node, self._nodes, self._elastic, self._say = store, node, nodes, elastic, say
        self._prefix = f"ringdp/launchers/{attempt}"
        self._own: End | None = None
        self._own_since = 0.0
        self._leaving = False
        self._ready: int | None = None  # its ranks are ended, to be started for the n-th time again
        self._next: tuple[list[int], int] | None = None  # the decision about that
        self._ends: dict[int, End] = {}
        self._done: set[int] = set()  # those that need no store any more
        self._hosts: dict[int, str] = {}
        now = time.monotonic()
        self._beats: dict[int, tuple[int, float]] = {other: (-1, now) for other in range(nodes) if other != node}
        self._answered = self._looked = now
        self._asked = 0  # how often the thread has
        self._broken: str | None = None
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="other nodes", daemon=True)
        self._thread.start()

    def publish(self, end: End) -> None:
        """Publish how the ranks of this node ended. The first call counts."""
        if self._own is None:
            self._own_since = time.monotonic()
            self._own = end
            self._wake.set()

    @property
    def ends(self) -> dict[int, End]:
        """How the ranks of each node have ended, as far as is known."""
        return dict(self._ends)

    @property
    def outcome(self) -> End | None:
        """How the job ends for a node whose ranks have ended well; None while others run."""
        ends = self.ends
        for node, end in sorted(ends.items()):
            if node != self._node and end.how in (FAILED, AGAIN):
                return end
        if len(ends) == self._nodes:
            return End(WELL)
        missing = self._missing()
        if self.store_is_gone():
            if missing:
                return End(
                    FAILED,
                    f"{self._names(missing)}: how it ended is not known: the launcher that keeps the store is gone",
                )
            return End(WELL)
        if silent := [node for node in missing if node in self._silent()]:
            return End(FAILED, f"{self._names(silent)}: no beat of its launcher for {SILENCE_S:.0f} s")
        return None

    @property
    def again(self) -> End | None:
        """That of another node which starts its ranks again; None where there is none."""
        return next((it for node, it in sorted(self.ends.items()) if node != self._node and it.how == AGAIN), None)

    def end(self, how: str) -> End:
        """The ranks of this node of an elastic job are over: `WELL`, some of them with exit code 0, or `LOST`.

        Returns when those of another node are started again, or those of all are over or their launchers silent: then
        `WELL`, if the job has ended well on some node, or `LOST`.
        """
        self.publish(End(how))
        while (
            (again := self.again) is None
            and not self.store_is_gone()
            and not all(node in self._ends or node in self._silent() for node in range(self._nodes))
        ):
            time.sleep(0.02)
        _log.info("the ranks here: %s; all: %s; all know: %s", how, self._ends, self._done)
        return again or End(WELL if self._well else LOST)

    def agree(self, restarts: int) -> tuple[list[int], int]:
        """Agree with the other nodes of an elastic job who starts its ranks again: all nodes whose launchers are not
        silent and whose ranks have been ended. Asks the store no more afterwards.

        Args:
            restarts: how often this node will have started its ranks again.

        Returns:
            The numbers of these nodes, and how often they will have: the same on all of them.

        Raises:
            OtherNodeFailed: the store is gone, or they have decided without this node.
        """
        self._ready = restarts
        while (decided := self._next) is None:
            if self.store_is_gone():
                raise OtherNodeFailed("the launcher that keeps the store is gone, so no rank is started again")
            self._wake.set()
            time.sleep(0.02)
        self.close()
        members = decided[0]
        self.check_not_passed_over()
        if without := [node for node in range(self._nodes) if node not in members]:
            ended = all(node in self._ends and self._ends[node].how == FAILED for node in without)
            why = "its launcher has ended" if ended else f"no beat of its launcher for {SILENCE_S:.0f} s"
            self._say([f"starting again without {self._names(without)}: {why}"], self._node != members[0])
        return decided

    def check_not_passed_over(self) -> None:
        """Raise OtherNodeFailed if the other nodes have decided to start their ranks again without this one."""
        if self._next is not None and self._node not in self._next[0]:
            raise OtherNodeFailed(
                "the other nodes have started their ranks again without this one, whose launcher was not heard of for"
                f" {SILENCE_S:.0f} s"
            )

    def leave(self, limit_s: float = 2 * SILENCE_S) -> None:
        """Stay until the others need no store any more, are silent, or the time is over; then ask it no more."""
        if self._stop.is_set():
            return
        self._leaving = True
        end = time.monotonic() + limit_s
        while not self.store_is_gone() and time.monotonic() < end:
            published = self._own is None or self._node in self._ends
            if published and all(node in self._done or node in self._silent() for node in range(self._nodes)):
                break
            self._wake.set()
            time.sleep(0.02)
        self.close()

    def flush(self) -> None:
        """Returns when this node's entries are in the store, and earlier ones have been read, or after `FLUSH_S`."""
        end = time.monotonic() + FLUSH_S
        asked = self._asked
        while self._asked < asked + 2 and not self._stop.is_set() and self._broken is None and time.monotonic() < end:
            self._wake.set()
            time.sleep(0.005)

    def close(self) -> None:
        """Ask the store no more."""
        self._stop.set()
        self._wake.set()

    @property
    def _well(self) -> bool:
        own = self._own is not None and self._own.how == WELL
        return own or any(end.how == WELL for end in self._ends.values())

    def _missing(self) -> list[int]:
        """The other nodes whose ranks have not ended, as far as is known."""
        return [node for node in self._beats if node not in self._ends]

    def _names(self, nodes: list[int]) -> str:
        shown = [f"{node} ({self._hosts[node]})" if node in self._hosts else str(node) for node in nodes[:_NAMES]]
        more = f" and {len(nodes) - _NAMES} more" if len(nodes) > _NAMES else ""
        return f"node{'s' if len(nodes) > 1 else ''} {', '.join(shown)}{more}"

    def store_is_gone(self) -> bool:
        """Whether the launcher that keeps it is silent, or its host."""
        return self._broken is not None or time.monotonic() - self._answered > SILENCE_S

    def _silent(self) -> list[int]:
        now = time.monotonic()
        return [other for other, (_, heard) in self._beats.items() if now - heard > SILENCE_S]

    def _run(self) -> None:
        notice_s = NOTICE_S
        try:
            self._set("host", socket.gethostname())
            while not self._stop.is_set():
                self._ask()
                since_s = time.monotonic() - self._own_since
                if self._own is not None and since_s > notice_s and not self._leaving and self.outcome is None:
                    self._log_waiting(since_s)
                    notice_s += NOTICE_AGAIN_S if notice_s > NOTICE_S else NOTICE_AGAIN_S - NOTICE_S
                self._wake.wait(SOON_S if self._own is not None and since_s < NOTICE_S else BEAT_S)
                self._wake.clear()
        except Exception as error:  # the store, and with it the node that keeps it
            self._broken = str(error)
            _log.info("the store is gone: %s", error)

    def _ask(self) -> None:
        self._store.add(f"{self._prefix}/beat/{self._node}", 1)
        if self._own is not None and self._node not in self._ends:
            self._set("end", f"{self._own.how} {self._own.words}")
            self._store.add(f"{self._prefix}/ended", 1)
            self._ends[self._node] = self._own
        if self._store.add(f"{self._prefix}/ended", 0) > len(self._ends):
            for other in self._missing():
                if (entry := self._get("end", other)) is not None:
                    how, _, words = entry.partition(" ")
                    self._ends[other] = End(how, words)
        if self._node not in self._done and (self._leaving or self._settled()):
            self._set("done", "1")
            self._done.add(self._node)
        if self._leaving:
            self._done |= {other for other in self._beats if self._get("done", other) is not None}
        now = time.monotonic()
        if self._own is not None or now - self._looked > LOOK_S:
            self._looked = now
            self._look_at_beats()
            if self._elastic and self._next is None:
                self._next = self._decided()
        if self._ready is not None and self._next is None:
            self._decide(self._ready)
        self._answered = time.monotonic()
        self._asked += 1

    def _settled(self) -> bool:
        """Whether no later entry can change how the job ends."""
        failed = not self._elastic and any(end.how == FAILED for end in self._ends.values())
        return failed or len(self._ends) == self._nodes

    def _decide(self, restarts: int) -> None:
        """Say that this node is ready; the lowest node decides who starts again when all that are there are ready."""
        self._set("ready", str(restarts))
        counts = {self._node: restarts}
        counts |= {other: int(count) for other in self._beats if (count := self._get("ready", other)) is not None}
        failed = {other for other, end in self._ends.items() if end.how == FAILED}
        if self._node == min(counts) and not set(self._beats) - set(counts) - failed - set(self._silent()):
            # The first decision counts.
            self._store.compare_set(f"{self._prefix}/next", "", json.dumps([sorted(counts), max(counts.values())]))

    def _decided(self) -> tuple[list[int], int] | None:
        key = f"{self._prefix}/next"
        if not self._store.check([key]):
            return None
        members, count = json.loads(self._store.get(key))
        self._note_hosts([other for other in self._beats if other not in members])
        return members, count

    def _look_at_beats(self) -> None:
        for other, (count, _) in self._beats.items():
            now_at = self._store.add(f"{self._prefix}/beat/{other}", 0)
            if now_at != count:
                self._beats[other] = (now_at, time.monotonic())

    def _log_waiting(self, since_s: float) -> None:
        missing = self._missing()
        self._note_hosts(missing)
        line = f"node {self._node} of {self._nodes} waits for {self._names(missing)}, whose ranks have not ended"
        last_beat_s = time.monotonic() - max(self._beats[node][1] for node in missing)
        silence = f"; the last beat of its launcher was {duration(last_beat_s)} ago" if last_beat_s > NOTICE_S else ""
        self._say([f"{line}, since {duration(since_s)}{silence}"], any(node < self._node for node in self._ends))

    def _note_hosts(self, nodes: list[int]) -> None:
        for node in nodes:
            if node not in self._hosts and (host := self._get("host", node)) is not None:
                self._hosts[node] = host

    def _set(self, what: str, value: str) -> None:
        self._store.set(f"{self._prefix}/{what}/{self._node}", value)

    def _get(self, what: str, node: int) -> str | None:
        key = f"{self._prefix}/{what}/{node}"
        return self._store.get(key).decode() if self._store.check([key]) else None


def claim(agent: Any) -> None:
    """Be the launcher of its node of an elastic job, before the ranks start.

    Raises:
        OtherNodeFailed: there is one, or was, whose ranks are the job's: the end of others would be taken for theirs.
    """
    group = agent._worker_group
    if group.store.add(f"ringdp/launchers/holder/{group.group_rank}", 1) > 1:
        raise OtherNodeFailed(
            f"an elastic job runs at this rendezvous, and node {group.group_rank} of it has a launcher already, or had"
            " one: give this job another --master-port, or let it join that one by --join HOST:PORT"
        )


def of(agent: Any, *, elastic: bool, say: Callable[[list[str], bool], None]) -> OtherNodes:
    """Those of torch's agent, whose ranks have been started."""
    group, spec = agent._worker_group, agent._worker_group.spec
    store = agent._store.clone() if hasattr(agent._store, "clone") else agent._store
    # Other rendezvous than the static one give each round a store of its own, and nodes may count restarts differently.
    restarts = spec.max_restarts - agent._remaining_restarts
    attempt = str(restarts) if spec.rdzv_handler.get_backend() == "static" else "0"
    return OtherNodes(store, group.group_rank, group.group_world_size, attempt=attempt, elastic=elastic, say=say)
