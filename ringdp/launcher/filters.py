"""Filters that turn the bytes of a rank's stream into the lines that the console shows."""

from __future__ import annotations

import re
from typing import Protocol

MAX_BLOCK_LINES = 60
"""Lines shown of one traceback; the log has the rest."""

MAX_IDLE = 40
"""Looks in a row that find nothing new after which a traceback that does not look complete is shown as it is."""

_TRACEBACK = re.compile(r"Traceback \(most recent call last\)|^Fatal Python error|^terminate called|^\s*what\(\):")
_UNFINISHED = re.compile(r"Traceback \(most recent call last\)|^During handling of the above|^The above exception was")
_ERROR = re.compile(
    r"\b(ERROR|CRITICAL|FATAL)\b"
    r"|^(\w+\.)*\w*(Error|Exception|Interrupt)(:|$)"
    r"|^\*\*\* |AddressSanitizer|ThreadSanitizer|Segmentation fault|std::bad_alloc|[Aa]ssertion .*failed"
)
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+")
_TORCHS_PREFIX = re.compile(r"^\[rank\d+\]: ?")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")


def plain(line: str) -> str:
    """A line without colours, of a progress bar only what was seen last, and without the ``[rank1]: `` that torch
    puts before each line of an uncaught exception once there is a process group."""
    return _TORCHS_PREFIX.sub("", _ESCAPES.sub("", line).rstrip("\r\n").rpartition("\r")[2])


class Filter(Protocol):
    """Turns a rank's bytes into lines for the console."""

    def feed(self, data: bytes) -> list[str]:
        """Lines to show now."""

    def idle(self) -> list[str]:
        """Lines to show when the stream is silent for a moment."""

    def finish(self) -> list[str]:
        """Lines to show when the stream has ended."""


class Splitter:
    """Splits bytes into lines of text, keeping what is not yet whole."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines that are whole now, without their ends."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def finish(self) -> list[str]:
        """The last line, where it has no end."""
        rest, self._rest = self._rest, b""
        return [rest.decode(errors="replace")] if rest else []


class AllLines:
    """Every line, with a prefix."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._splitter = Splitter()

    def feed(self, data: bytes) -> list[str]:
        return self._shown(self._splitter.feed(data))

    def idle(self) -> list[str]:
        return []

    def finish(self) -> list[str]:
        return self._shown(self._splitter.finish())

    def _shown(self, lines: list[str]) -> list[str]:
        # Of a progress bar only the last state is shown.
        return [self._prefix + line.rstrip("\r").rpartition("\r")[2] for line in lines]


class Shown:
    """Tracebacks that have been shown, over all ranks: when eight ranks fail alike, one stack is enough."""

    def __init__(self) -> None:
        self._first: dict[str, str] = {}

    def first(self, block: list[str], prefix: str) -> str | None:
        """The prefix of the rank that showed the same stack and type before, numbers aside; None if none did.

        Their messages may differ: the caller shows its own.
        """
        lines = (line if line[:1].isspace() else line.partition(":")[0] for line in block)
        first = self._first.setdefault(_VARYING.sub("#", "\n".join(lines)), prefix)
        return None if first == prefix else first

    def clear(self) -> None:
        """Forget, for a new attempt."""
        self._first.clear()


class Errors:
    """Tracebacks and lines that are errors, with a prefix.

    A traceback is held until it looks complete and its rank is silent for a moment, so that it can be compared with
    the others' as a whole. What follows its last line without a pause belongs to it: messages of several lines,
    the frames of C++, a second traceback.
    """

    def __init__(self, prefix: str, shown: Shown, log: str) -> None:
        """
        Args:
            prefix: stands before each line.
            shown: what was shown before, shared by all ranks.
            log: path of the whole stream.
        """
        self._prefix = prefix
        self._shown = shown
        self._log = log
        self._splitter = Splitter()
        self._block: list[str] = []
        self._idle = 0

    def feed(self, data: bytes) -> list[str]:
        lines: list[str] = []
        self._idle = 0
        for line in map(plain, self._splitter.feed(data)):
            if self._block or _TRACEBACK.search(line):
                self._block.append(line)
                if len(self._block) > 20 * MAX_BLOCK_LINES:  # it goes on and on: no need to hold it all
                    lines += self._close()
            elif _ERROR.search(line):
                lines.append(self._prefix + line)
        return lines

    def idle(self) -> list[str]:
        self._idle += 1
        return self._close() if self._complete() or self._idle > MAX_IDLE else []

    def finish(self) -> list[str]:
        return self.feed(b"\n") + self._close()

    def _complete(self) -> bool:
        last = next((line for line in reversed(self._block) if line.strip()), "")
        return not last[:1].isspace() and not _UNFINISHED.search(last)

    def _close(self) -> list[str]:
        block, self._block = self._block, []
        while block and not block[-1].strip():
            block.pop()
        if not block:
            return []
        first = self._shown.first(block, self._prefix)
        if first is not None:
            return [f"{self._prefix}the same as {first.strip()}: {block[-1]}"]
        if len(block) > MAX_BLOCK_LINES:
            half = MAX_BLOCK_LINES // 2
            left_out = len(block) - 2 * half
            block = [*block[:half], f"... {left_out} lines more in {self._log} ...", *block[-half:]]
        return [self._prefix + line for line in block]
