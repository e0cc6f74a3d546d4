"""What every benchmark does around its measurement: refusals in a line, the report, the file of --json."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def run(
    measure: Callable[[], dict[str, Any]],
    report: Callable[[dict[str, Any]], str],
    *,
    json_path: str | None,
    cannot: tuple[type[Exception], ...],
    failed: tuple[type[Exception], ...],
) -> int:
    """`run_growing` for what has its figures all at once."""

    def once() -> Iterator[dict[str, Any]]:
        yield measure()

    return run_growing(once, report, json_path=json_path, cannot=cannot, failed=failed)


def run_growing(
    measure: Callable[[], Iterator[dict[str, Any]]],
    report: Callable[[dict[str, Any]], str],
    *,
    json_path: str | None,
    cannot: tuple[type[Exception], ...],
    failed: tuple[type[Exception], ...],
) -> int:
    """Measure, print the report, write the figures, and return the exit status.

    Args:
        measure: yields the figures it has so far, each time there are more. What ends it early, an interruption too,
            leaves the last ones, which are reported.
        report: puts them into words.
        json_path: where they go as JSON, each time; or None.
        cannot: what says that it cannot be measured here: status 2.
        failed: what says that measuring went wrong, or the results are: status 1.
    """
    script = Path(sys.argv[0]).name
    result, status, reason = None, 0, ""
    try:
        for result in measure():
            if json_path:
                Path(json_path).write_text(json.dumps(result, indent=2), encoding="utf-8")
    except (*cannot, *failed) as error:
        status, reason = 2 if isinstance(error, cannot) else 1, str(error)
    except KeyboardInterrupt:
        status, reason = 130, "interrupted"
    if result is not None:
        print(report(result), flush=True)
    if reason:
        print(f"{script}: {reason}", file=sys.stderr)
    return status
