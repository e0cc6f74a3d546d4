"""The measurements as a table with nccl-tests' columns, and as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringdp.text import format_size, format_time, table
from ringdp.tools.bench.measuring import Row

FORMAT = 1
"""Of the JSON: another number where a field changes its meaning or goes."""


def text(rows: Sequence[Row], algorithm: dict[tuple[str, int], str]) -> str:
    """A table: a line for each size and contender; ratios are times over those of the first contender.

    Args:
        algorithm: of ring, by collective and size, where there is a choice.
    """
    several = len({row.contender for row in rows}) > 1
    columns = ["size", "count", "type", "redop", "root"]
    columns += ["by"] if several else []
    columns += ["time", "±", "algbw GB/s", "busbw GB/s", "#wrong"]
    columns += ["ratio"] if several else []
    columns += ["sent", "error"] if any(row.error is not None for row in rows) else []
    columns += ["algorithm"] if algorithm else []
    cells = []
    first: dict[tuple[str, int], Row] = {}
    for row in rows:
        key = row.collective, row.size_bytes
        begins = key not in first
        reference = first.setdefault(key, row)
        cell = [format_size(row.size_bytes), str(row.count), row.dtype, row.operation, str(row.root)]
        cell = cell if begins else [""] * 5
        cell += [row.contender] if several else []
        cell += [format_time(row.time_s), f"{row.spread:.0%}"] if row.time_s and row.spread is not None else ["–", ""]
        cell += [_giga(row.algbw), _giga(row.busbw), "n/a" if row.wrong is None else str(row.wrong)]
        if several:
            known = row.time_s and reference.time_s and row is not reference
            cell += [f"{row.time_s / reference.time_s:.2f}" if known and row.time_s and reference.time_s else ""]
        if any(it.error is not None for it in rows):
            cell += [f"1/{row.ratio:.3g}" if row.ratio else "", "" if row.error is None else f"{row.error:.2g}"]
        if algorithm:
            cell += [algorithm.get(key, "") if row.contender == "ring" else ""]
        cells.append(cell)
    return table(columns, cells)


def remarks(rows: Sequence[Row]) -> list[str]:
    """Lines about what the table does not show: collectives that a contender cannot do, and wrong results."""
    lines = dict.fromkeys(f"{row.contender} cannot do {row.collective}: {row.why}" for row in rows if row.why)
    wrong = [row for row in rows if row.wrong]
    for row in wrong:
        what = f"{row.collective} of {format_size(row.size_bytes)} {row.dtype} by {row.contender}"
        lines[f"WRONG: {what}: {row.wrong} elements are not as they have to be; it was not timed"] = None
    return list(lines)


def as_json(about: dict[str, Any], rows: Sequence[Row]) -> str:
    """One object; times are seconds, sizes bytes, bandwidths bytes a second."""
    return json.dumps({"ringdp_bench": FORMAT, **about, "rows": [row.as_dict() for row in rows]}, indent=2) + "\n"


def write(content: str, target: str) -> None:
    """Into that file, or to standard output for ``-``. Raises OSError."""
    if target == "-":
        sys.stdout.write(content)
    else:
        Path(target).write_text(content)


def _giga(rate: float | None) -> str:
    return "–" if rate is None else f"{rate / 1e9:.3g}"
