"""Shared set-up of the tests: every test has a time limit."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

import pytest

from tests import tiers

Result = TypeVar("Result")

DEFAULT_TIMEOUT_S = 120.0
# A call that never returns to Python does not see the alarm: then the whole run ends, after this much more.
GRACE_S = 15.0


def pytest_configure(config: pytest.Config) -> None:
    """Let the tests and what they start hear Ctrl-C: a shell makes its background jobs ignore it."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # pytest-xdist would begin with the files that have most tests
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        tiers.mark(item)
    items.sort(key=tiers.place)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Processes side by side must collect the same names, so no id may hold an address."""
    if " object at 0x" in item.nodeid:
        raise pytest.UsageError(
            f"{item.nodeid}: give the test ids without addresses (tests.train.compressed.compressor_id)"
        )


def limit_of(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker else DEFAULT_TIMEOUT_S


def real_stderr(config: pytest.Config) -> int:
    """Standard error as it was before pytest captured it, so that the stacks are seen when the run ends here."""
    from _pytest.faulthandler import fault_handler_stderr_fd_key

    return config.stash.get(fault_handler_stderr_fd_key, sys.__stderr__.fileno() if sys.__stderr__ else 2)


@contextmanager
def alarm(item: pytest.Item) -> Iterator[None]:
    """Fail what runs inside after the test's limit, with the stacks of all threads."""
    limit_s = limit_of(item)
    owner = os.getpid()

    def on_alarm(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a forked child inherits the handler, not the limit
            return
        faulthandler.dump_traceback(all_threads=True)
        pytest.fail(f"took longer than {limit_s:g} s")

    previous = signal.signal(signal.SIGALRM, on_alarm)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Result, Result]:
    with alarm(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Result, Result]:
    with alarm(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, Result, Result]:
    with alarm(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Result, Result]:
    faulthandler.dump_traceback_later(3 * limit_of(item) + GRACE_S, exit=True, file=real_stderr(item.config))
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
