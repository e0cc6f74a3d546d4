"""Threads beside the program's, which use groups: how they start, and when they end."""

from __future__ import annotations

import atexit
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


def end_before_groups(end: Callable[[], None]) -> None:
    """Have `end` called when the process ends, before its groups end: those register when they are made."""
    atexit.unregister(end)
    atexit.register(end)  # the last one is called first
