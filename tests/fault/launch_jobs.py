"""Runs of the launcher for its tests: each has a mark in its environment by which all its processes are found."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from tests import warm_ranks
from tests.forked import Forked

ROOT = Path(__file__).parents[2]
LAUNCH = (sys.executable, str(ROOT / "launch.py"))
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
MARK = "LAUNCH_TEST_MARK"


def wait_until(condition: Callable[[], bool], what: str, limit_s: float = 30.0) -> None:
    """Ask again until the condition holds."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, f"waited {limit_s:g} s for: {what}"
        time.sleep(0.005)


def unbroken(console: str) -> str:
    """Lines of ringdp's log as one: the console breaks long ones in two, where depends on paths and pids."""
    return re.sub(r"\n(?:\[rank \d+\] )?ringdp: ", " ", console)


def script(folder: Path, text: str, name: str = "script.py") -> Path:
    """Write a script that the ranks run."""
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


class Job:
    """A launcher and everything it starts."""

    def __init__(
        self,
        folder: Path,
        *arguments: str | Path,
        command: Sequence[str] | None = None,
        environ: dict[str, str] | None = None,
        stdio: int | None = None,
    ) -> None:
        """
        Args:
            folder: current directory of the run; its output goes there too.
            arguments: the launcher's.
            command: the launcher; None is ours, in a process that has imported torch already, which saves seconds.
            environ: variables to set; an empty one is taken out.
            stdio: with a command, descriptor for stdin, stdout and stderr, a terminal; files in ``folder`` without.
        """
        self.folder = folder
        self.mark = uuid.uuid4().hex
        variables = {**os.environ, MARK: self.mark, **(environ or {})}
        variables = {name: value for name, value in variables.items() if value}
        words = list(map(str, arguments))
        self.out_path, self.err_path = folder / "out.txt", folder / "err.txt"
        self.process: subprocess.Popen[bytes] | Forked
        with open(self.out_path, "wb") as out, open(self.err_path, "wb") as err:
            if command is None:
                launch = "tests.fault.launch_jobs:_launch"
                self.process = Forked(
                    launch, str(folder), self.mark, words, environ=variables, output=out, descriptors=[err.fileno()]
                )
                return
            self.process = subprocess.Popen(
                [*command, *words],
                cwd=folder,
                env=variables,
                stdin=subprocess.DEVNULL if stdio is None else stdio,
                stdout=out if stdio is None else stdio,
                stderr=err if stdio is None else stdio,
                start_new_session=True,
            )

    def wait(self, limit_s: float = 40.0) -> int:
        """The exit code, or minus the signal that ended the launcher."""
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"the launcher did not end; stderr:\n{self.err}") from None

    def seconds_to_end(self, limit_s: float = 40.0) -> float:
        """Wait for the launcher; how long that took."""
        start = time.monotonic()
        self.wait(limit_s)
        return time.monotonic() - start

    @property
    def out(self) -> str:
        return self.out_path.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self.err_path.read_text(errors="replace")

    def processes(self) -> list[int]:
        """All living processes of this run, whoever their parent is."""
        wanted = f"{MARK}={self.mark}".encode()
        found = []
        for entry in os.listdir("/proc"):
            if not entry.isdigit():
                continue
            with contextlib.suppress(OSError):
                process = Path("/proc", entry)
                if wanted in (process / "environ").read_bytes().split(b"\0") or self._is_forked(process):
                    found.append(int(entry))
        return found

    def _is_forked(self, process: Path) -> bool:
        """The environment of these is not to be seen from outside. One that has ended has none, but still a name."""
        name = (process / "comm").read_text().strip()
        return name == self.mark[:15] and bool((process / "environ").read_bytes())

    def agent(self) -> int:
        """The pid of the launcher's child."""
        path = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        wait_until(lambda: bool(path.read_text().split()), "the launcher's agent")
        return int(path.read_text().split()[0])

    def run_folder(self) -> Path:
        """The one folder under logs/."""
        (folder,) = (self.folder / "logs").iterdir()
        return folder

    def kill(self) -> None:
        """End what is left, after a test that failed."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


# In the process of a launcher that was forked.


def _launch(error: int, folder: str, mark: str, arguments: Sequence[str]) -> None:
    """As `launch.py` in that folder. It and its agent have the mark as their name; the ranks have it as a variable."""
    warm_ranks.name_process(mark[:15])
    os.dup2(error, 2)
    os.close(error)
    os.setsid()
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    from ringdp.launcher.__main__ import main

    warm_ranks.install(mark[:15])
    sys.exit(main(list(arguments)))
