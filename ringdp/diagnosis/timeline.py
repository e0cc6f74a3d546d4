"""The timeline of a job: the operations of each rank over time, as a trace that Perfetto and chrome://tracing open.

Each rank collects its own events, bounded, and writes a file; `merge` puts the files of all ranks, and traces of
torch.profiler, on one clock. The format is Chrome's trace event format; timestamps count from the same origin as those
of torch.profiler.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringdp.errors import InvalidArgumentError

Event = dict[str, Any]
_MOST_EVENTS = 200_000  # of a rank; about 40 MB
_LEAST_WORK_NS = 2_000  # of all pieces of a flow: less is moving bytes about
_QUARTER_S = 7_889_238  # of a year: torch.profiler's timestamps count from the last multiple of it (libkineto)
_TRAINING, _OPERATIONS, _TO, _FROM = 0, 1_000, 1_000_000, 2_000_000  # numbers of tracks, of which there may be several
_LAST_BYTES, _ENCODE, _REDUCE = 500, 600, 700  # of the tracks of operations
_PHASES = {"after": "optimizer", "between": "between steps (data loading)", "forward": "forward"}


def origin_ns(at_ns: int) -> int:
    """From where timestamps count, ns since 1970."""
    return at_ns // 10**9 // _QUARTER_S * _QUARTER_S * 10**9


@dataclass(frozen=True)
class Clock:
    """The conversion of this rank's times to those of the trace.

    Attributes:
        to_epoch_ns: what is added to time.monotonic_ns().
        offset_ns: this rank's monotonic clock minus rank 0's; None: not known.
        error_ns: the largest error of that.
    """

    to_epoch_ns: int
    offset_ns: int | None = None
    error_ns: int | None = None

    @classmethod
    def here(cls, offset_s: float | None, error_s: float) -> Clock:
        to_epoch = time.time_ns() - time.monotonic_ns()
        return cls(to_epoch) if offset_s is None else cls(to_epoch, round(offset_s * 1e9), round(error_s * 1e9))


class Lanes:
    """Tracks of things that may overlap: each goes to the first track of its kind that is free."""

    def __init__(self) -> None:
        self._busy_until: dict[int, list[int]] = {}

    def take(self, kind: int, begin_ns: int, end_ns: int) -> int:
        lanes = self._busy_until.setdefault(kind, [])
        for number, until in enumerate(lanes):
            if until <= begin_ns:
                lanes[number] = end_ns
                return kind + number
        lanes.append(end_ns)
        return kind + len(lanes) - 1


class Timeline:
    """Of one rank. Used by the training thread; the oldest events go when there are too many.

    Args:
        rank: of the job.
        algorithms: their names by number.
    """

    def __init__(self, rank: int, algorithms: Mapping[int, str], most_events: int = _MOST_EVENTS) -> None:
        self.rank = rank
        self._algorithms = algorithms
        self._events: deque[Event] = deque(maxlen=most_events)
        self._lanes = Lanes()
        self.left_out = 0

    def add_step(self, step: int, row: Mapping[str, float], times: Mapping[str, int]) -> None:
        """A step that has ended: where its time went, and its instants in ns of the monotonic clock."""
        begin = times["began_ns"]
        for name in ("forward", "between", "after"):
            length = round(row[name] * 1e9)
            self._slice(_TRAINING, _PHASES[name], begin - length, begin, step=step)
            begin -= length
        self._slice(_TRAINING, "backward", times["began_ns"], times["computed_ns"], step=step)
        self._slice(_TRAINING, "wait for the buckets", times["computed_ns"], times["finished_ns"], step=step)

    def add_operations(self, records: Iterable[Any], groups: Mapping[int, str], lost: int) -> None:
        """Operations that have ended, of `ringdp._C.operations_since`."""
        self.left_out += lost
        for record in records:
            if record.started_ns and record.ended_ns:
                self._add_operation(record, groups.get(record.group, str(record.group)))

    def _add_operation(self, record: Any, group: str) -> None:
        name = record.name or record.text
        about = {
            "operation": record.text,
            "group": group,
            "sequence": record.sequence,
            "bytes": record.bytes,
            "algorithm": self._algorithms.get(record.algorithm, str(record.algorithm)),
            "peers": sorted({flow.peer for flow in record.flows}),
        }
        track = self._lanes.take(_OPERATIONS, record.queued_ns, record.ended_ns)
        if record.name.startswith("bucket "):
            ready = {"name": f"{name.split(':')[0]} ready", "ph": "i", "s": "t", "tid": track, "ts": record.queued_ns}
            self._events.append(ready)
        self._slice(track, f"queued: {name}", record.queued_ns, record.started_ns)
        self._slice(track, name, record.started_ns, record.ended_ns, **about)
        seen: dict[tuple[int, bool], int] = {}
        last_byte = record.started_ns
        for flow in record.flows:
            if not flow.first_ns or flow.total == 0:
                continue
            number = seen[flow.peer, flow.sends] = seen.get((flow.peer, flow.sends), -1) + 1
            ends = (self.rank, flow.peer) if flow.sends else (flow.peer, self.rank)
            arrow = _arrow_id(f"{group}:{record.sequence}:{ends[0]}:{ends[1]}:{number}")
            kind = (_TO if flow.sends else _FROM) + 100 * flow.peer
            verb = f"{'send to' if flow.sends else 'receive from'} rank {flow.peer}: {name}"
            end_ns = max(flow.last_ns, flow.first_ns + 1)  # a single frame has no duration, and its arrow needs a slice
            if flow.sends:
                track = self._lanes.take(kind, flow.first_ns, end_ns)
            else:
                begin_ns = min(record.started_ns, flow.first_ns)  # what came early waited for the operation
                track = self._lanes.take(kind, begin_ns, end_ns)
                self._slice(track, f"wait for rank {flow.peer}", begin_ns, flow.first_ns, operation=name)
                last_byte = max(last_byte, flow.last_ns)
            self._slice(track, verb, flow.first_ns, end_ns, bytes=flow.moved)
            self._add_work(flow, name, coded=about["algorithm"] == "compressed")
            at = (
                flow.first_ns if flow.sends else max(flow.first_ns, flow.last_ns - 1000)
            )  # inside its slice, rounded too
            end = {
                "name": "bytes",
                "cat": "ring",
                "ph": "s" if flow.sends else "f",
                "id": arrow,
                "tid": track,
                "ts": at,
            }
            self._events.append(end if flow.sends else {**end, "bp": "e"})
        if any(not flow.sends for flow in record.flows) and last_byte > record.started_ns:
            own = self._lanes.take(_OPERATIONS + _LAST_BYTES, last_byte, record.ended_ns)
            self._slice(own, f"reduce the last bytes: {name}", last_byte, record.ended_ns)

    def _add_work(self, flow: Any, name: str, coded: bool) -> None:
        """From the first piece of what was computed on a flow's bytes to the last."""
        if flow.work_ns < _LEAST_WORK_NS:
            return
        kind = _ENCODE if flow.sends and coded else _REDUCE
        if not flow.sends:
            words = f"{'decode' if coded else 'reduce'} what came from rank {flow.peer}"
        elif coded:
            words = f"encode for rank {flow.peer}"
        else:  # the sum overwrites its operand, and waits until that has left
            words = f"reduce after sending to rank {flow.peer}"
        track = self._lanes.take(_OPERATIONS + kind, flow.work_first_ns, flow.work_last_ns)
        working_us = flow.work_ns / 1e3
        self._slice(track, f"{words}: {name}", flow.work_first_ns, flow.work_last_ns, working_us=working_us)

    def _slice(self, track: int, name: str, begin_ns: int, end_ns: int, **about: Any) -> None:
        if end_ns <= begin_ns:
            return
        event: Event = {"name": name, "ph": "X", "tid": track, "ts": begin_ns, "dur": end_ns - begin_ns}
        self._events.append({**event, "args": about} if about else event)

    def as_dict(self, clock: Clock, host: str) -> dict[str, Any]:
        """The content of a rank's file: its events in ns of its own clock, and the clock's difference to others."""
        about = {"rank": self.rank, "host": host, "left_out": self.left_out, **clock.__dict__}
        return {"ringdp": about, "events": list(self._events)}


