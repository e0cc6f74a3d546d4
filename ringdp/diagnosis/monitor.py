"""Watches the steps of one RingDP: receives all ranks' messages, logs a verdict, and hands each step to the records."""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ringdp.diagnosis.clocks import Clocks, Offset
from ringdp.diagnosis.rank_facts import ATTACHED_BYTES, FACTS_BYTES, FactCounters
from ringdp.diagnosis.records import StepRecords, StepTaken, step_records
from ringdp.diagnosis.remedies import Sent
from ringdp.diagnosis.report import NOTHING_YET, BucketTimes, RankRow, Report, clock_of
from ringdp.diagnosis.split import Split, split
from ringdp.diagnosis.timeline_session import timelines
from ringdp.diagnosis.verdict import COSTLY, Verdict, judge, usual_rate
from ringdp.diagnosis.window import FIELDS, Window, step_of
from ringdp.job.elastic import is_elastic
from ringdp.text import format_time

_log = logging.getLogger("ringdp.report")
_STEP_ENDED, _FACTS_WANTED, _WINDOW_CAME = 1, 2, 4  # of csrc/torch/reducer/step_report.h
_LEAST_PERIOD_S = 1.0  # between two windows that are read unasked: of short steps there are many
_PERIOD_OF_COST = 4000  # and at least so many times what the last look took
_LEAST_LOST_S = 5e-3  # a step; less is no use to anyone
_numbers = itertools.count()  # of the monitors of this process
_REPEAT_S = 300.0  # between two lines that say the same


class Attached(Protocol):
    """A part of the message that the ranks exchange about their steps."""

    def message(self) -> bytes:
        """This rank's, of `ATTACHED_BYTES`, in the forward before the backward that carries it."""

    def receive(self, step: int, gathered: list[bytes]) -> None:
        """By rank; zeros of one that gave none. In the backward after step `step`."""


class Gradients(Protocol):
    """Receives a hash of each rank's gradients."""

    def receive(self, rank: int, step: int, gathered: Sequence[bytes]) -> None:
        """By rank, `ATTACHED_BYTES` of each, at rank `rank`. In the backward after step `step`."""


