"""The lines of ringdp's log on a console: each begins with ``ringdp: ``, on a line of its own beside progress bars, and
takes at most two lines of the console."""

from __future__ import annotations

import logging
import sys
import textwrap

PREFIX = "ringdp: "
WIDTH = 2 * 128  # of a line: two lines of a console


def _pieces(line: str, width: int) -> list[str]:
    """Paths and addresses stay whole."""
    return textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False)


class ConsoleLog(logging.Handler):
    """Shows records on standard error where the program has no handler of its own for them, as logging's last resort
    would. Any thread.

    Attributes:
        rank: of this process, which lines of all but rank 0 name; None before it is known.
        detailed: lines have the time, the logger and the level, too.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.rank: int | None = None
        self.detailed = False
        self._details = logging.Formatter("%(asctime)s %(name)s %(levelname)s")

    def emit(self, record: logging.LogRecord) -> None:
        if self._shown_by_another(record.name):
            return
        try:
            _write(self.text_of(record))
        except Exception:
            self.handleError(record)

    def text_of(self, record: logging.LogRecord) -> str:
        """The lines that are shown."""
        details = f"{self._details.format(record)}: " if self.detailed else ""
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + self._details.formatException(record.exc_info)
        shown = []
        for line in message.splitlines():
            rank = f"rank {self.rank}: " if self.rank and not line.lower().startswith("rank ") else ""
            begin = f"{PREFIX}{details}{rank}"
            parts = [line] if len(begin + line) <= WIDTH else _pieces(line, WIDTH - len(begin))
            shown += [begin + part for part in parts]
        return "\n".join(shown)

    def _shown_by_another(self, name: str) -> bool:
        logger: logging.Logger | None = logging.getLogger(name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False


def _write(text: str) -> None:
    """On a fresh line: tqdm's bars are drawn again below it, and rich replaces sys.stderr while it draws one."""
    bars = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    if bars is not None and getattr(bars, "_instances", None):
        bars.write(text, file=sys.stderr)
    elif sys.stderr is not None:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
