"""A command that ends when this host is about to be taken away (``--notice-cmd``): its ranks leave then."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Collection

from ringdp.launcher import processes


class Notice:
    """Waits for the command beside the ranks. Used by the agent's loop alone.

    Args:
        command: for a shell; exit code 0 is the notice, and another one is told once and says nothing.
        say: is given lines for the user.
    """

    def __init__(self, command: str, say: Callable[[str], None]) -> None:
        self._command, self._say = command, say
        self._process: subprocess.Popen[bytes] | None = None
        self._done = False

    def look(self, pids: Collection[int]) -> None:
        """Send SIGTERM to these ranks if the command has ended well. Starts it the first time."""
        if self._done:
            return
        if self._process is None:
            self._process = subprocess.Popen(self._command, shell=True, stdin=subprocess.DEVNULL)
        code = self._process.poll()
        if code is None:
            return
        self._done = True
        if code != 0:
            self._say(f"--notice-cmd has ended with exit code {code}: no notice will come from it")
            return
        self._say("--notice-cmd has ended: this host's ranks leave the job")
        processes.send(pids, signal.SIGTERM)

    def end(self) -> None:
        """The ranks have ended."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
