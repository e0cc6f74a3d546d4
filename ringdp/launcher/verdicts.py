"""The launcher's verdict on a failed attempt, in a file beside the ranks' logs, for ``python -m ringdp explain``: the
launcher knows how processes ended, and what the kernel did to them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from ringdp.launcher.failure import FailureReport

NAME = "verdict.json"
"""The file in the folder of an attempt."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the launcher of one host says: the rank to blame, and a sentence about it."""

    rank: int
    words: str


def leave(reports: Sequence[FailureReport], host: str) -> None:
    """Write the verdict into the folder of the attempt; nothing where no logs are kept, or it cannot be written.

    Args:
        reports: the failed ranks, the one to blame first.
        host: this host's name.
    """
    first = reports[0]
    if first.logs.report_file:
        path = Path(first.logs.report_file).parents[1] / NAME
        with contextlib.suppress(OSError):
            path.write_text(json.dumps({"rank": first.failure.rank, "words": first.verdict(host)}) + "\n")


def read(path: Path) -> Verdict | None:
    """The verdict in a file; None where there is none that can be read."""
    try:
        fields = json.loads(path.read_text())
        return Verdict(int(fields["rank"]), str(fields["words"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
