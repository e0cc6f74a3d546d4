"""What every benchmark does around its measurement: refusals in a line, the report, the file of --json."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
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
    """Measure, print the report, write the figures, and return the exit status.

    Args:
        measure: makes the figures.
        report: puts them into words.
        json_path: where they go as JSON, or None.
        cannot: what says that it cannot be measured here: status 2.
        failed: what says that measuring went wrong, or the results are: status 1.
    """
    script = Path(sys.argv[0]).name
    try:
        result = measure()
    except (*cannot, *failed) as error:
        print(f"{script}: {error}", file=sys.stderr)
        return 2 if isinstance(error, cannot) else 1
    except KeyboardInterrupt:
        return 130
    print(report(result))
    if json_path:
        with open(json_path, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=2)
    return 0
