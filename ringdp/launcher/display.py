"""The ranks' output on the console: the source and the filter of each stream."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from ringdp.config import FIRST_MARK
from ringdp.launcher.console import Console
from ringdp.launcher.filters import AllLines, Errors, Filter, Shown
from ringdp.launcher.logs import RankLogs
from ringdp.launcher.messages import Started
from ringdp.launcher.sources import LogFile, Source, Terminal
from ringdp.launcher.views import STREAMS, Mode, Stream, View, Views, rank_prefix


@dataclasses.dataclass(kw_only=True)
class _Feed:
    """One stream of one rank on its way to the console.

    Attributes:
        rank: its rank, as it was at the start.
        source: the log file or pseudo-terminal that it is read from.
        stream: the console's stream that it is written to.
        filter: turns it into lines; without one it is shown as it is.
        noted: of what is shown as it is, takes note of the tracebacks, so that the same ones of other ranks are short.
    """

    rank: int
    source: Source
    stream: Stream
    filter: Filter | None = None
    noted: Errors | None = None


FIRST_PERIOD_S = 0.1
"""Between two looks whether a process of an elastic job has become rank 0."""


class Display:
    """Shows the output of this host's ranks. Used by the supervisor's main thread."""

    def __init__(self, console: Console, views: Views) -> None:
        self._console = console
        self._views = views
        self._feeds: list[_Feed] = []
        self._terminals: dict[Stream, Terminal] = {}
        self._shown = Shown()
        self._stopping = False
        self._others: list[RankLogs] = []  # that may become rank 0
        self._looked_s = 0.0

    def open_terminals(self) -> dict[Stream, str]:
        """Make a pseudo-terminal for each of our streams that is a terminal; their paths.

        Where both are the same terminal there is one: what a rank writes to its two streams keeps its order.
        """
        for number, stream in enumerate(STREAMS, start=1):
            if stream == "stderr" and "stdout" in self._terminals and self._console.one_place():
                self._terminals["stderr"] = self._terminals["stdout"]
            elif self._console.is_terminal(stream):
                self._terminals[stream] = Terminal(shown_on=number)
        return {stream: terminal.path for stream, terminal in self._terminals.items()}

    @property
    def descriptors(self) -> list[int]:
        """Readable when there is something to show; log files are always readable and not among them."""
        return [terminal.descriptor for terminal in set(self._terminals.values())]

    def start_attempt(self, started: Started, *, elastic: bool = False) -> None:
        """Show the ranks of an attempt from now on.

        Args:
            elastic: when rank 0 is lost another process becomes rank 0.
        """
        self._finish_feeds()
        self._shown.clear()
        follows = elastic and self._views.follow_rank_0
        self._others = [rank for rank in started.ranks if rank.rank != 0] if follows else []
        for rank in started.ranks:
            for stream in STREAMS:
                view = self._views.of(
                    rank=rank.rank, local_rank=rank.local_rank, local_world_size=len(started.ranks), stream=stream
                )
                self._add_feed(rank, stream, view)

    def replaced(self, rank: RankLogs, ranks: int) -> None:
        """Show another process in the place of one of so many ranks: as one that is not rank 0, before it is."""
        for feed in [feed for feed in self._feeds if feed.rank == rank.rank]:
            if isinstance(feed.source, LogFile):
                self._take(feed, feed.source.finish(), ended=True)
                self._feeds.remove(feed)
        self._others = [one for one in self._others if one.rank != rank.rank]
        if self._views.follow_rank_0:
            self._others.append(rank)
        for stream in STREAMS:
            view = self._views.of(rank=rank.rank, local_rank=rank.local_rank, local_world_size=ranks, stream=stream)
            if view.mode is Mode.RAW and self._views.follow_rank_0:
                view = View(mode=Mode.HIDDEN)
            self._add_feed(rank, stream, view)

    def _add_feed(self, rank: RankLogs, stream: Stream, view: View) -> None:
        log = rank.stdout if stream == "stdout" else rank.stderr
        if view.mode is Mode.HIDDEN or (stream == "stderr" and rank.one_terminal):
            return
        feed = _Feed(rank=rank.rank, source=self._source(rank, stream, log), stream=stream)
        if view.mode is Mode.RAW and (stream == "stderr" or rank.one_terminal):
            feed.noted = Errors(rank_prefix(rank.rank), self._shown, log)
        elif view.mode is Mode.LINES:
            feed.filter = AllLines(view.prefix)
        elif view.mode is Mode.ERRORS:
            feed.filter = Errors(view.prefix, self._shown, log)
        self._feeds.append(feed)

    def show(self) -> None:
        """Show new output."""
        if self._others and time.monotonic() - self._looked_s >= FIRST_PERIOD_S:
            self._looked_s = time.monotonic()
            self._follow_rank_0()
        for feed in self._feeds:
            self._take(feed, feed.source.read(), ended=False)

    def stopping(self) -> None:
        """Called after Ctrl-C: every rank ends with the same traceback, which then goes to the logs alone."""
        self._stopping = True

    def resize(self) -> None:
        """Called when the real terminal has another size."""
        for terminal in set(self._terminals.values()):
            terminal.resize()

    def finish(self) -> None:
        """Show the rest; the ranks have ended."""
        self._follow_rank_0()
        self._finish_feeds()
        for terminal, stream in {terminal: stream for stream, terminal in self._terminals.items()}.items():
            self._console.raw(stream, terminal.finish())

    def _follow_rank_0(self) -> None:
        """Show the output that a process writes after it has become rank 0."""
        for rank in list(self._others):
            try:
                sizes = Path(rank.report_file).with_name(FIRST_MARK).read_text().split()
            except OSError:
                continue
            self._others.remove(rank)
            for feed in [feed for feed in self._feeds if feed.rank == rank.rank]:
                self._take(feed, b"", ended=True)
                self._feeds.remove(feed)
            self._console.lines(
                "stderr", [f"ringrun: rank {rank.rank} is rank 0 from now on, and the console shows its output"]
            )
            for stream, log, size in zip(STREAMS, (rank.stdout, rank.stderr), sizes, strict=True):
                noted = Errors(rank_prefix(rank.rank), self._shown, log) if stream == "stderr" else None
                source = LogFile(log, start=int(size))
                self._feeds.append(_Feed(rank=rank.rank, source=source, stream=stream, noted=noted))

    def _source(self, rank: RankLogs, stream: Stream, log: str) -> Source:
        if stream in rank.terminals:
            self._terminals[stream].log_to(log)
            return self._terminals[stream]
        return LogFile(log)

    def _finish_feeds(self) -> None:
        for feed in self._feeds:
            if isinstance(feed.source, Terminal):  # outlives the attempt
                while data := feed.source.read():
                    self._take(feed, data, ended=False)
                self._take(feed, b"", ended=True)
                continue
            self._take(feed, feed.source.finish(), ended=True)
        self._feeds.clear()

    def _take(self, feed: _Feed, data: bytes, *, ended: bool) -> None:
        if feed.filter is None:
            self._console.raw(feed.stream, data)
        for filter_ in (feed.filter, feed.noted):
            if filter_ is None:
                continue
            if ended:
                lines = filter_.feed(data) + filter_.finish()
            else:
                lines = filter_.feed(data) if data else filter_.idle()
            if filter_ is feed.filter:
                self._lines(feed, lines)

    def _lines(self, feed: _Feed, lines: list[str]) -> None:
        if not (self._stopping and isinstance(feed.filter, Errors)):
            self._console.lines(feed.stream, lines)
