"""The compiler works for the C++ tests while the others run, at the lowest priority, and they come last: most of the
others wait rather than compute."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cpp.building import start_building

HERE = Path(__file__).resolve().parent
MANY = 100  # other tests: with fewer there is nothing to be gained

_compiling: list[subprocess.Popen[bytes]] = []


def is_cpp(item: pytest.Item) -> bool:
    return HERE in item.path.parents


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=is_cpp)


def pytest_collection_finish(session: pytest.Session) -> None:
    cpp = [item for item in session.items if is_cpp(item)]
    if cpp and len(session.items) - len(cpp) > MANY and not session.config.option.collectonly:
        process = start_building("asan", "tsan")
        _compiling.extend([process] if process else [])


def pytest_sessionfinish() -> None:
    for process in _compiling:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
