"""The summary of a failed run: at most fifteen lines with the failed rank, its cause, and the logs."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ringdp.launcher.failure import MAX_TAIL_LINES, FailureReport
from ringdp.launcher.logs import short_path

MAX_LINES = 15
_MAX_CHARACTERS = 400


def failed(
    reports: list[FailureReport],
    *,
    host: str,
    folder: str | None,
    seconds: float,
    restarts: int,
    earlier: Sequence[str] = (),
    several_hosts: bool = False,
    disks: Sequence[str] = (),
) -> list[str]:
    """The summary of a run in which ranks failed.

    Args:
        reports: the failed ranks, the one to blame first; not empty.
        host: this host's name.
        folder: the run's folder; None where no logs are kept.
        seconds: how long the run took.
        restarts: how often the ranks had been started again.
        earlier: why, for the last of those restarts; see `restarting`.
        several_hosts: the user may be on another one: the paths of logs have this host's name.
        disks: sentences about those that cannot be written.
    """
    first = reports[0]
    after = f"after {duration(seconds)}" + (f" and {restarts} restart{'s' if restarts > 1 else ''}" if restarts else "")
    lines = [f"ringrun: FAILED {after}: {first.verdict(host)}"]
    lines += [f"  {sentence}" for sentence in disks]
    tail = [line for line in first.tail if line.strip()][-max(1, MAX_TAIL_LINES - len(earlier) - len(disks)) :]
    if tail:
        lines.append(f"  last lines of rank {first.failure.rank}:")
        lines += [f"    | {line}" for line in tail]
    if len(reports) > 1:
        lines.append(f"  then: {_others(reports[1:])}")
    lines += [f"  before: {verdict}" for verdict in earlier]
    where = f" on {host}" if several_hosts else ""
    if log := _log_of(first, kept=folder is not None):
        lines.append(f"  full log: {log}{where}")
    if folder is not None:
        lines.append(f"  all logs: {folder}{where}")
    return [_cut(line) for line in lines[:MAX_LINES]]


def failed_elsewhere(words: str, *, seconds: float, folder: str | None) -> list[str]:
    """The summary on a node whose own ranks are not to blame, of a job that failed on another one.

    Args:
        words: the failure there.
        seconds: how long the run took.
        folder: the run's folder here; None where no logs are kept.
    """
    lines = [f"ringrun: FAILED after {duration(seconds)}: {words}"]
    if folder is not None:
        lines.append(f"  logs of this node: {folder}")
    return [_cut(line) for line in lines]


def restarting(reports: list[FailureReport], *, host: str, attempt: int, logs_kept: bool) -> str:
    """The reason of a restart, in one line: the rank to blame, its failure, its log."""
    first = reports[0]
    what = f"attempt {attempt}: {first.verdict(host)}"
    return _with_log(what, first, kept=logs_kept)


def lost(report: FailureReport, *, host: str, logs_kept: bool) -> str:
    """The line for a rank without which the others go on (--elastic): its cause of death, and its log."""
    what = f"ringrun: {report.verdict(host)}; the other ranks go on without it"
    return _with_log(what, report, kept=logs_kept)


def _with_log(what: str, report: FailureReport, *, kept: bool) -> str:
    log = _log_of(report, kept=kept)
    return _cut(what + (f"; log: {log}" if log else ""))


def _log_of(report: FailureReport, *, kept: bool) -> str:
    """The file with its last lines; empty where there is none, or where the run's folder, which has it, is not kept."""
    return short_path(report.tail_log) if report.tail_log and (kept or report.logs.of_user) else ""


def finished(
    seconds: float,
    steps: int | None,
    *,
    where: str = "",
    logs: str = "",
    restarted: bool = False,
    lost: Sequence[str] = (),
) -> str:
    """The one line of a run that ends well.

    Args:
        seconds: how long the run took.
        steps: those of rank 0; None where it wrote no report.
        where: " on 2 hosts", or empty.
        logs: the folder, or empty.
        restarted: the ranks have been started again: the steps are those since then.
        lost: ranks without which the others have gone on, and how they ended.
    """
    made = "" if not steps else f" and {steps:,} step{'s' if steps > 1 else ''}" + " since the restart" * restarted
    without = f" without {', '.join(lost)}, lost on the way" if lost else ""
    logs = f", logs in {logs}" if logs else ""
    return _cut(f"ringrun: finished after {duration(seconds)}{made}{where}{without}{logs}")


def steps_of(report: str) -> int | None:
    """The number of steps in a rank's report; None where there is none, or none that can be read."""
    try:
        with open(report) as file:
            return int(json.load(file)["steps"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def duration(seconds: float) -> str:
    """12.3 s, 4 min 05 s or 2 h 03 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02} min"


def broken(error: str, *, host: str, log: str | None) -> list[str]:
    """The summary of a run that failed in the launcher itself.

    Args:
        error: its text.
        host: this host's name.
        log: the file with more; None where there is none.
    """
    said = [part for part in error.splitlines() if part.strip()][: MAX_LINES - 2] or ["no reason given"]
    lines = [f"ringrun: FAILED on host {host}: {said[0]}", *(f"    {line}" for line in said[1:])]
    if log is not None:
        lines.append(f"  full log: {log}")
    return [_cut(line) for line in lines]


def _others(reports: list[FailureReport]) -> str:
    """The other failed ranks and their ends, for example: rank 0 PeerLostError; ranks 2, 3 stopped."""
    groups: dict[str, list[int]] = {}
    for report in reports:
        groups.setdefault(report.in_short, []).append(report.failure.rank)
    return "; ".join(
        f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, sorted(ranks)))} {what}"
        for what, ranks in groups.items()
    )


def _cut(line: str) -> str:
    return line if len(line) <= _MAX_CHARACTERS else line[: _MAX_CHARACTERS - 4] + " ..."
