"""The agreement of a BalancedSampler's ranks: on its arguments when it is made, and on new splits while it is used.

Every 20 steps a rank sends its pace, and the first batch that it will not draw before it has the others'; training does
not wait for them. A new split counts from the first batch that no rank has drawn. A rank whose DataLoader comes to that
batch before the others' reports have come waits for them there: they are in flight, since all ranks send at the same
step.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from ringdp.data.plans import Plan, Plans
from ringdp.data.settings import Settings, why_no_split
from ringdp.data.speed import STEPS_BETWEEN_CHANGES, Measured, SpeedModel, worth_it
from ringdp.data.split import Pace, RankLimits, shares, split
from ringdp.errors import InvalidStateError, MismatchError
from ringdp.job.agreement import checked_alike
from ringdp.job.backend import named
from ringdp.job.background_gather import BackgroundGather, group_for_background
from ringdp.job.byte_collectives import all_gather_bytes
from ringdp.job.elastic import as_unit, is_elastic
from ringdp.text import ranks_by_number

_log = logging.getLogger("ringdp.data")
_COMPARING = "comparing samplers"
_FIRST_STEP = 10
STEPS_BETWEEN = 20
_AHEAD = 8  # batches that may be drawn before the answers have come
_PACKED = struct.Struct("<4d4qI")


def compare_settings(checked: Callable[[], Settings], group: dist.ProcessGroup | None) -> Settings:
    """The settings, which are the same on all ranks.

    Raises:
        InvalidArgumentError: this rank's cannot be used; the others raise MismatchError with its text.
        MismatchError: another rank's cannot be used, or differ; names the first difference.
    """

    def compare() -> Settings:
        return checked_alike(
            checked,
            Settings.lines,
            group,
            operation=_COMPARING,
            what="sampler",
            doing="make its BalancedSampler",
            words=lambda one, mine, theirs: (
                f"the ranks' BalancedSamplers differ: {mine.partition(': ')[0]} is {mine.partition(': ')[2]} on rank"
                f" {one.rank} and {theirs.partition(': ')[2]} on rank {one.peer}. Give all ranks the same arguments."
            ),
        )

    return compare() if group is None else as_unit(group, _COMPARING, compare)


def gather_in_unit(data: bytes, group: dist.ProcessGroup, what: str) -> list[bytes]:
    """Every rank's bytes, equally many, in the order of the ranks that are left."""

    def gather() -> list[bytes]:
        with named(what):
            return all_gather_bytes(data, group, room=len(data))

    return as_unit(group, what, gather)


@dataclass(frozen=True)
class Report:
    """A rank's report to the others.

    Attributes:
        measured: its pace.
        work: of a usual batch, over all ranks.
        horizon: the first batch that it promises not to draw before it has the answers.
        step: the step of this report.
        committed: batches that are trained.
        most: samples that it takes at most.
        checksum: of their split.
    """

    measured: Measured
    work: float
    horizon: int
    step: int
    committed: int
    most: int
    checksum: int

    def packed(self) -> bytes:
        pace = self.measured.pace
        return _PACKED.pack(
            pace.seconds,
            pace.overhead,
            self.measured.error,
            self.work,
            self.horizon,
            self.step,
            self.committed,
            self.most,
            self.checksum,
        )

    @classmethod
    def unpacked(cls, data: bytes) -> Report:
        seconds, overhead, error, work, *numbers = _PACKED.unpack(data)
        return cls(Measured(Pace(seconds, overhead), error), work, *numbers)