class StepMonitor:
    """Used by the thread that runs forward.

    Args:
        reducer: the reducer of these steps; where RingDP makes another one it makes another monitor, too.
        group: the group of its ranks.
    """

    def __init__(self, reducer: Any, group: dist.ProcessGroup) -> None:
        from ringdp import _C

        note_optimizers()
        self._reducer, self._report, self._group = reducer, reducer.report, group
        self._view_of = _C.view_of if is_elastic(group) else None
        self._view = 1 if self._view_of is None else self._view_of(group)
        self._traffic = _C.traffic
        self.attached: Attached | None = None
        self.gradients: Gradients | None = None
        self._messages: list[bytes] | None = None
        self._counters = FactCounters()
        self._counters.since_last(self._carried())
        self._clocks = Clocks()
        self._window: Window | None = None
        self._parts: Split | None = None
        self._waited: tuple[int, float] | None = (
            None  # the rank that this one waited for in the window, and seconds a step
        )
        self._judged_last: tuple[Window, Verdict] | None = None
        self._logged: Verdict | None = None
        self._logged_at = 0.0
        self._next_read_at = 0.0
        self._recorded = 0  # the last step that was
        self._records = step_records()
        self._number = next(_numbers)
        self._place = group.rank(), group.size()
        self._sent_before: int = self._traffic()[0]
        self._ratio = 1.0
        self._skipped = 0
        self._verdict: str | None = None
        self._timelines = timelines()
        self._timelines.watch(self)
        if self._records is not None:
            self._records.watch(self)

    def before_forward(self) -> None:
        """At the beginning of each forward that records gradients."""
        if self._view_of is not None and (view := self._view_of(self._group)) != self._view:
            self._view = view
            self.group_replaced(self._group)
        bits: int = self._report.note_forward()
        if bits & _STEP_ENDED:
            self._step_ended()
        if bits & _FACTS_WANTED:
            facts = self._counters.since_last(self._carried()).packed()
            if self.attached is not None:
                facts = facts.ljust(FACTS_BYTES - ATTACHED_BYTES, b"\0") + self.attached.message()
            self._report.set_facts(facts)
        if bits & _WINDOW_CAME:
            self.take()
        if self._messages is not None and time.monotonic() >= self._next_read_at:
            began = time.monotonic()
            self._read()
            ended = time.monotonic()
            self._next_read_at = ended + max(_LEAST_PERIOD_S, _PERIOD_OF_COST * (ended - began))

    def __del__(self) -> None:
        # A model that lives in a function is freed before the process ends.
        records: StepRecords | None = self.__dict__.get("_records")
        if records is not None and records.open:
            self.record_last()

    def record_last(self) -> None:
        """The last step, if it has ended and no forward has followed that recorded it. It is not recorded again."""
        self._step_ended()
        self._recorded = self._reducer.last_step()[0]

    def group_replaced(self, group: dist.ProcessGroup) -> None:
        """Called when the reducer averages over another group from now on."""
        self._group, self._clocks, self._window, self._parts = group, Clocks(), None, None
        self._place = group.rank(), group.size()
        self._logged = self._messages = self._waited = None
        self._counters.forget_links()

    def _step_ended(self) -> None:
        if self._records is None and not self._timelines.active:
            return
        steps, gradient_bytes, finite, row = self._reducer.last_step()
        if steps == self._recorded:
            return
        self._recorded = steps
        if self._records is not None:
            self._skipped += finite is False
            self._record(self._records, steps, gradient_bytes, row)
        if self._timelines.active:
            named = dict(zip(FIELDS, row, strict=True))
            self._timelines.add_step(steps, named, self._report.times(), self._clock())

    def report(self) -> Report:
        """The report of the ranks' last messages. Does not communicate."""
        self._read()
        window, parts = self._window, self._parts
        if window is None or parts is None or window.rows.shape[1] == 0:
            return NOTHING_YET
        verdict = self._judged(window, parts)
        slow_links = _link_shares(window, parts, verdict)
        offsets = self._clocks.offsets()
        rows = []
        for rank, facts in enumerate(window.facts):
            offset = clock_of(offsets, rank)
            link = slow_links * float(parts.communication[rank])
            peer_wait = float(parts.peer_wait[rank])
            between, forward, backward, optimizer = parts.own[rank].tolist()
            rows.append(
                RankRow(
                    rank=rank,
                    host=facts.host,
                    step_s=float(parts.step[rank]),
                    between_s=between,
                    forward_s=forward,
                    backward_s=backward,
                    optimizer_s=optimizer,
                    peer_wait_s=peer_wait,
                    waits_for=int(parts.slowest[rank]) if peer_wait > 0 else None,
                    link_wait_s=link,
                    exposed_s=float(parts.communication[rank]) - link,
                    coding_s=float(parts.coding[rank]),
                    clock_s=offset.seconds,
                    clock_error_s=offset.error_s,
                    memory_bytes=facts.memory_bytes,
                )
            )
        return Report(window.step, window.rows.shape[1], tuple(rows), self._buckets(), verdict)

    def take(self) -> None:
        """Take the ranks' messages, if new ones have come."""
        messages = self._report.take_window()
        if messages is None:
            return
        self._messages = messages
        rank = self._group.rank()
        step = step_of(messages[rank])
        if self.attached is not None:
            self.attached.receive(step, [one[-ATTACHED_BYTES:] for one in messages])
        if self.gradients is not None:
            self.gradients.receive(rank, step, [one[-2 * ATTACHED_BYTES : -ATTACHED_BYTES] for one in messages])

    def _read(self) -> None:
        self.take()
        messages, self._messages = self._messages, None
        if messages is None:
            return
        self._window = Window.unpacked(messages, FACTS_BYTES)
        self._clocks.receive(self._window.stamps, self._window.facts)
        if self._window.rows.shape[1] == 0:
            return
        self._parts = split(self._window)
        rank = self._group.rank()
        self._waited = int(self._parts.slowest[rank]), float(self._parts.peer_wait[rank])
        if rank == 0:
            self._log_verdict(self._window, self._parts)

    def _log_verdict(self, window: Window, parts: Split) -> None:
        step = float(parts.step.mean())
        verdict = self._judged(window, parts)
        lost = verdict.cost if verdict.kind in ("host", "between") else parts.cost
        if lost < COSTLY or lost * step < _LEAST_LOST_S:
            return
        if verdict.kind == "none" or (verdict.same_as(self._logged) and time.monotonic() - self._logged_at < _REPEAT_S):
            return
        self._logged, self._logged_at = verdict, time.monotonic()
        self._verdict = str(verdict)
        _log.warning(
            "step %d: %.0f %% of a step of %s is not computing. %s%s",
            window.step,
            100 * lost,
            format_time(step),
            verdict.text,
            f"\nRemedy: {verdict.remedy}." if verdict.remedy else "",
        )

    def _judged(self, window: Window, parts: Split) -> Verdict:
        """Once for each window."""
        if self._judged_last is None or self._judged_last[0] is not window:
            self._judged_last = window, judge(window, parts, functools.partial(self._sent, parts))
        return self._judged_last[1]

    def _sent(self, parts: Split) -> Sent:
        assert self._window is not None
        stats: Mapping[str, Any] = self._report.stats()
        rows = self._report.bucket_rows()
        hosts = Counter(facts.host for facts in self._window.facts)
        return Sent(
            bytes=sum(row["bytes_before"] for row in rows),
            coded_bytes=sum(row["bytes_after"] for row in rows),
            buckets=int(stats["buckets"]),
            on_its_way_s=float(self._window.field("on_its_way").mean()),
            per_host=tuple(hosts.values()),
        )

    def _buckets(self) -> tuple[BucketTimes, ...]:
        """Of the last step, with what the engine has recorded of their operations."""
        from ringdp import _C

        began, ended = (self._report.times()[name] for name in ("launched_ns", "finished_ns"))
        recorded = {
            one.name.split(":")[0]: one
            for one in _C.operations()
            if one.ended_ns and began <= one.queued_ns <= ended and one.name.startswith("bucket ")
        }
        algorithms = {one["number"]: one["name"] for one in _C.algorithms()}
        return tuple(
            _bucket_times(row, recorded.get(f"bucket {row['index']}"), algorithms, began)
            for row in self._report.bucket_rows()
        )

    def _clock(self) -> Offset:
        return clock_of(self._clocks.offsets(), self._group.rank())

    def _record(self, records: StepRecords, step: int, gradient_bytes: int, row: list[float]) -> None:
        """The step that has ended. What takes time is done by the thread of the records."""
        if step in (2, 12) or step % 200 == 0:  # it takes a while for many parameters
            rows = self._report.bucket_rows()
            coded = sum(one["bytes_after"] for one in rows)
            self._ratio = sum(one["bytes_before"] for one in rows) / coded if coded else 1.0
        sent: int = self._traffic()[0]
        verdict, self._verdict = self._verdict, None
        taken = StepTaken(
            time.time(),
            *self._place,
            self._number,
            step,
            row,
            gradient_bytes,
            max(sent - self._sent_before, 0),
            sent,
            self._ratio,
            self._skipped,
            self._waited,
            verdict,
        )
        self._sent_before = sent
        records.add(taken.record)

    def _carried(self) -> Mapping[int, tuple[int, float, float, int]]:
        from ringdp import _C

        return _C.carried(self._group)


