"""The sources of a rank's stream for the supervisor: its log file, or a pseudo-terminal whose log it writes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import termios
import time
import tty
from typing import Protocol

_READ_BYTES = 1 << 20


class Source(Protocol):
    """A rank's stream."""

    def read(self) -> bytes:
        """The bytes since the last call; empty for none. Does not wait."""

    def finish(self) -> bytes:
        """The rest when all writers have ended."""


class LogFile:
    """A log file that a rank writes, followed as it grows. The file need not be there yet."""

    def __init__(self, path: str, *, start: int = 0) -> None:
        """
        Args:
            start: what stands before this byte is not read.
        """
        self._path = path
        self._start = start
        self._descriptor: int | None = None

    def read(self) -> bytes:
        if self._descriptor is None:
            try:
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return b""
            os.lseek(self._descriptor, self._start, os.SEEK_SET)
        return os.read(self._descriptor, _READ_BYTES)

    def finish(self) -> bytes:
        data = bytearray()
        while part := self.read():
            data += part
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        return bytes(data)


class Terminal:
    """A pseudo-terminal for a rank whose output is shown as it comes on a terminal.

    The rank sees a terminal of the same size, so that progress bars and colours are what they are without a
    launcher. All output is also written to the log.
    """

    def __init__(self, shown_on: int) -> None:
        """
        Args:
            shown_on: descriptor of the real terminal.
        """
        self._shown_on = shown_on
        self._master, self._slave = os.openpty()
        # No newline translation here: the real terminal does that, and the log is to have plain newlines.
        tty.setraw(self._slave)
        os.set_blocking(self._master, False)
        self._log: int | None = None
        self.path: str = os.ttyname(self._slave)
        self.resize()

    @property
    def descriptor(self) -> int:
        """A descriptor that is readable when output has come."""
        return self._master

    def log_to(self, path: str) -> None:
        """Write new output to this file from now on."""
        if self._log is not None:
            os.close(self._log)
        self._log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def resize(self) -> None:
        """Take over the size of the real terminal."""
        with contextlib.suppress(OSError):
            size = fcntl.ioctl(self._shown_on, termios.TIOCGWINSZ, bytes(8))
            fcntl.ioctl(self._slave, termios.TIOCSWINSZ, size)

    def read(self) -> bytes:
        try:
            return self._read_logged()
        except OSError:  # no output (EAGAIN), or all writers have ended (EIO)
            return b""

    def finish(self) -> bytes:
        # With our own end of the rank's side closed, reading ends with EIO once everything has been read. A process
        # that detached from the job may hold that side for ever: then the time ends it.
        os.close(self._slave)
        end = time.monotonic() + 0.3
        data = bytearray()
        while time.monotonic() < end:
            try:
                part = self._read_logged()
            except BlockingIOError:
                time.sleep(0.005)
                continue
            except OSError:
                break
            data += part
        os.close(self._master)
        if self._log is not None:
            os.close(self._log)
            self._log = None
        return bytes(data)

    def _read_logged(self) -> bytes:
        data = os.read(self._master, _READ_BYTES)
        rest = data
        while rest and self._log is not None:
            try:
                rest = rest[os.write(self._log, rest) :]
            except OSError:  # no space left: the console and the rank go on
                os.close(self._log)
                self._log = None
        return data
