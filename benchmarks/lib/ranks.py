"""Starting one process per rank, passing on what they print, and leaving none behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
TAIL_LINES = 30
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded here: little may be done between fork and exec


class Unavailable(RuntimeError):
    """What was asked for cannot be measured here; the message says why and what to do."""


class Failed(RuntimeError):
    """Measuring went wrong, or a result is wrong and its times would mean nothing."""


class RanksFailed(Failed):
    """A rank ended badly or not in time; the message has the exit code and the rank's last lines."""


@dataclass(frozen=True)
class Command:
    """One process to start: its words, its whole environment, and what to call it in messages."""

    words: Sequence[str]
    env: Mapping[str, str]
    label: str


def start(words: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """A process in a session of its own, which Ctrl-C does not reach, for the caller to end with `stop_all`.

    The kernel ends it if this thread ends first, however that happens. Its own children end with it if they are
    started like this, too. `options` are those of Popen.
    """
    parent = os.getpid()

    def end_with_the_parent() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it has ended already
            os._exit(1)

    return subprocess.Popen(list(words), start_new_session=True, preexec_fn=end_with_the_parent, **options)


@dataclass
class _Running:
    command: Command
    process: subprocess.Popen[str]
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    pump: threading.Thread | None = None

    def read(self, echo: Callable[[str, str], None]) -> None:
        stream = self.process.stdout
        assert stream is not None
        with stream:
            for line in stream:
                self.tail.append(line)
                echo(self.command.label, line)


def run_commands(
    commands: Sequence[Command], *, timeout_s: float, echo: Callable[[str, str], None], grace_s: float = 5.0
) -> None:
    """Start all commands, wait for all of them, and leave no process whatever happens.

    `echo(label, line)` gets each line of output, from a thread per process. When one fails the others have `grace_s`
    to say why they failed too, then they are killed. Raises RanksFailed naming the first that failed.
    """
    running: list[_Running] = []
    try:
        for command in commands:
            process = start(
                command.words,
                env=dict(command.env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            one = _Running(command, process)
            one.pump = threading.Thread(target=one.read, args=(echo,), daemon=True)
            one.pump.start()
            running.append(one)
        _wait(running, timeout_s, grace_s)
    finally:
        stop_all([one.process for one in running])
        for one in running:
            if one.pump is not None:
                one.pump.join(2.0)


def _wait(running: Sequence[_Running], timeout_s: float, grace_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    first_failed: _Running | None = None
    while True:
        codes = [one.process.poll() for one in running]
        if first_failed is None:
            first_failed = next((one for one, code in zip(running, codes, strict=True) if code), None)
            if first_failed is not None:
                deadline = min(deadline, time.monotonic() + grace_s)
        if all(code is not None for code in codes) or (first_failed and time.monotonic() > deadline):
            break
        if time.monotonic() > deadline:
            late = ", ".join(one.command.label for one, code in zip(running, codes, strict=True) if code is None)
            raise RanksFailed(f"not finished after {timeout_s:.0f} s: {late}")
        time.sleep(0.02)
    if first_failed is not None:
        if first_failed.pump is not None:
            first_failed.pump.join(2.0)
        lines = "".join(first_failed.tail).rstrip()
        raise RanksFailed(
            f"{first_failed.command.label} {_ended(first_failed.process.returncode)}; it said last:\n{lines}"
        )


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was ended by signal {-code} ({signal.strsignal(-code)})"


def stop_all(processes: Sequence[subprocess.Popen[Any]], *, patience_s: float = 2.0) -> None:
    """End each process and its session: asked first (mpirun then ends its ranks), killed after `patience_s`."""
    alive = [process for process in processes if process.poll() is None]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in alive:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        deadline = time.monotonic() + patience_s
        for process in alive:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        alive = [process for process in alive if process.poll() is None]


def torchrun_env(*, rank: int, world_size: int, address: str, port: int, per_host: int | None = None) -> dict[str, str]:
    """The variables `torchrun` would set for this rank, of `per_host` on each host, or of one host."""
    per_host = per_host or world_size
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % per_host),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(per_host),
        "GROUP_RANK": str(rank // per_host),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def compiler() -> str | None:
    """Of C++: what CXX names, or g++, or c++."""
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")


def compile_program(sources: Sequence[Path], made: Path, *flags: str) -> None:
    """`made` from C++ sources, at once or not at all. Raises Unavailable."""
    if (found := compiler()) is None:
        raise Unavailable("no C++ compiler: install g++, or name one in CXX")
    made.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = made.with_suffix(f".{os.getpid()}")
    words = [found, "-std=c++20", *flags, "-o", str(new), *map(str, sources)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unavailable(f"{found} cannot compile {sources[0].name}: {done.stderr.strip()[-400:]}")
    new.rename(made)


def threads_per_rank(world_size: int) -> int:
    """Threads a rank may compute with when all of them share this machine's cores, as our launcher sets them."""
    return max(1, (os.cpu_count() or 1) // world_size)


@contextlib.contextmanager
def signals_unwind() -> Iterator[None]:
    """Make SIGTERM and SIGHUP unwind the stack like Ctrl-C does, so that `finally` cleans up."""

    def leave(number: int, _frame: object) -> NoReturn:
        sys.exit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def signals_later() -> Iterator[None]:
    """Hold Ctrl-C and its like back until the end, for what must not be left half done; for the main thread."""
    held: list[int] = []

    def remember(number: int, _frame: object) -> None:
        held.append(number)

    # Not a signal mask: the kernel would hand the signal to another thread, and Python to this one all the same.
    before = {number: signal.signal(number, remember) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for late in held[:1]:
            signal.raise_signal(late)
