"""The user's stdout and stderr: writes the output of all ranks without breaking lines of others."""

from __future__ import annotations

import os
import time

from ringdp.launcher.views import Stream

_FD: dict[Stream, int] = {"stdout": 1, "stderr": 2}


class Console:
    """Writes to descriptors 1 and 2. One thread uses it.

    A raw stream may stop in the middle of a line (a progress bar); a line of ours then starts on a new one. Where
    both descriptors are the same terminal or file they share that knowledge.
    """

    def __init__(self) -> None:
        self._gone: set[Stream] = set()
        self.wrote_s = 0.0  # of time.monotonic()
        self._place: dict[Stream, str] = {"stdout": "stdout", "stderr": "stderr"}
        try:
            one, two = os.fstat(1), os.fstat(2)
            if (one.st_dev, one.st_ino) == (two.st_dev, two.st_ino):
                self._place["stderr"] = "stdout"
        except OSError:  # our parent has closed it; the first write fails
            pass
        self._mid_line = {"stdout": False, "stderr": False}

    def is_terminal(self, stream: Stream) -> bool:
        """Whether this stream is a terminal."""
        try:
            return os.isatty(_FD[stream])
        except OSError:
            return False

    def one_place(self) -> bool:
        """Whether stdout and stderr are the same terminal or file."""
        return self._place["stdout"] == self._place["stderr"]

    def raw(self, stream: Stream, data: bytes) -> None:
        """Write bytes as they are."""
        if data:
            self._write(stream, data)
            self._mid_line[self._place[stream]] = not data.endswith(b"\n")

    def lines(self, stream: Stream, lines: list[str]) -> None:
        """Write whole lines."""
        if not lines:
            return
        place = self._place[stream]
        start = "\n" if self._mid_line[place] else ""
        self._write(stream, (start + "\n".join(lines) + "\n").encode(errors="replace"))
        self._mid_line[place] = False

    def _write(self, stream: Stream, data: bytes) -> None:
        self.wrote_s = time.monotonic()
        while data and stream not in self._gone:
            try:
                data = data[os.write(_FD[stream], data) :]
            except BlockingIOError:
                # Another process made the terminal, which it shares with us, non-blocking.
                os.set_blocking(_FD[stream], True)
            except OSError:
                # A closed pipe or terminal: the ranks go on, and the logs have everything.
                self._gone.add(stream)
