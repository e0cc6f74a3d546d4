"""The sinks for each step of this process: metrics files, TensorBoard. One `StepRecords` for the process."""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import socket
import threading
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ringdp import config
from ringdp.diagnosis.rank_facts import memory_bytes
from ringdp.diagnosis.window import FIELDS

_log = logging.getLogger("ringdp.metrics")
_MOST_WAITING = 10_000  # records; more are dropped, oldest first
_PERIOD_S = 0.5
_AT_EXIT_S = 5.0

Record = dict[str, Any]

OWN_NAMES = frozenset(
    (
        *("time", "rank", "world", "host", "model", "step", "step_s", "bytes", "sent_bytes", "ratio"),
        "sent_bytes_total",
        *("busbw_bytes_per_s", "skipped", "slow_peer", "slow_peer_s", "verdict", "memory_bytes"),
        *(f"{name}_s" for name in FIELDS),
    )
)
"""The fields of a record; `ringdp.metrics.log` takes other names."""


_SECONDS = tuple(f"{name}_s" for name in FIELDS)
_ON_ITS_WAY = FIELDS.index("on_its_way")
_BLOCKED = FIELDS.index("exposed") + 1  # the first so many fields make a step


class StepTaken(NamedTuple):
    """A step, as the training thread gives it to the records.

    Attributes:
        time: seconds since 1970.
        rank, world: of the group that averages.
        model: its number in this process.
        step: its number.
        row: of `FIELDS`.
        bytes: of gradients.
        sent: bytes of this process, since the step before.
        sent_total: bytes of this process, since it joined the job.
        ratio: of compression.
        skipped: steps so far whose gradients were not finite.
        waited: the rank waited for in the last window, and seconds a step; None: not known yet.
        verdict: the verdict logged since the step before.
    """

    time: float
    rank: int
    world: int
    model: int
    step: int
    row: list[float]
    bytes: int
    sent: int
    sent_total: int
    ratio: float
    skipped: int
    waited: tuple[int, float] | None
    verdict: str | None

    def record(self) -> Record:
        on_its_way = self.row[_ON_ITS_WAY]
        reduced = self.bytes / self.ratio * 2 * (self.world - 1) / self.world
        record: Record = {
            "time": round(self.time, 3),
            "rank": self.rank,
            "world": self.world,
            "host": _host_name(),
            "model": self.model,
            "step": self.step,
            "step_s": round(sum(self.row[:_BLOCKED]), 7),
            **_seconds(self.row),
            "bytes": self.bytes,
            "sent_bytes": self.sent,
            "sent_bytes_total": self.sent_total,
            "ratio": round(self.ratio, 3),
            "busbw_bytes_per_s": round(reduced / on_its_way) if on_its_way > 0 else 0,
            "skipped": self.skipped,
        }
        if self.waited is not None:
            record["slow_peer"], record["slow_peer_s"] = self.waited[0], round(self.waited[1], 7)
        if self.verdict is not None:
            record["verdict"] = self.verdict
        return record


def _seconds(row: list[float]) -> Record:
    return dict(zip(_SECONDS, [round(value, 7) for value in row], strict=True))


@functools.cache
def _host_name() -> str:
    return socket.gethostname()


class Source(Protocol):
    """May have a step that has ended and is not recorded yet."""

    def record_last(self) -> None: ...


class Sink(Protocol):
    """Writes records, on the thread of the `StepRecords`. OSError: it cannot now."""

    def write(self, records: list[Record]) -> None: ...

    def describe(self) -> str: ...