class Agreement:
    """Of one sampler, under its lock.

    Args:
        plans: get the new splits.
        group: whose ranks agree; None: there is one rank.
    """

    def __init__(self, settings: Settings, plans: Plans, group: dist.ProcessGroup | None) -> None:
        self._settings = settings
        self._plans, self._first = plans, plans.newest
        self._group = group if settings.ranks > 1 else None
        self._in_units = group is not None and is_elastic(group)
        self._background: dist.ProcessGroup | None = None
        self._pending: BackgroundGather | None = None
        self._horizon = 0
        self._drawn = 0  # batches up to this one were drawn at some time
        self._reported_step = 0
        self._changed_step: int | None = None
        self._most = settings.limits.most[self._rank()]

    def _rank(self) -> int:
        return 0 if self._group is None else self._group.rank()

    def take_at_most(self, samples: int) -> None:
        """Limit this rank to `samples` from the next agreed plan on."""
        self._most = min(self._most, samples)

    def before_drawing(self, index: int) -> None:
        """Wait for the answers if batch `index` may belong to a new split."""
        if self._pending is not None and index >= self._horizon:
            self._read()
        self._drawn = max(self._drawn, index + 1)

    def step(self, step: int, committed: int, checksum: int, speed: SpeedModel, work: float) -> None:
        """Send a report after step `step`, in the forward of the next: on all ranks at the same place between their
        operations."""
        if self._group is None or step == self._reported_step or not (step == _FIRST_STEP or step % STEPS_BETWEEN == 0):
            return
        self._read()
        self._reported_step = step
        self._horizon = self._drawn if self._in_units else self._drawn + _AHEAD
        report = Report(speed.measured(), work, self._horizon, step, committed, self._most, checksum).packed()
        what = f"paces of the ranks after step {step}"
        if self._in_units:  # the drawing waits for it: it is under the sampler's lock
            self._decide([Report.unpacked(one) for one in gather_in_unit(report, self._group, what)])
            return
        if self._background is None:
            self._background = group_for_background(self._group, "sampler")
        self._pending = BackgroundGather(report, self._background, what)

    def follow(self, gone: Collection[int], drawn: int) -> int:
        """The ranks of these places are lost: split what no rank has drawn over the others. All of them call it.

        Args:
            drawn: the first batch that this rank has not drawn.

        Returns:
            The first batch of that split, which no rank has drawn.

        Raises:
            InvalidStateError: the others may not take as many samples as a batch has.
        """
        assert self._group is not None
        packed = struct.pack("<q", drawn)
        start = max(
            struct.unpack("<q", one)[0] for one in gather_in_unit(packed, self._group, "the batches that are drawn")
        )
        plan = self._plans.newest.without(gone)
        if (problem := why_no_split(self._settings.batches.size, plan.limits)) is not None:
            raise InvalidStateError(
                f"BalancedSampler: without {ranks_by_number(gone)}, lost on the way, {problem}. Restart with a smaller"
                " global_batch or other limits",
                rank=self._rank(),
                peer=min(gone),
            )
        return self._plans.add(start, plan)

    def _read(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._decide([Report.unpacked(one) for one in pending.wait()])

    def _decide(self, reports: list[Report]) -> None:
        if len(reports) != len(self._plans.newest.places):  # one more was lost: `follow` comes first
            return
        self._compare(reports)
        plan = decide(reports, self._settings, self._plans.newest, self._changed_step)
        if plan is None:
            return
        size = self._settings.batches.size
        if (problem := why_no_split(size, plan.limits)) is not None:
            usual = self._first.without(set(self._first.places) - set(plan.places)).limits.most
            short = [rank for rank, most in enumerate(plan.limits.most) if most < usual[rank]]
            raise InvalidStateError(
                f"BalancedSampler: since rank {short[0]} ran out of memory {problem}. Restart with a smaller"
                " global_batch, more ranks, or a smaller least",
                rank=self._rank(),
                peer=short[0],
                step=reports[0].step,
            )
        start = max(one.horizon for one in reports)
        if plan.paces != self._plans.newest.paces:
            self._changed_step = reports[0].step
        self._plans.add(start, plan)
        if self._rank() == 0:
            counts = split(plan.paces, size, plan.limits, None, size)
            _log.info(
                "batches are split %s from batch %d on: the ranks take %s ms for %s samples",
                "/".join(map(str, counts)),
                start,
                "/".join(f"{pace.time(count) * 1e3:.3g}" for pace, count in zip(plan.paces, counts, strict=True)),
                "/".join(map(str, counts)),
            )

    def _compare(self, reports: list[Report]) -> None:
        me = self._rank()
        mine = reports[me]
        for rank, other in enumerate(reports):
            if (other.step, other.committed) != (mine.step, mine.committed):
                raise MismatchError(
                    f"rank {rank} has trained {other.committed} batches in {other.step} steps, and rank {me}"
                    f" {mine.committed} in {mine.step}: all ranks have to take every batch of their BalancedSampler,"
                    " and to load the same state",
                    rank=me,
                    peer=rank,
                    step=mine.step,
                )
            if other.checksum != mine.checksum:
                raise MismatchError(
                    f"rank {rank} has split the {mine.committed} batches up to step {mine.step} otherwise than rank"
                    f" {me}: does cost= give the same on all ranks?",
                    rank=me,
                    peer=rank,
                    step=mine.step,
                )


def decide(reports: list[Report], settings: Settings, current: Plan, changed_step: int | None) -> Plan | None:
    """A new plan, or None where the current one stays. The same on all ranks.

    Args:
        reports: by rank, of one step.
        changed_step: the step of the reports of which the current paces came.
    """
    limits = RankLimits(current.limits.least, tuple(one.most for one in reports), current.limits.multiple)
    paces = _faster(reports, settings, replace(current, limits=limits), changed_step) or current.paces
    found = replace(current, paces=paces, limits=limits)
    return None if found == current else found


def _faster(
    reports: list[Report], settings: Settings, current: Plan, changed_step: int | None
) -> tuple[Pace, ...] | None:
    """The measured paces, where a split by them is worth a change."""
    if not settings.by_speed:
        return None
    if changed_step is not None and reports[0].step - changed_step < STEPS_BETWEEN_CHANGES:
        return None
    measured, work = [one.measured for one in reports], reports[0].work
    size, limits = settings.batches.size, current.limits

    def parts(paces: Sequence[Pace]) -> Sequence[float]:
        if settings.has_cost:
            return shares(paces, work, [0.0] * len(paces), [work] * len(paces))
        return split(paces, size, limits, None, size)

    if why_no_split(size, limits) is not None or not worth_it(measured, current.paces, parts):
        return None
    return tuple(one.pace for one in measured)
