"""Sizes, times and tables as people read and write them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_MOST_ROWS = 12


def parse_size(text: str) -> int:
    """Bytes of ``4096``, ``4k``, ``25m`` or ``1g``, units being powers of 1024. Raises ValueError."""
    word = text.strip().lower().removesuffix("ib").removesuffix("b")
    digits = word.rstrip("kmg")
    if not digits.isdigit() or word[len(digits) :] not in _UNITS:
        raise ValueError(f"{text!r} is not a size: write it like 4k, 1m, 100m or 4096")
    return int(digits) * _UNITS[word[len(digits) :]]


def format_size(size_bytes: float) -> str:
    """``25 MiB``, ``4 KiB``, ``10 B``."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.4g} {name}"
    return f"{size_bytes:.0f} B"


def format_time(seconds: float) -> str:
    """Three digits in the unit that suits: ``12.3 µs``, ``4.56 ms``, ``1.2 s``."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} µs"


def number_of_ranks(count: int) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{count} rank{'' if count == 1 else 's'}"


def ranks_by_number(numbers: Iterable[int]) -> str:
    """``rank 1``, ``ranks 1, 3``."""
    named = [str(one) for one in sorted(numbers)]
    return f"rank{'' if len(named) == 1 else 's'} {', '.join(named)}"


def cut(text: str, most: int = 48) -> str:
    """The text, or its beginning and ``…``."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def count(number: int, noun: str) -> str:
    """``1 bucket``, ``2 buckets``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def short_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """`table` of the first rows, with a line that says how many more there are."""
    shown = table(columns, rows[:_MOST_ROWS])
    return f"{shown}\n… and {len(rows) - _MOST_ROWS:,} more" if len(rows) > _MOST_ROWS else shown


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned text: the first column to the left, the others to the right."""
    widths = [max([len(name), *(len(row[i]) for row in rows)]) for i, name in enumerate(columns)]
    lines = []
    for row in [list(columns), ["-" * width for width in widths], *map(list, rows)]:
        cells = [row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
