"""The dumps of a job's ranks, read from their files (docs/how-to/diagnosis.md)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ringdp.launcher import verdicts
from ringdp.text import cut

PATTERN = "dump_rank*_*.json"
_MOST_RANKS = 1 << 20


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of one rank. Times are nanoseconds since 1970; 0: that has not happened.

    Attributes:
        number: counts the operations of all groups of this rank, as they were called.
        group: the group's number, the same on all its members.
        sequence: its place in the order of the group, the same on all members; of messages and of what callbacks
            issue a number without an order.
        order: ``collective``, ``callback`` or ``message``.
        text: kind, type, count and reduction, on which members must agree, as on the name.
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
    """The failure of a group on a rank. ``guilty`` is -1 where no rank is known."""

    at_ns: int
    group: str
    sequence: int
    guilty: int
    kind: str
    text: str


@dataclasses.dataclass(frozen=True)
class Dump:
    """The dump of one rank."""

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
    """The newest dump of each rank, a sentence for each file that could not be used, and the launchers' verdicts."""

    dumps: dict[int, Dump]
    problems: tuple[str, ...]
    said: tuple[verdicts.Verdict, ...] = ()

    @property
    def world(self) -> int:
        return max((dump.world for dump in self.dumps.values()), default=0)

    @property
    def absent(self) -> list[int]:
        """Ranks that left no dump."""
        return [rank for rank in range(self.world) if rank not in self.dumps]


def read_job(folders: Sequence[Path]) -> Job:
    """Read the dumps below the folders, and what the launchers have said: of each folder those of the newest run.

    Raises:
        FileNotFoundError: there is nothing of both.
    """
    found: list[Dump] = []
    problems: list[str] = []
    said: list[verdicts.Verdict] = []
    for folder in folders:
        paths = _newest_run([folder] if folder.is_file() else sorted(folder.rglob(PATTERN)))
        said += _said(folder, paths)
        for path in paths:
            try:
                found.append(read(path))
            except (OSError, ValueError) as error:
                problems.append(f"{path} cannot be read as a dump: {error}")
    # A folder that several jobs have used: those of the processes that were there last, where these left any.
    dumps: dict[int, Dump] = {}
    for dump in [it for it in found if _of_last_process(it)] or found:
        known = dumps.get(dump.rank)
        if known is None or dump.at_ns > known.at_ns:
            dumps[dump.rank] = dump
    if not dumps and not said:
        where = ", ".join(map(str, folders))
        reason = f": {problems[0]}" if problems else ""
        raise FileNotFoundError(f"no dump of a rank ({PATTERN}) below {where}{reason}")
    worlds = sorted({dump.world for dump in dumps.values()})
    if len(worlds) > 1:
        problems.append(
            f"These dumps are of jobs of {' and of '.join(map(str, worlds))} ranks, and the result may mix them:"
            " give the folders of one job"
        )
    return Job(dict(sorted(dumps.items())), tuple(problems), tuple(said))


def read(path: Path) -> Dump:
    """One file. Raises ValueError where it is not a dump, OSError where it cannot be read."""
    try:
        raw = _Object(json.loads(path.read_text(errors="replace")))
    except RecursionError as error:
        raise ValueError("its values lie too deep in one another") from error
    if raw.number("format") != 1:
        raise ValueError(f"its format is {raw.number('format')}, and this ringdp reads 1")
    rank, world = raw.number("rank"), raw.number("world")
    if not 0 <= rank < world <= _MOST_RANKS:
        raise ValueError(f"it is of rank {rank} of {world}")
    offset = raw.number("unix_ns") - raw.number("at_ns")

    def wall(ns: int) -> int:
        return ns + offset if ns else 0

    sites = raw.object("call_sites")
    groups = [
        Group(it.text("id"), it.text("name"), it.ranks("members"), bool(it.value("removed")))
        for it in raw.objects("groups")
    ]
    return Dump(
        path=path,
        rank=rank,
        world=world,
        host=raw.text("host"),
        pid=raw.number("pid"),
        reason=raw.text("reason"),
        at_ns=raw.number("unix_ns"),
        called=raw.number("called"),
        groups={group.id: group for group in groups},
        failures=tuple(
            Failure(
                at_ns=wall(it.number("at_ns")),
                group=it.text("group"),
                sequence=it.number("sequence"),
                guilty=it.number("guilty"),
                kind=it.text("kind"),
                text=it.text("text"),
            )
            for it in raw.objects("failures")
        ),
        stacks=raw.text("stacks"),
        operations=tuple(
            Operation(
                number=it.number("number"),
                group=it.text("group"),
                sequence=it.number("sequence"),
                order=it.text("order"),
                kind=it.text("kind"),
                dtype=it.text("dtype"),
                count=it.number("count"),
                bytes=it.number("bytes"),
                text=it.text("text"),
                name=it.text("name", ""),
                state=it.text("state"),
                queued_ns=wall(it.number("queued_ns")),
                started_ns=wall(it.number("started_ns")),
                ended_ns=wall(it.number("ended_ns")),
                call_site=sites.text(str(it.value("call_site", "")), ""),
                flows=tuple(flow.raw for flow in it.objects("flows")),
            )
            for it in raw.objects("operations")
        ),
    )