def _bucket_times(row: Mapping[str, Any], record: Any, algorithms: Mapping[int, str], began_ns: int) -> BucketTimes:
    def since(at_ns: int | None) -> float | None:
        return (at_ns - began_ns) * 1e-9 if at_ns else None

    came = [] if record is None else [flow for flow in record.flows if not flow.sends and flow.first_ns]
    return BucketTimes(
        name=row["name"],
        algorithm="" if record is None else algorithms.get(record.algorithm, ""),
        bytes=row["bytes_before"],
        ratio=row["bytes_before"] / row["bytes_after"] if row["bytes_after"] else 1.0,
        ready_s=row["launched_s"],
        sent_s=None if record is None else since(record.started_ns),
        first_byte_s=since(min((flow.first_ns for flow in came), default=None)),
        last_byte_s=since(max((flow.last_ns for flow in came), default=None)),
        reduced_s=row["launched_s"] + row["seconds"],
        exposed_s=row["exposed_s"],
    )


def _link_shares(window: Window, parts: Split, verdict: Verdict) -> float:
    """The share of communication that a slow link causes: the time that the others' speed would have saved."""
    if verdict.kind != "link" or verdict.rank is None:
        return 0.0
    usual = usual_rate([facts for facts in window.facts if facts.link_to >= 0])
    return max(0.0, 1 - window.facts[verdict.rank].rate / usual) if usual > 0 else 0.0


class _OptimizerHook:
    """Tells the reducers when an optimizer's step has ended; one for the process."""

    registered = False

    def __call__(self, *_: object) -> None:
        if torch.compiler.is_compiling():
            return
        from ringdp import _C

        _C.note_optimizer()


def note_optimizers() -> None:
    """Count each optimizer's step of this process from now on."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    if not _OptimizerHook.registered:
        _OptimizerHook.registered = True
        register_optimizer_step_post_hook(_OptimizerHook())