class StepRecords:
    """Hands records to the sinks on a thread of its own, so that no step waits for a disk.

    `add` and `log` are the training's; more than the thread can take are dropped.
    """

    def __init__(self, sinks: list[Sink], rank: int) -> None:
        self.rank = rank
        self._sinks = sinks
        self._waiting: deque[tuple[Callable[[], Record], Record]] = deque(maxlen=_MOST_WAITING)
        self._logged: Record = {}
        self._sources: weakref.WeakSet[Any] = weakref.WeakSet()
        self._failed: set[str] = set()
        self._wake = threading.Event()
        self._ended = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="ringdp-metrics", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def watch(self, source: Source) -> None:
        """Ask it at the end of the process for its last step."""
        self._sources.add(source)

    def log(self, values: Record) -> None:
        """Values that go with the next record."""
        self._logged = {**self._logged, **values}  # the dict of before may be on its way

    def add(self, make: Callable[[], Record]) -> None:
        """The record is made by the thread that writes."""
        logged = self._logged
        if logged:
            self._logged = {}
        self._waiting.append((make, logged))

    @property
    def open(self) -> bool:
        """False once it is closed, and in a process that its own has forked."""
        return not self._ended and os.getpid() == self._pid

    def close(self) -> None:
        """Write the waiting records, for some seconds at most."""
        if not self.open:
            return
        for source in list(self._sources):
            source.record_last()
        self._ended = True
        self._wake.set()
        self._thread.join(_AT_EXIT_S)

    def _run(self) -> None:
        while not self._ended:
            self._wake.wait(_PERIOD_S)
            self._write()
        self._write()  # what came during the last

    def _write(self) -> None:
        if not self._waiting:
            return
        memory = memory_bytes()
        records: list[Record] = []
        for _ in range(len(self._waiting)):
            make, logged = self._waiting.popleft()
            record = make()
            for name, value in logged.items():
                record[name] = self._number(name, value)
            record["memory_bytes"] = memory
            records.append(record)
        for sink in self._sinks:
            try:
                sink.write(records)
            except OSError as error:
                self._lost(sink.describe(), error)

    def _number(self, name: str, value: Any) -> Any:
        """A tensor's number, for which this may wait for a device."""
        if not hasattr(value, "item"):
            return value
        try:
            return value.item()
        except RuntimeError as error:  # of the device, or it has no data
            self._lost(f"'{name}' of ringdp.metrics.log", error)
            return None

    def _lost(self, what: str, error: Exception) -> None:
        """Log each reason once."""
        if what not in self._failed:
            self._failed.add(what)
            _log.warning("metrics of rank %d are lost: %s: %s", self.rank, what, error)


class JsonLines:
    """A line of JSON for each record, in a file of this rank.

    A file that has `most_bytes` gets the name of `earlier`, and the one that had it is gone: a rank keeps at most twice
    as much, and its last steps.
    """

    def __init__(self, folder: Path, rank: int, most_bytes: int = 128 << 20) -> None:
        self._path = folder / f"rank_{rank:05d}.jsonl"
        self._most_bytes = most_bytes
        self._cut = False  # the last line may be a part of one

    def describe(self) -> str:
        return str(self._path)

    def write(self, records: list[Record]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(one, allow_nan=True) + "\n" for one in records)
        cut, self._cut = self._cut, True
        with open(self._path, "a", encoding="utf-8") as file:
            file.write("\n" + text if cut else text)
            size = file.tell()
        self._cut = False
        if size >= self._most_bytes:
            before = earlier(self._path)
            if before.exists():
                _log.info("metrics: %s is full again, the steps in %s are dropped", self._path, before)
            os.replace(self._path, before)


def earlier(file: Path) -> Path:
    """Where the steps are that were in this metrics file before it began anew."""
    return file.with_name(f"{file.name}.1")


class TensorBoard:
    """torch's SummaryWriter: a run for each rank."""

    _LEFT_OUT = frozenset({"time", "rank", "world", "model", "step", "host", "verdict", "slow_peer"})

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder / "tensorboard" / f"rank_{rank:05d}"
        self._writer: Any = None

    def describe(self) -> str:
        return str(self._folder)

    def write(self, records: list[Record]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder), flush_secs=5)
        for one in records:
            for name, value in one.items():
                if name not in self._LEFT_OUT and isinstance(value, int | float):
                    self._writer.add_scalar(f"ringdp/{name}", value, one["step"], walltime=one["time"])
        self._writer.flush()


@functools.cache
def step_records() -> StepRecords | None:
    """The records of this process, by RINGDP_METRICS_DIR; None where it is not set. Made at the first call.

    Raises:
        InvalidArgumentError: RINGDP_TENSORBOARD without the package or without a folder.
    """
    folder = config.metrics_dir()
    if folder is None:
        return None
    launched = config.launch_environment()
    rank = 0 if launched is None else launched.rank
    sinks: list[Sink] = [JsonLines(Path(folder), rank)]
    if config.tensorboard():
        sinks.append(TensorBoard(Path(folder), rank))
    return StepRecords(sinks, rank)
