"""Lines for the user while the launchers of several nodes have not all come: the nodes that are here, those that are
missing, and the address."""

from __future__ import annotations

import datetime
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from ringdp.launcher.arguments import Meeting
from ringdp.launcher.summary import duration

FIRST_S = 3.0
EVERY_S = 10.0
CONNECT_S = 2.0
"""Seconds after which an address that does not answer counts as not reachable."""

UNREACHABLE_S = 10.0
"""Seconds from the first failed attempt to reach the address until the line with the attempts."""


class Waiting:
    """Watches the rendezvous of the nodes from a thread of its own, and shows lines about it.

    Owned by the agent. `begin` and `end` are for the agent's threads; the rest runs on the thread.
    """

    def __init__(self, meeting: Meeting, show: Callable[[list[str]], None]) -> None:
        """
        Args:
            meeting: its address and the number of nodes.
            show: is given lines for the user, by the thread.
        """
        self._meeting = meeting
        self._show = show
        self._store: Any = None  # a connection of our own to the store through which they meet
        self._handler: Any = None  # torch's rendezvous handler, once there is one
        self._changed = threading.Condition()
        self._since: float | None = None
        self.last = ""
        """The nodes in the last line to the user."""
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Called when the nodes begin to meet."""
        with self._changed:
            self._since = time.monotonic()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="waiting", daemon=True)
                self._thread.start()
            self._changed.notify()

    def note_handler(self, handler: Any) -> None:
        """Called when torch has connected to the rendezvous."""
        self._handler = handler

    def end(self) -> None:
        """Called when they have met."""
        with self._changed:
            self._since = None
            self._changed.notify()

    @property
    def seconds(self) -> float | None:
        """Seconds since the rendezvous began; None outside it."""
        since = self._since
        return None if since is None else time.monotonic() - since

    @property
    def connected(self) -> bool:
        """Whether this node has reached the one that hosts the meeting."""
        handler = self._handler
        # The static one connects only when the nodes meet.
        late = self._meeting.backend == "static" and getattr(handler, "_store", None) is None
        return handler is not None and not late

    def text(self) -> str:
        """A line with the nodes that this one waits for; may take a moment."""
        meeting = self._meeting
        place = f"node {meeting.node} of {meeting.nodes}" if meeting.node is not None else "this node"
        if not self.connected and not meeting.hosted_here:
            return f"{place} waits for {meeting.host_name} at {meeting.endpoint}"
        here = self._here()
        if here is None:
            return f"{place} waits for the other nodes, {meeting.nodes} in all, at {meeting.endpoint}"
        if meeting.node is not None:
            missing = [str(node) for node in range(meeting.nodes) if node not in here]
            nodes = f"node{'s' if len(missing) > 1 else ''} {_some(missing)}" if missing else "the ranks to be numbered"
            return f"{place} waits for {nodes} at {meeting.endpoint}; here: {_some(list(here.values()))}"
        missing_count = meeting.least - len(here)
        rest = f"{missing_count} more" if missing_count > 0 else f"more, up to {meeting.nodes}"
        return f"{place} waits for {rest} at {meeting.endpoint}; here: {_some(list(here.values()))}"

    def tried(self) -> list[str]:
        """The problem with each address of the endpoint; empty where one answers."""
        try:
            found = socket.getaddrinfo(self._meeting.host, self._meeting.port, type=socket.SOCK_STREAM)
        except OSError as error:
            return [f"{self._meeting.host}: {error.strerror or error}"]
        problems = []
        for family, kind, protocol, _, address in found:
            with socket.socket(family, kind, protocol) as connection:
                connection.settimeout(CONNECT_S)
                try:
                    connection.connect(address)
                    return []
                except OSError as error:
                    where = " port ".join(map(str, address[:2]))
                    problems.append(f"{where}: {_why(error)}")
        return list(dict.fromkeys(problems))

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._since is None:
                    self._changed.wait()
                since: float = self._since
            self._log_until_met(since)

    def _log_until_met(self, since: float) -> None:
        next_s, said = FIRST_S, False
        unreachable_s: float | None = None
        while True:
            with self._changed:
                self._changed.wait(max(0.0, since + next_s - time.monotonic()))
                if self._since != since:
                    return
            seconds = time.monotonic() - since
            if seconds < next_s:
                continue
            most = self._meeting.timeout_s
            limit = f" of at most {duration(most)} (--rdzv-timeout)" if seconds < most else ""
            self.last = self.text()
            lines = [f"{self.last}, since {duration(seconds)}{limit}"]
            problems = [] if self.connected or self._meeting.hosted_here else self.tried()
            if problems and not said:
                unreachable_s = seconds if unreachable_s is None else unreachable_s
                if said := seconds - unreachable_s >= 0.9 * UNREACHABLE_S:
                    lines += unreachable_lines(self._meeting, problems)
            if self.seconds is None:  # they met meanwhile
                return
            self._show(lines)
            next_s += EVERY_S

    def _here(self) -> dict[int, str] | None:
        """The nodes that have come: by number, or in any order where they have none; None where that is not known."""
        try:
            if self._meeting.backend == "c10d":
                return dict(enumerate(sorted(node.addr for node in self._handler._state_holder.state.participants)))
            return self._announced() if self._meeting.node is not None else None
        except Exception:  # torch's own, of another release; the store may end at any time
            return None

    def _announced(self) -> dict[int, str]:
        """Static rendezvous: torch's store counts the nodes that have come and does not name them; so each node writes
        its name."""
        if self._store is None:
            self._store = TCPStore(
                self._meeting.host,
                self._meeting.port,
                is_master=False,
                wait_for_workers=False,
                timeout=datetime.timedelta(seconds=CONNECT_S),
            )
        keys = [f"ringdp/launcher/{self._meeting.run_id}/{node}" for node in range(self._meeting.nodes)]
        own = self._meeting.node
        if own is not None:
            self._store.set(keys[own], f"node {own} ({socket.gethostname()})")
        return {node: self._store.get(key).decode() for node, key in enumerate(keys) if self._store.check([key])}


def unreachable_lines(meeting: Meeting, problems: list[str]) -> list[str]:
    """Lines for an address that cannot be reached: the attempts, and a remedy."""
    return [
        f"cannot reach {meeting.endpoint}: {'; '.join(problems)}",
        f"    is the launcher of {meeting.host_name} running, is {meeting.flag} the address of its host as this one"
        " sees it, and does a firewall let the port through?",
    ]


def _why(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer in {CONNECT_S:.0f} s"
    return os.strerror(error.errno) if error.errno is not None and error.errno > 0 else str(error)


def _some(names: list[str]) -> str:
    shown = 8
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")
