"""What test files share."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest


def need(module: str, package: str | None = None) -> ModuleType:
    """Import a module that may be missing, or skip the test (at file level: the file) and say what to install.

    Args:
        module: what to import, for example ``sklearn.datasets``.
        package: its name for pip, where it differs from the module's.
    """
    name = package or module.split(".")[0]
    found: ModuleType = pytest.importorskip(module, reason=f"{name} is not installed (pip install {name})")
    return found


def need_command(command: str, package: str) -> str:
    """The path of a program, or skip the test and name the Debian package that has it."""
    path = shutil.which(command)
    if path is None:
        pytest.skip(f"{command} is not installed (apt-get install {package})")
    return path


def need_entry_points() -> None:
    """Skip where ringdp is run from its checkout without being installed, so that torch cannot find it by itself."""
    if not any(point.name == "ringdp" for point in importlib.metadata.entry_points(group="torch.backends")):
        pytest.skip("ringdp is not installed (pip install --no-build-isolation -e .)")


def checkout_files(root: Path) -> list[str]:
    """The files of a checkout, new ones included, without what git ignores; skips the test where there is no git."""
    command = ["git", "ls-files", "-coz", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("needs a git checkout")
    return [name for name in listed.stdout.split("\0") if name and (root / name).is_file()]


def free_port() -> int:
    """One of the loopback address that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def logged(name: str, level: int | None = None) -> Iterator[list[str]]:
    """What the logger of this name says meanwhile; from that level on, or from the level that it has."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger(name)
    before = log.level
    log.addHandler(handler)
    if level is not None:
        log.setLevel(level)
    try:
        yield lines
    finally:
        log.removeHandler(handler)
        log.setLevel(before)
