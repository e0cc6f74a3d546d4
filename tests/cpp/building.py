"""How the C++ tests are built: by make, one at a time."""

from __future__ import annotations

import fcntl
import os
import shlex
import subprocess
import sys
from pathlib import Path

from tests.helpers import need_command

HERE = Path(__file__).resolve().parent
BUILD = HERE.parents[1] / "build" / "cpp"
COMPILER = shlex.split(os.environ.get("CXX") or "c++")
RUN_TIME_OPTIONS = {
    "ASAN_OPTIONS": "detect_stack_use_after_return=1:strict_string_checks=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "second_deadlock_stack=1:history_size=4",
}


def environment() -> dict[str, str]:
    """Ours without what an outer make sets: its job server is not handed on."""
    outer = {"MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES"}
    kept = {name: value for name, value in os.environ.items() if name not in outer}
    return kept | {"CXX": shlex.join(COMPILER), "PYTHON": sys.executable} | RUN_TIME_OPTIONS


def run(
    command: list[str], *, timeout_s: float = 1200, variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=HERE,
        env=environment() | (variables or {}),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def make(*goals: str) -> subprocess.CompletedProcess[str]:
    """Build what is older than its sources. One at a time, also between test runs, and other tests go first."""
    make_program = need_command("make", "make")
    BUILD.mkdir(parents=True, exist_ok=True)
    with open(BUILD / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        jobs = len(os.sched_getaffinity(0))
        return run(["nice", make_program, "--keep-going", "--no-print-directory", f"-j{jobs}", *goals])
