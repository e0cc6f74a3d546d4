"""The rank that failed first, and its cause: from exit codes, error files and the ends of the logs."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import re
import signal
from pathlib import Path

from ringdp import stories
from ringdp.launcher import disks
from ringdp.launcher.filters import plain
from ringdp.launcher.logs import RankLogs
from ringdp.launcher.messages import RankFailure

MAX_TAIL_LINES = 8
_TAIL_BYTES = 1 << 16
_HEADER = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"(?P<type>[A-Za-z_][\w.]*)(?:: (?P<text>.*))?")
_NAMED_LIKE_ONE = re.compile(r"(\w+\.)*\w*(Error|Exception|Interrupt|Exit)(: |$)")
_WHAT = re.compile(r"\s*what\(\):\s*(?P<text>.+)")

# The errors of a rank that has lost another one: never the cause as long as there is any other failure.
_CONSEQUENCES = re.compile(
    r"PeerLostError|MembershipChanged|ExpelledError|ConnectionResetError|BrokenPipeError|DistBackendError|DistStoreError"
    r"|Connection (closed|reset) by (remote )?peer|Broken pipe|remote process exited"
)

_STOPPED = (-signal.SIGTERM, 128 + signal.SIGTERM)
_LOST = re.compile(r"lost rank (\d+)\b")
_LEFT = re.compile(r"it left the job: ([^;]*)")
_DURING = re.compile(r"during (\w+ .*?)(?:, waiting for|: Connection closed)")
_LEFT_FIRST = "but had left the job before, as the other ranks reported"


class Blame(enum.IntEnum):
    """How likely a failure is the cause of the others; the lowest first."""

    CAUSE = 0
    CAUSE_STOPPED = 1  # it had raised, and was still ending when it was stopped because others had noticed
    CONSEQUENCE = 2
    STOPPED_BY_US = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class FailureReport:
    """A failed rank: how it ended, its last output, and whether it is to blame.

    Attributes:
        failure: its end, as torch's agent saw it.
        logs: the files with its output.
        exception: its last exception, "Type: message"; None where it raised none.
        tail: the most telling lines of its stderr, or the last ones of its stdout where stderr is empty.
        tail_log: the file that has those lines.
        blame: whether it may be the cause.
        when_s: seconds since the epoch, as near to the failure as can be known.
        signal_text: an explanation of the signal; empty for the general one of this signal.
        disk: the reason for which its logs could not be written, which may have ended it; or empty.
        story: what happened, where that is known better than from its own end; or empty.
    """

    failure: RankFailure
    logs: RankLogs
    exception: str | None
    tail: tuple[str, ...]
    tail_log: str
    blame: Blame
    when_s: float
    signal_text: str = ""
    disk: str = ""
    story: str = ""

    def verdict(self, host: str) -> str:
        """What happened, as a sentence that names the rank to blame. `host`: its name."""
        return self.story or f"rank {self.failure.rank} on host {host} {self.description}"

    @property
    def raised(self) -> bool:
        """Whether it ended by its exception, and not by a signal of another process."""
        stopped_later = self.blame in (Blame.CAUSE_STOPPED, Blame.CONSEQUENCE)
        return self.exception is not None and (self.failure.exit_code >= 0 or stopped_later)

    @property
    def description(self) -> str:
        """The failure as text, to follow "rank 1 on host X"."""
        code = self.failure.exit_code
        disk = f"; {self.disk}" if self.disk else ""
        if self.raised:
            return f"raised {self.exception}{disk}"
        said = f": {self.exception}" if code < 0 and self.exception else ""
        return stories.ended(code, self.signal_text) + (said if code < 0 else disk)

    @property
    def in_short(self) -> str:
        """The failure in a few words."""
        if self.blame is Blame.STOPPED_BY_US:
            return "stopped"
        if self.raised and self.exception is not None:
            return self.exception.partition(":")[0]
        if self.failure.exit_code < 0:
            try:
                return signal.Signals(-self.failure.exit_code).name
            except ValueError:
                return f"signal {-self.failure.exit_code}"
        return f"exit code {self.failure.exit_code}"


def examine(
    failures: tuple[RankFailure, ...], ranks: tuple[RankLogs, ...], *, killed_by: str = ""
) -> list[FailureReport]:
    """Reports on all failed ranks, the one to blame first.

    Args:
        failures: in the order in which torch's agent saw them.
        ranks: the output files of this host's ranks.
        killed_by: the explanation of a SIGKILL; empty where there is none.
    """
    logs = {rank.rank: rank for rank in ranks}
    reports = [_examine_one(failure, logs.get(failure.rank) or _unknown(failure)) for failure in failures]
    if all(report.blame is Blame.STOPPED_BY_US for report in reports):
        # No other rank failed, so a process outside the job has sent the signal.
        reports = [dataclasses.replace(report, blame=Blame.CAUSE) for report in reports]
    if killed_by:
        killed = [report.failure.exit_code == -signal.SIGKILL and not report.failure.cause for report in reports]
        reports = [
            dataclasses.replace(report, signal_text=killed_by) if by_kill else report
            for report, by_kill in zip(reports, killed, strict=True)
        ]
    reports = _blame_who_was_lost_first(reports)
    reports = [
        dataclasses.replace(report, disk=disks.trouble(disk))
        if report.failure.exit_code > 0 and (disk := report.logs.disk) is not None
        else report
        for report in reports
    ]
    order = {failure.rank: index for index, failure in enumerate(failures)}
    reports = sorted(reports, key=lambda r: (r.blame, r.when_s, order[r.failure.rank]))
    return [dataclasses.replace(reports[0], story=_story(reports, ended_well=set(logs) - set(order))), *reports[1:]]


def _story(reports: list[FailureReport], *, ended_well: set[int]) -> str:
    """What happened, where the ranks with errors tell it of another one; empty where the first report tells it itself.

    Args:
        reports: the one to blame first.
        ended_well: ranks of this host with exit code 0.
    """
    first = reports[0]
    one = stories.unequal_of_all({report.failure.rank: report.exception or "" for report in reports})
    stopped = one is not None and first.failure.rank == one.done and first.failure.exit_code in _STOPPED
    if one is not None and (stopped or stories.unequal(first.exception or "", first.failure.rank)):
        sure = one.done in ended_well
        return one.sentence(" finished its script" if sure else "", sure=sure)
    if first.blame is not Blame.CONSEQUENCE or (lost := _LOST.search(first.exception or "")) is None:
        return ""
    if int(lost[1]) not in ended_well:
        return ""
    left = _LEFT.search(first.exception or "")
    how = "finished its script (exit code 0)" if left else stories.WITHOUT_LEAVING
    during = _DURING.search(first.exception or "")
    other = f" while rank {first.failure.rank} waited for it{f' in {during[1]}' if during else ''}"
    return f"rank {lost[1]} {how}{other}"


def _blame_who_was_lost_first(reports: list[FailureReport]) -> list[FailureReport]:
    """Where all others lost one rank, and that one was ended by a signal, it had left before: it may still have been
    ending when the agent stopped it, so that its own exit code is lost."""
    if any(report.blame in (Blame.CAUSE, Blame.CAUSE_STOPPED) for report in reports):
        return reports
    lost = [_LOST.search(report.exception or "") for report in reports if report.blame is Blame.CONSEQUENCE]
    named = {int(found[1]) for found in lost if found}
    if len(named) != 1 or not all(lost):
        return reports
    left = [_LEFT.search(report.exception or "") for report in reports]
    why = next((f": {found[1]}" for found in left if found), "")
    return [
        dataclasses.replace(report, blame=Blame.CAUSE, signal_text=_LEFT_FIRST + why)
        if report.failure.rank in named and report.blame is Blame.STOPPED_BY_US
        else report
        for report in reports
    ]


def _unknown(failure: RankFailure) -> RankLogs:
    """The files of a rank that the supervisor was told nothing of."""
    return RankLogs(rank=failure.rank, local_rank=failure.local_rank, stdout="", stderr="", error_file="")


def _examine_one(failure: RankFailure, logs: RankLogs) -> FailureReport:
    lines = _lines(logs.stderr)
    code = failure.exit_code
    stopped = code in _STOPPED
    recorded = _recorded(logs.error_file)
    found = last_exception(lines)
    tail, tail_log = lines[-MAX_TAIL_LINES:], logs.stderr
    if not tail and (tail := _lines(logs.stdout)[-MAX_TAIL_LINES:]):
        tail_log = logs.stdout
    when_s = failure.observed_s
    exception: str | None = None
    blame = Blame.CAUSE
    if code >= 0 or stopped:
        # One that was caught and logged long ago did not end a rank that was stopped.
        if recorded or (found and not (stopped and found.line < len(lines) - MAX_TAIL_LINES)):
            exception = recorded or (found.text if found else None)
            when_s = min(_written(logs.error_file if recorded else logs.stderr) or when_s, when_s + 1)
        if found:
            tail = lines[max(found.start, found.line - MAX_TAIL_LINES + 3) : found.line + 3]
        if exception and _CONSEQUENCES.search(exception):
            blame = Blame.CONSEQUENCE
        elif stopped:
            blame = Blame.CAUSE_STOPPED if exception else Blame.STOPPED_BY_US
    else:
        exception = _native_exception(lines) if code == -signal.SIGABRT else None
        fatal = [index for index, line in enumerate(lines) if line.startswith("Fatal Python error")]
        if fatal:  # faulthandler's stack has its most recent call first
            tail = lines[fatal[-1] : fatal[-1] + MAX_TAIL_LINES]
    return FailureReport(
        failure=failure,
        logs=logs,
        exception=exception,
        tail=tuple(tail),
        tail_log=tail_log,
        blame=blame,
        when_s=when_s,
        signal_text=failure.cause,
    )


def _lines(path: str) -> list[str]:
    return [line for line in map(plain, read_tail(path).split("\n")) if line.strip()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FoundException:
    """An exception in the lines of a Python program's stderr.

    Attributes:
        text: "Type: message", the type without its module.
        start: index of the line where its traceback begins.
        line: index of the line that names it.
    """

    text: str
    start: int
    line: int


def last_exception(lines: list[str]) -> FoundException | None:
    """The exception that a Python program ended with; None where its stderr has no traceback."""
    starts = [index for index, line in enumerate(lines) if line.strip() == _HEADER]
    if starts:
        for index, line in enumerate(lines[starts[-1] + 1 :], starts[-1] + 1):
            if not line[:1].isspace() and (match := _EXCEPTION.fullmatch(line)):
                return FoundException(text=_short(match), start=starts[-1], line=index)
    # A syntax error in the script itself has no header.
    for index in range(len(lines) - 1, -1, -1):
        if _NAMED_LIKE_ONE.match(lines[index]) and (match := _EXCEPTION.fullmatch(lines[index])):
            return FoundException(text=_short(match), start=0, line=index)
    return None


def _short(match: re.Match[str]) -> str:
    name = match["type"].rpartition(".")[2]
    return f"{name}: {match['text']}" if match["text"] else name


def _native_exception(lines: list[str]) -> str | None:
    for line in reversed(lines):
        if match := _WHAT.fullmatch(line):
            return match["text"]
    return None


def _recorded(error_file: str) -> str | None:
    """The exception in the file of torch's @record; None where the script does not use it."""
    try:
        message = json.loads(Path(error_file).read_text())["message"]
        text = message["message"] if isinstance(message, dict) else message
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(text).strip().partition("\n")[0] or None


def read_tail(path: str) -> str:
    """The end of a file; empty where it is missing."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _written(path: str) -> float | None:
    try:
        return os.stat(path).st_mtime
    except OSError:
        return None
