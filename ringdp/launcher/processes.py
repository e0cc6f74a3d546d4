"""The processes of this job, which descend from this one, and how to end all of them.

No list of pids kept while the job ran is used: a rank may fork data-loader workers, and torch's agent
may be interrupted in the middle of starting the ranks. The process that cleans up becomes a subreaper, so that a
process whose parent has died becomes its child instead of init's, and then /proc shows the whole tree.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Collection

from ringdp.config.inheritance import stat_fields

SAME_PRESS_S = 0.25
"""timeout(1), srun and others send a signal to the process and to its group: two so close are one."""

_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)


def become_subreaper() -> None:
    """Adopt orphaned descendants; not inherited by children.

    Raises:
        OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(number)}")


def descendants(root: int, *, without: Collection[int] = ()) -> list[int]:
    """Pids of all living processes below ``root``; zombies do not count.

    Args:
        root: a pid, itself not in the result.
        without: pids that are left out with everything below them.
    """
    children: dict[int, list[int]] = {}
    zombies: set[int] = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        pid = int(entry)
        try:
            fields = stat_fields(pid)
        except OSError:  # it ended meanwhile
            continue
        children.setdefault(int(fields[1]), []).append(pid)
        if fields[0] in (b"Z", b"X"):
            zombies.add(pid)
    found: list[int] = []
    queue = [root]
    while queue:
        for pid in children.get(queue.pop(), ()):
            if pid not in without:
                queue.append(pid)
                if pid not in zombies:
                    found.append(pid)
    return found


def children(pid: int) -> list[int]:
    """Pids of the living children of a process."""
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    found: list[int] = []
    for task in tasks:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children") as file:
            found += map(int, file.read().split())
    return [child for child in found if is_alive(child)]


def is_alive(pid: int) -> bool:
    """Whether there is such a process, and it has not ended."""
    try:
        return stat_fields(pid)[0] not in (b"Z", b"X")
    except OSError:
        return False


def takes(pid: int, number: int) -> bool:
    """Whether a process handles or ignores a signal: otherwise the default action may end it."""
    try:
        with open(f"/proc/{pid}/status") as file:
            masks = dict(line.split(":", 1) for line in file if line.startswith(("SigIgn:", "SigCgt:")))
    except OSError:
        return False
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks.values())


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped the process. One that a debugger holds, or that has ended, is not."""
    try:
        return stat_fields(pid)[0] == b"T"
    except OSError:
        return False


def send(pids: Collection[int], signum: int) -> None:
    """Send a signal to each pid that still exists."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)


def reap() -> dict[int, int]:
    """Collect children that have ended, without waiting; wait status by pid."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = status


def kill_all(survivors: Callable[[], list[int]], *, limit_s: float = 2.0) -> list[int]:
    """SIGKILL until no process is left; a process in uninterruptible sleep may outlast the limit.

    Args:
        survivors: lists the processes that still live; called again after every round, as a process may fork meanwhile.
        limit_s: seconds before giving up.

    Returns:
        The pids that are still there.
    """
    end = time.monotonic() + limit_s
    while pids := survivors():
        send(pids, signal.SIGKILL)
        if time.monotonic() > end:
            return pids
        time.sleep(0.005)
    return []


def die_of(number: int) -> int:
    """Die of SIGINT as if there were no handler: a shell script or make around us then stops as well.

    Returns:
        The exit code for any other signal.
    """
    if number == signal.SIGINT:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    return 128 + number
