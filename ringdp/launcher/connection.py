"""The ssh connection through which a launcher was started: `ssh host ringrun …`, without a terminal.

With a terminal its end is a SIGHUP. Without one there is no signal: sshd ends, and its children go on, unseen.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import stat
from collections.abc import Collection

from ringdp.config.inheritance import stat_fields

_SERVERS = ("sshd", "dropbear", "tinysshd")  # beginnings of the names of processes


class Connection:
    """Reports whether it is lost. Used by the launcher's main thread; owns a descriptor for the life of the process."""

    def __init__(self, streams: Collection[int], server: int | None) -> None:
        """
        Args:
            streams: those of our descriptors 0 to 2 that end in it.
            server: a pidfd of the ssh server's process; None if that has ended.
        """
        self._server = select.poll()
        if server is not None:
            self._server.register(server, select.POLLIN)
        self._streams = set(streams)
        if _end("/proc/self/fd/1") == _end("/proc/self/fd/2"):
            self._streams.discard(2)
        self._had_input = 0 in streams and not _closed({0})

    @classmethod
    def of_this_process(cls) -> Connection | None:
        """The connection that this process belongs to; None where its end is not to end this process.

        It belongs to one if an ssh server started its session and one of its standard streams is the session's own.
        `nohup` and `setsid`, streams that all lead elsewhere, a terminal, and batch systems make it one of its own.
        """
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
            return None
        leader = os.getsid(0)
        ends = {end for number in (0, 1, 2) if (end := _end(f"/proc/{leader}/fd/{number}"))}
        shared = {number for number in (0, 1, 2) if _end(f"/proc/self/fd/{number}") in ends}
        server = _parent(leader)
        if not shared or server is None:
            return None
        if _name(server).startswith(_SERVERS):
            with contextlib.suppress(OSError):  # Linux before 5.3 has no pidfd
                return cls(shared, os.pidfd_open(server))
            return cls(shared, None)
        # Importing torch takes seconds: the connection may have been lost meanwhile.
        early = cls(shared, None)
        return early if "SSH_CONNECTION" in os.environ and 2 in shared and early.lost else None

    @property
    def lost(self) -> bool:
        """Whether the ssh server has ended, or has closed this session, one of several that it serves.

        Then stderr is closed, or stdout and an input that was open. Stdout alone is closed by
        `ssh host ringrun | head`, and the input alone by `ssh -n`, which are no reason to end.
        """
        if self._server.poll(0):
            return True
        closed = _closed(self._streams)
        return 2 in closed or (self._had_input and {0, 1} <= closed)


def _closed(descriptors: Collection[int]) -> set[int]:
    """Those whose other end is closed."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, 0)
    return {descriptor for descriptor, _ in poll.poll(0)}


def _parent(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        return int(stat_fields(pid)[1])
    return None


def _name(pid: int) -> str:
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/comm") as file:
            return file.read().strip()
    return ""


def _end(path: str) -> tuple[int, int] | None:
    """What identifies a pipe or socket; None for a file, a terminal, /dev/null, or a descriptor that is closed."""
    try:
        it = os.stat(path)
    except OSError:
        return None
    return (it.st_dev, it.st_ino) if stat.S_ISFIFO(it.st_mode) or stat.S_ISSOCK(it.st_mode) else None
