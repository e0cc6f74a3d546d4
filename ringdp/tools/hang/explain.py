"""``python -m ringdp explain``: what happened in a job, from the dumps of its ranks."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ringdp.text import table
from ringdp.tools.hang.dump_files import Job, read_job
from ringdp.tools.hang.verdict import Verdict, group_name, judge

_MOST_NAMED = 64  # ranks, and rows of the table
_DESCRIPTION = """\
Say what happened, from the dumps that ranks write when a group fails, at a timeout, at SIGUSR1 or by `dump`.

  python -m ringdp explain logs/2026-11-24_10-12-00_train   the newest attempt of that run
  python -m ringdp explain hostA/logs hostB/logs            of several hosts, together

Which algorithm runs for which size, and why, is another question: python -m ringdp bench --explain
"""


def add_parsers(commands: Any) -> None:
    """Add the command to the parsers of ``python -m ringdp``."""
    parser = commands.add_parser(
        "explain",
        help="say why a job hangs or failed",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="folders with dumps, at any depth")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the verdict; 1 where there is nothing to read."""
    try:
        job = read_job(args.folders)
    except OSError as error:
        sys.stderr.write(f"python -m ringdp explain: {error}\n")
        return 1
    sys.stdout.write(report(job, judge(job)) + "\n")
    return 0


def report(job: Job, verdict: Verdict) -> str:
    """The verdict, a table of the groups, and the stacks of the ranks that the verdict names."""
    said = [f"ringrun: {one.words}" for one in job.said]
    if not job.dumps:
        return "\n\n".join([*said, "No rank has left a dump."])
    parts = [*said, verdict.paragraph]
    if job.absent:
        named = ", ".join(map(str, job.absent[:_MOST_NAMED]))
        more = f" and {len(job.absent) - _MOST_NAMED} more" if len(job.absent) > _MOST_NAMED else ""
        parts.append(f"No dump of rank{'s' if len(job.absent) > 1 else ''} {named}{more} of {job.world}.")
    parts += job.problems
    rows = []
    for dump in job.dumps.values():
        for group in dump.groups.values():
            called = dump.of_group(group.id)
            last = called[max(called)] if called else None
            rows.append(
                [group_name(group, job), str(dump.rank), last.title if last else "–", last.state if last else ""]
            )
    rows.sort(key=lambda row: (row[0], int(row[1])))
    parts.append(table(["group", "rank", "last called", "state"], rows[:_MOST_NAMED]))
    for rank, stack in verdict.stacks.items():
        if stack:
            parts.append(f"Rank {rank}:\n{stack}")
    return "\n\n".join(parts)
