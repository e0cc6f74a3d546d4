"""The protocol between the launcher on one host of several and the one that the user started: lines of JSON over its
three streams.

The user's launcher writes, the host's reads from its standard input: `Ask`, and when all hosts have answered, `Orders`;
then ``{}`` every few seconds, and the number of a signal: to stop by, or to pass on to the ranks. The host's launcher
answers on its standard error, in lines that begin with MARK: `Hello`, then ``{}`` every few seconds, too, and at the
end `End`. The end of its input, or silence, ends everything on the host; the silence of a host is a lost connection to
the user's launcher.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from typing import Any

MARK = "\x1e"
"""Begins a line for the user's launcher (ASCII's record separator, as in RFC 7464)."""

BEAT_S = 3.0
QUIET_S = 6.0
"""Seconds without output after which a host sends a beat, which may end a line that is not complete."""

SILENCE_S = 20.0
"""Seconds without a beat after which the connection counts as lost."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ask:
    """The question to a host before anything starts.

    Attributes:
        folder: the directory to work in.
        script: must be there; None for a module or a command.
    """

    folder: str
    script: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hello:
    """A host's answer.

    Attributes:
        problem: the reason for which it cannot take part; None if it can.
        host: its own name.
        versions: of what must be the same on all hosts, by name.
        address, seen: its own address and that of the user's launcher, as sshd sees them; empty without ssh.
        port: free here now.
    """

    problem: str | None
    host: str
    versions: dict[str, str]
    address: str
    seen: str
    port: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reached:
    """A host's answer to ``{"listen": port}`` (it listens there), or to ``{"reach": [address, port]}``.

    Attributes:
        why: it cannot connect; empty where it can.
    """

    why: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Orders:
    """The orders for the host's launcher.

    Attributes:
        arguments: its command line.
        environ: variables to set.
        secret: the job's, in hexadecimal digits.
    """

    arguments: list[str]
    environ: dict[str, str]
    secret: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class End:
    """How the run ended on the host.

    Attributes:
        lines: its last lines for the user.
        logs: the folder with its logs; empty where none are kept.
        blame: of its first failure (`failure.Blame`); None without one.
        when_s: of its first failure, seconds since the epoch by its own clock.
        steps: of its first rank, which ended well; None where that is not known.
        lost: ranks without which the others have gone on, and how they ended.
    """

    lines: tuple[str, ...]
    logs: str
    blame: int | None
    when_s: float
    steps: int | None = None
    lost: tuple[str, ...] = ()


def line(content: Any) -> bytes:
    """One line for the other side."""
    fields = dataclasses.asdict(content) if dataclasses.is_dataclass(content) else content  # type: ignore[arg-type]
    return json.dumps(fields).encode() + b"\n"


class Tether:
    """The host's end, once it has its orders. Used by the supervisor's main thread."""

    def __init__(self, descriptor: int, rest: bytes) -> None:
        """
        Args:
            descriptor: reads what the user's launcher writes; does not block.
            rest: what was read of it before.
        """
        self.descriptor = descriptor
        self._rest = rest
        self._last = self._beat = time.monotonic()
        self._ended = False
        self.passed_on: list[int] = []
        """Signals for the ranks that have been read."""

    def read(self) -> int | None:
        """The signal by which to stop; None while the run goes on."""
        try:
            data = os.read(self.descriptor, 65536)
        except BlockingIOError:
            if time.monotonic() - self._last < SILENCE_S:
                return None
            data = b""
        if not data:
            ended, self._ended = self._ended, True
            return None if ended else signal.SIGTERM
        self._last = time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        contents = [json.loads(one) for one in lines if one.strip()]
        self.passed_on += [int(content["pass_on"]) for content in contents if "pass_on" in content]
        numbers = [content.get("signal") for content in contents]
        return next((int(number) for number in numbers if number), None)

    def beat_due(self, wrote_s: float) -> bool:
        """Whether a beat to the user's launcher is due; if so, the next interval begins.

        Args:
            wrote_s: when something was last written to it, which counts as a beat.
        """
        due = time.monotonic() - max(self._beat, wrote_s) > QUIET_S
        if due:
            self._beat = time.monotonic()
        return due

    @property
    def lost(self) -> bool:
        """Whether the user's launcher is gone."""
        return self._ended
