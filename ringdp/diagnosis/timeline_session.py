"""The begin and end of timelines: `ringdp.timeline`, and RINGDP_TIMELINE."""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import socket
import weakref
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from ringdp import config
from ringdp.diagnosis.clocks import Offset
from ringdp.diagnosis.timeline import Clock, Timeline, merge, write
from ringdp.errors import InvalidStateError
from ringdp.job.backend import named, require_initialized

_log = logging.getLogger("ringdp.timeline")
_ABOUT = frozenset(("rank", "host", "left_out", "to_epoch_ns", "offset_ns", "error_ns"))  # of a rank's file
_UNKNOWN = Offset(None, float("inf"))


class Timelines:
    """Those of this process that collect now. Used by the thread that trains."""

    def __init__(self) -> None:
        self.active: list[Timeline] = []
        self._sources: weakref.WeakSet[Any] = weakref.WeakSet()
        self._cursor = 0
        self._clock = _UNKNOWN

    def watch(self, source: Any) -> None:
        """A monitor, which may have seen the end of a step when a timeline ends."""
        self._sources.add(source)

    def begin(self, rank: int) -> Timeline:
        from ringdp import _C

        self._record_last_steps()  # steps that have ended already
        if not self.active:
            _, self._cursor, _ = _C.operations_since(0)
        timeline = Timeline(rank, {one["number"]: one["name"] for one in _C.algorithms()})
        self.active.append(timeline)
        return timeline

    def add_step(self, step: int, row: Mapping[str, float], times: Mapping[str, int], clock: Offset) -> None:
        for timeline in self.active:
            timeline.add_step(step, row, times)
        self._clock = clock
        self._add_operations()

    def end(self, timeline: Timeline) -> dict[str, Any]:
        """This rank's part of the timeline."""
        self._record_last_steps()
        self._add_operations()
        self.active.remove(timeline)
        return timeline.as_dict(Clock.here(self._clock.seconds, self._clock.error_s), socket.gethostname())

    def _record_last_steps(self) -> None:
        for source in list(self._sources):
            source.record_last()

    def _add_operations(self) -> None:
        from ringdp import _C

        records, self._cursor, lost = _C.operations_since(self._cursor)
        groups = {one.id: one.name for one in _C.recorded_groups()}
        for timeline in self.active:
            timeline.add_operations(records, groups, lost)


@functools.cache
def timelines() -> Timelines:
    """Those of this process. The first call begins the one of RINGDP_TIMELINE, which is written at the end."""
    found = Timelines()
    folder = config.timeline_dir()
    if folder is not None and dist.is_initialized():
        rank, pid = dist.get_rank(), os.getpid()
        timeline = found.begin(rank)

        def write_at_exit() -> None:
            if os.getpid() == pid:  # not a process that this one has forked
                _write_own(Path(folder) / f"rank_{rank:05d}.json", found.end(timeline))

        atexit.register(write_at_exit)
    return found


class timeline:  # used as a function
    """Collect the operations of all ranks, and write them to one file, which Perfetto (ui.perfetto.dev) opens.

    ``with ringdp.timeline("run.json"): ...`` around some steps, or ``handle = ringdp.timeline("run.json").start()`` and
    ``handle.stop()``. All ranks begin and end it at the same place; at the end rank 0 gets the events of all and writes
    the file, on one clock and with an arrow for all bytes from a sender to a receiver. A rank whose block ends with an
    exception, or that cannot reach the others at the end, leaves a file of its own, ``run.json.rank_00000``;
    ``python -m ringdp timeline`` merges these.

    Args:
        path: of the file, on rank 0's host.

    Raises:
        InvalidStateError: before `init`; started or stopped twice.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        require_initialized("timeline")
        self._path = Path(path)
        self._timeline: Timeline | None = None

    def start(self) -> timeline:
        """Begin to collect."""
        if self._timeline is not None:
            raise InvalidStateError(f"the timeline {self._path} has begun already")
        require_initialized("timeline")
        self._timeline = timelines().begin(dist.get_rank())
        return self

    def stop(self) -> None:
        """End, and write the file on rank 0. All ranks call it.

        A rank that cannot reach the others writes a file of its own before it raises their loss; after `shutdown` it
        writes that and raises nothing.
        """
        mine = self._end()
        if not dist.is_initialized():
            self._write_alone(mine)
            return
        ranks: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        try:
            with named("ringdp.timeline"):
                dist.gather_object(mine, ranks)
        except BaseException:
            self._write_alone(mine)
            raise
        if ranks is not None:
            _write_own(self._path, merge(ranks))

    def _end(self) -> dict[str, Any]:
        if self._timeline is None:
            raise InvalidStateError(f"the timeline {self._path} has not begun")
        ended, self._timeline = self._timeline, None
        return timelines().end(ended)

    def __enter__(self) -> timeline:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.stop()
        else:  # the other ranks may not come
            self._write_alone(self._end())

    def _write_alone(self, mine: dict[str, Any]) -> None:
        """Write this rank's own file, where the ranks do not end the timeline together."""
        path = Path(f"{self._path}.rank_{mine['ringdp']['rank']:05d}")
        if _write_own(path, mine):
            _log.warning(
                "the timeline ended without the other ranks: this rank's part is %s; python -m ringdp timeline merges"
                " the ranks' files",
                path,
            )


def _write_own(path: Path, content: Any) -> bool:
    try:
        write(path, content)
    except OSError as error:
        _log.warning("the timeline is lost: %s: %s", path, error)
        return False
    return True


def files_of_ranks(folder: Path) -> list[Path]:
    """The files of RINGDP_TIMELINE in that folder, or else those of timelines that ended without the other ranks."""
    return sorted(folder.glob("rank_*.json")) or sorted(folder.glob("*.rank_[0-9]*"))


def read_rank(path: Path) -> dict[str, Any]:
    """A file that a rank has written. Raises ValueError where it is something else."""
    content = read_json(path)
    about = content.get("ringdp") if isinstance(content, dict) else None
    if not isinstance(about, dict) or not about.keys() >= _ABOUT or not isinstance(content.get("events"), list):
        raise ValueError(f"{path} is not a timeline of a rank")
    return dict(content)


def read_json(path: Path) -> Any:
    """Raises ValueError, with its name, where it is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