class _Object:
    """An object of JSON with typed access to its values; a value of another type is a ValueError that names it."""

    def __init__(self, raw: Any) -> None:
        if not isinstance(raw, dict):
            raise ValueError(f"an object of JSON was wanted, not {_shown(raw)}")
        self.raw: dict[str, Any] = raw

    def value(self, key: str, default: Any = None) -> Any:
        found = self.raw.get(key, default)
        if found is None:
            raise ValueError(f"it has no '{key}'")
        return found

    def number(self, key: str) -> int:
        found = self.value(key)
        if not isinstance(found, int):
            raise ValueError(f"'{key}' must be a whole number, not {_shown(found)}")
        return found

    def text(self, key: str, default: str | None = None) -> str:
        found = self.value(key, default)
        if not isinstance(found, str):
            raise ValueError(f"'{key}' must be a text, not {_shown(found)}")
        return found

    def object(self, key: str) -> _Object:
        return _Object(self.value(key))

    def objects(self, key: str) -> list[_Object]:
        return [_Object(one) for one in self._list(key)]

    def ranks(self, key: str) -> tuple[int, ...]:
        found = self._list(key)
        if not found or not all(isinstance(one, int) and one >= 0 for one in found):
            raise ValueError(f"'{key}' must be a list of ranks, not {_shown(found)}")
        return tuple(found)

    def _list(self, key: str) -> list[Any]:
        found = self.value(key)
        if not isinstance(found, list):
            raise ValueError(f"'{key}' must be a list, not {_shown(found)}")
        return found


def _shown(value: Any) -> str:
    return cut(repr(value), 40)


def read_note(path: Path) -> tuple[int, str] | None:
    """The pid and the host of the process that left it (process_rank<r>.json); None where it has none."""
    try:
        who = _Object(json.loads(path.read_text()))
        return who.number("pid"), who.text("host")
    except (OSError, ValueError, RecursionError):
        return None


def _of_last_process(dump: Dump) -> bool:
    note = read_note(dump.path.with_name(f"process_rank{dump.rank}.json"))
    return note is None or note[0] == dump.pid


def _said(folder: Path, dumps: Sequence[Path]) -> list[verdicts.Verdict]:
    """The verdict of the attempt with these dumps; where there is none, that of the last attempt below the folder."""
    files = (
        [dumps[0].parents[1] / verdicts.NAME] if dumps else sorted(folder.rglob(verdicts.NAME), key=_written_ns)[-1:]
    )
    return [verdict for file in files if (verdict := verdicts.read(file)) is not None]


def _written_ns(path: Path) -> int:
    return path.stat().st_mtime_ns


def _newest_run(paths: Iterable[Path]) -> list[Path]:
    """Of ringrun's folders (RUN/attempt_N/LOCAL_RANK) those of the attempt that was dumped last; else of one folder."""
    runs: dict[Path, list[Path]] = {}
    for path in paths:
        parent = path.parent
        runs.setdefault(parent.parent if parent.name.isdigit() else parent, []).append(path)
    return max(runs.values(), key=lambda files: max(it.stat().st_mtime_ns for it in files), default=[])
