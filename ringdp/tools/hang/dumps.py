"""The dumps of a job's ranks, read from their files (docs/how-to/diagnosis.md)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

PATTERN = "dump_rank*_*.json"


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of one rank. Times are nanoseconds since 1970; 0: that has not happened.

    Attributes:
        number: counts the operations of all groups of this rank, as they were called.
        group: the group's number, the same on all its members.
        sequence: its place in the order of the group, the same on all members; of messages and of what callbacks
            issue a number without an order.
        order: ``collective``, ``callback`` or ``message``.
        text: kind, type, count and reduction: what members must agree on, with the name.
        call_site: the Python code that called it, a frame a line, innermost first; empty where it is not known.
    """

    number: int
    group: str
    sequence: int
    order: str
    kind: str
    dtype: str
    count: int
    bytes: int
    text: str
    name: str
    state: str
    queued_ns: int
    started_ns: int
    ended_ns: int
    call_site: str
    flows: tuple[dict[str, Any], ...]

    @property
    def ended_well(self) -> bool:
        return self.state == "done"

    @property
    def title(self) -> str:
        """``all_reduce #7 (float32[10], SUM)``, with its name."""
        kind, bracket, rest = self.text.partition("(")
        place = f" #{self.sequence}" if self.order == "collective" else f" in a {self.order}"
        name = f" '{self.name}'" if self.name else ""
        return f"{kind}{place}{' ' + bracket + rest if bracket else ''}{name}"


@dataclasses.dataclass(frozen=True)
class Group:
    id: str
    name: str
    members: tuple[int, ...]
    removed: bool


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a group failed on a rank. ``guilty`` is -1 where no rank is known."""

    at_ns: int
    group: str
    sequence: int
    guilty: int
    kind: str
    text: str


@dataclasses.dataclass(frozen=True)
class Dump:
    """What one rank wrote."""

    path: Path
    rank: int
    world: int
    host: str
    pid: int
    reason: str
    at_ns: int
    called: int
    groups: dict[str, Group]
    failures: tuple[Failure, ...]
    stacks: str
    operations: tuple[Operation, ...]

    def of_group(self, group: str) -> dict[int, Operation]:
        """The operations with a place in the group's order, by sequence."""
        return {it.sequence: it for it in self.operations if it.group == group and it.order == "collective"}

    @property
    def who(self) -> str:
        return f"rank {self.rank} (host {self.host}, pid {self.pid})"


@dataclasses.dataclass(frozen=True)
class Job:
    """The newest dump of each rank, and what could not be used: a sentence for each file."""

    dumps: dict[int, Dump]
    problems: tuple[str, ...]

    @property
    def world(self) -> int:
        return max((dump.world for dump in self.dumps.values()), default=0)

    @property
    def absent(self) -> list[int]:
        """Ranks that left no dump."""
        return [rank for rank in range(self.world) if rank not in self.dumps]


def read_job(folders: Sequence[Path]) -> Job:
    """Read the dumps below the folders: of each folder those of the newest run.

    Raises:
        FileNotFoundError: there is no dump at all.
    """
    found: list[Dump] = []
    problems: list[str] = []
    for folder in folders:
        for path in _newest_run([folder] if folder.is_file() else sorted(folder.rglob(PATTERN))):
            try:
                found.append(read(path))
            except (OSError, ValueError, KeyError, TypeError) as error:
                problems.append(f"{path} cannot be read as a dump: {error}")
    # A folder that several jobs have used: those of the processes that were there last, where these left any.
    dumps: dict[int, Dump] = {}
    for dump in [it for it in found if _of_last_process(it)] or found:
        known = dumps.get(dump.rank)
        if known is None or dump.at_ns > known.at_ns:
            dumps[dump.rank] = dump
    if not dumps:
        where = ", ".join(map(str, folders))
        reason = f": {problems[0]}" if problems else ""
        raise FileNotFoundError(f"no dump of a rank ({PATTERN}) below {where}{reason}")
    return Job(dict(sorted(dumps.items())), tuple(problems))


def read(path: Path) -> Dump:
    """One file. Raises ValueError, KeyError or TypeError where it is not a dump, OSError where it cannot be read."""
    raw = json.loads(path.read_text(errors="replace"))
    if raw["format"] != 1:
        raise ValueError(f"its format is {raw['format']}, and this ringdp reads 1")
    offset = raw["unix_ns"] - raw["at_ns"]

    def wall(ns: int) -> int:
        return ns + offset if ns else 0

    sites = raw["call_sites"]
    return Dump(
        path=path,
        rank=raw["rank"],
        world=raw["world"],
        host=raw["host"],
        pid=raw["pid"],
        reason=raw["reason"],
        at_ns=raw["unix_ns"],
        called=raw["called"],
        groups={it["id"]: Group(it["id"], it["name"], tuple(it["members"]), it["removed"]) for it in raw["groups"]},
        failures=tuple(
            Failure(wall(it["at_ns"]), it["group"], it["sequence"], it["guilty"], it["kind"], it["text"])
            for it in raw["failures"]
        ),
        stacks=raw["stacks"],
        operations=tuple(
            Operation(
                number=it["number"],
                group=it["group"],
                sequence=it["sequence"],
                order=it["order"],
                kind=it["kind"],
                dtype=it["dtype"],
                count=it["count"],
                bytes=it["bytes"],
                text=it["text"],
                name=it.get("name", ""),
                state=it["state"],
                queued_ns=wall(it["queued_ns"]),
                started_ns=wall(it["started_ns"]),
                ended_ns=wall(it["ended_ns"]),
                call_site=sites.get(str(it.get("call_site", "")), ""),
                flows=tuple(it["flows"]),
            )
            for it in raw["operations"]
        ),
    )


def _of_last_process(dump: Dump) -> bool:
    note = dump.path.with_name(f"process_rank{dump.rank}.json")
    try:
        return bool(json.loads(note.read_text())["pid"] == dump.pid)
    except (OSError, ValueError, KeyError, TypeError):
        return True


def _newest_run(paths: Iterable[Path]) -> list[Path]:
    """Of ringrun's folders (RUN/attempt_N/LOCAL_RANK) those of the attempt that was dumped last; else of one folder."""
    runs: dict[Path, list[Path]] = {}
    for path in paths:
        parent = path.parent
        runs.setdefault(parent.parent if parent.name.isdigit() else parent, []).append(path)
    return max(runs.values(), key=lambda files: max(it.stat().st_mtime_ns for it in files), default=[])
