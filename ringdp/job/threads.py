"""Threads beside the program's, which use groups: how they start, and when they end."""

from __future__ import annotations

import atexit
import contextlib
import threading
from collections.abc import Callable

from ringdp.errors import SystemResourceError


def start_thread(thread: threading.Thread, purpose: str, *, rank: int | None = None) -> None:
    """Start it. `purpose`: what no thread can be started for, as the beginning of a sentence.

    Raises:
        SystemResourceError: this process may not start another thread.
    """
    try:
        thread.start()
    except RuntimeError as error:
        raise SystemResourceError(
            f"{purpose} ({error}): raise the limit of processes and threads (ulimit -u, the cgroup's pids.max)",
            rank=rank,
        ) from error


_ends: dict[Callable[[], None], None] = {}


def end_before_groups(end: Callable[[], None]) -> None:
    """Have `end` called when the process ends or leaves its job, before its groups end: those register when they are
    made."""
    _ends.pop(end, None)
    _ends[end] = None
    atexit.unregister(end)
    atexit.register(end)  # the last one is called first


def end_all() -> None:
    """What the end of the process would call. Raises what one of them raises, after the others."""
    with contextlib.ExitStack() as stack:
        while _ends:
            end = next(iter(_ends))
            del _ends[end]
            atexit.unregister(end)
            stack.callback(end)
