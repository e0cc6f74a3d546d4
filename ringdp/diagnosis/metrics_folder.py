"""Reads a metrics folder while the ranks write to it: the last steps of each rank, and their means."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ringdp.diagnosis.records import OWN_NAMES, Record, earlier
from ringdp.errors import InvalidArgumentError

_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True)
class RankState:
    """A rank's last steps.

    Attributes:
        last: the last record.
        steps: how many records the means are over.
        means: by name, of the records' seconds.
        steps_per_s: in that time; 0 where there is one record only.
    """

    last: Record
    steps: int
    means: dict[str, float]
    steps_per_s: float

    @property
    def logged(self) -> dict[str, float]:
        """The values given to `ringdp.metrics.log` with the last step."""
        values = {name: value for name, value in self.last.items() if name not in OWN_NAMES}
        return {name: value for name, value in values.items() if isinstance(value, int | float)}

    @property
    def rank(self) -> int:
        return int(self.last["rank"])

    def seconds(self, *names: str) -> float:
        """Of a step, the mean."""
        return sum(self.means.get(f"{name}_s", 0.0) for name in names)


def rank_files(folder: Path) -> list[Path]:
    """The files of the ranks.

    Raises:
        InvalidArgumentError: the folder is not there.
    """
    if not folder.is_dir():
        raise InvalidArgumentError(f"{folder} is not a folder: give the one of ringrun --metrics-dir")
    begun_anew = {file.with_suffix("") for file in folder.glob("rank_*.jsonl.1")}  # and may have no step since
    return sorted({*folder.glob("rank_*.jsonl"), *begun_anew})


def read_last(file: Path, most: int) -> list[Record]:
    """The last records of one model, the oldest first; what is not a record, such as half a line, is left out.

    Of several models it is the first of those that have made one of the last steps.
    """
    try:
        lines = _last_lines(file)
    except FileNotFoundError:
        if not earlier(file).exists():
            raise
        lines = []
    if len(lines) <= most:  # it has begun anew not long ago
        with contextlib.suppress(FileNotFoundError):
            lines = _last_lines(earlier(file)) + lines
    found = [record for line in lines if (record := _record(line)) is not None]
    model = min((one["model"] for one in found[-most:]), default=0)
    records: list[Record] = []
    for record in found:
        if record["model"] == model:
            if records and record["step"] <= records[-1]["step"]:
                records.clear()  # the job was started again
            records.append(record)
    return records[-most:]


def _last_lines(file: Path) -> list[bytes]:
    """Whole ones."""
    with open(file, "rb") as opened:
        size = opened.seek(0, os.SEEK_END)
        opened.seek(max(0, size - _TAIL_BYTES))
        lines = opened.read().split(b"\n")
    return lines[1 if size > _TAIL_BYTES else 0 : -1]


def _record(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(record, dict) and all(type(record.get(name)) is int for name in ("model", "rank", "step"))
    return record if whole and isinstance(record.get("time"), int | float) else None


def read(folder: Path, *, over: int = 20, unreadable: Callable[[Path, OSError], None] | None = None) -> list[RankState]:
    """The state of each rank that has written a step, by rank; means over the last `over` steps.

    Ranks that the job of the newest record does not have are left out: they are of an earlier one, or were lost.

    Args:
        unreadable: is called with a file that cannot be read, and the reason; such a file is then left out.

    Raises:
        InvalidArgumentError: the folder is not there.
        OSError: a file cannot be read, and `unreadable` was not given.
    """
    states: dict[int, RankState] = {}
    for file in rank_files(folder):
        try:
            records = read_last(file, over)
        except FileNotFoundError:  # deleted since
            continue
        except OSError as error:
            if unreadable is None:
                raise
            unreadable(file, error)
            continue
        if records:
            state = _state(records)
            known = states.get(state.rank)  # in an elastic job ranks get other numbers
            if known is None or known.last["time"] < state.last["time"]:
                states[state.rank] = state
    newest = max(states.values(), key=lambda one: float(one.last["time"]), default=None)
    world = None if newest is None else newest.last.get("world")
    return [states[rank] for rank in sorted(states) if not isinstance(world, int) or rank < world]


def _state(records: Sequence[Record]) -> RankState:
    names = [name for name, value in records[-1].items() if name.endswith("_s") and isinstance(value, int | float)]
    means = {name: sum(_seconds(one.get(name)) for one in records) / len(records) for name in names}
    span = records[-1]["time"] - records[0]["time"]
    return RankState(records[-1], len(records), means, (len(records) - 1) / span if span > 0 else 0.0)


def _seconds(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