def track_name(track: int) -> str:
    if track < _OPERATIONS:
        return "training"
    if track < _TO:
        kind = (track - _OPERATIONS) // 100 * 100
        return {_LAST_BYTES: "last bytes", _ENCODE: "encode", _REDUCE: "reduce"}.get(kind, "operations")
    return f"{'to' if track < _FROM else 'from'} rank {track % 1_000_000 // 100}"


def _arrow_id(what: str) -> int:
    """The same on both ranks. Perfetto takes numbers only, and JavaScript's have 53 bits."""
    return int.from_bytes(hashlib.blake2b(what.encode(), digest_size=6).digest(), "little")


def merge(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The trace of all ranks, on rank 0's clock, from the `as_dict` of each.

    Raises:
        InvalidArgumentError: there is nothing to merge.
    """
    if not ranks:
        raise InvalidArgumentError("there is no timeline to merge")
    ordered = sorted(ranks, key=lambda one: one["ringdp"]["rank"])
    first = ordered[0]["ringdp"]
    origin = origin_ns(first["to_epoch_ns"] + max([event["ts"] for event in ordered[0]["events"]], default=0))
    events: list[Event] = []
    clocks = {}
    for one in ordered:
        about = one["ringdp"]
        rank, offset = about["rank"], about["offset_ns"]
        # On rank 0's clock; where that difference is not known, by the hosts' clocks of the day.
        shift = (about["to_epoch_ns"] if offset is None else first["to_epoch_ns"] - offset) - origin
        clocks[f"rank {rank}"] = {"error_ns": about["error_ns"], "left_out": about["left_out"]}
        events.append(
            {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank} ({about['host']})"}}
        )
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        for track in sorted({event["tid"] for event in one["events"]}):
            name = {"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": track_name(track)}}
            order = {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": track, "args": {"sort_index": track}}
            events += [name, order]
        for event in one["events"]:
            moved = {**event, "pid": rank, "ts": (event["ts"] + shift) / 1e3}
            if "dur" in event:
                moved["dur"] = event["dur"] / 1e3
            events.append(moved)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": origin,
        "ringdp": clocks,
    }


def beside(trace: dict[str, Any], profiles: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """The trace with torch.profiler's beside it, on the hosts' clocks; of each a name and what its file holds."""
    events = list(trace["traceEvents"])
    for number, (name, profile) in enumerate(profiles):
        shift = (profile.get("baseTimeNanoseconds", trace["baseTimeNanoseconds"]) - trace["baseTimeNanoseconds"]) / 1e3
        base = 10_000_000 * (number + 1)
        for event in profile["traceEvents"]:
            moved = dict(event)
            if "ts" in moved:
                moved["ts"] += shift
            if isinstance(moved.get("pid"), int):
                moved["pid"] += base
            if moved.get("name") == "process_name":
                moved["args"] = {"name": f"torch.profiler {name}"}
            events.append(moved)
    return {**trace, "traceEvents": events}


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file)
