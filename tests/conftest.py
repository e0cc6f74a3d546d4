"""Shared set-up of the tests: every test has a time limit."""

from __future__ import annotations

import faulthandler
import os
import signal
from collections.abc import Generator
from types import FrameType

import pytest

DEFAULT_TIMEOUT_S = 120.0
# A call that never returns to Python does not see the alarm: then the whole run ends, after this much more.
GRACE_S = 15.0


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test that takes longer than its `timeout` marker says, with the stacks of all threads."""
    marker = item.get_closest_marker("timeout")
    limit_s = float(marker.args[0]) if marker else DEFAULT_TIMEOUT_S
    owner = os.getpid()

    def on_alarm(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a forked child inherits the handler, not the limit
            return
        faulthandler.dump_traceback(all_threads=True)
        pytest.fail(f"{item.nodeid} took longer than {limit_s:g} s")

    previous = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    faulthandler.dump_traceback_later(limit_s + GRACE_S, exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
