"""Check, then time: blocks of calls in turns between the contenders; wrong results are not timed."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ringdp.job.backend import traffic_of_process
from ringdp.tools.bench.collectives import COLLECTIVES, Place
from ringdp.tools.bench.contenders import Contender, NotSupported, Work

MOST_CALLS = 2000
"""Of one block, however short they are."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How each row is measured.

    Attributes:
        rounds: blocks of each contender.
        warm_up: calls before the first block.
        calls: of a block; None: as many as `seconds` allow.
        seconds: of all blocks of a contender together.
        check: results are compared again after each block.
    """

    rounds: int = 5
    warm_up: int = 5
    calls: int | None = None
    seconds: float = 0.5
    check: bool = False


@dataclasses.dataclass
class Row:
    """One collective of one size by one contender; times are those of the slowest rank.

    Attributes:
        time_s: the median of the blocks' medians; None where nothing was timed.
        spread: half of the distance between the fastest and the slowest block, over `time_s`.
        calls: that were timed.
        wrong: elements on all ranks that were not right; None where the contender cannot do it.
        error: of a compressor, relative to the exact mean.
        ratio: bytes that an exact all-reduce sends over those that this one sends; None for exact ones.
        why: the contender's reason where it cannot.
    """

    collective: str
    size_bytes: int
    count: int
    dtype: str
    operation: str
    root: int
    contender: str
    time_s: float | None = None
    spread: float | None = None
    calls: int = 0
    algbw: float | None = None
    busbw: float | None = None
    wrong: int | None = None
    error: float | None = None
    ratio: float | None = None
    why: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON; bandwidths are bytes a second."""
        return dataclasses.asdict(self)


def measure(
    collective: str, sizes: Sequence[int], contenders: Sequence[Contender], place: Place, plan: Plan
) -> Iterator[list[Row]]:
    """For each size a row for each contender. Every rank of the job calls this with the same arguments."""
    kind = COLLECTIVES[collective]
    for size_bytes in sizes if collective != "barrier" else [0]:
        rows, works = [], []
        for contender in contenders:
            row, work = _prepared(collective, size_bytes, contender, place)
            rows.append(row)
            if work is not None:
                works.append((row, work))
        timed = [(row, work) for row, work in works if row.wrong == 0]
        _time(timed, plan)
        exact_bytes = None
        for row, work in timed:
            sent = _sent_bytes(work)
            if row.error is None and row.contender == "ring":
                exact_bytes = sent
            elif row.error is not None and sent:
                row.ratio = (exact_bytes or _ring_bytes(row.size_bytes, place.ranks)) / sent
            if row.time_s:
                row.algbw = row.size_bytes / row.time_s
                row.busbw = row.algbw * kind.bus_factor(place.ranks)
        yield rows


def _prepared(collective: str, size_bytes: int, contender: Contender, place: Place) -> tuple[Row, Work | None]:
    """A row with the checked result, and the call to be timed; None where it is not to be timed."""
    kind = COLLECTIVES[collective]
    name = str(place.dtype).removeprefix("torch.")
    operation, root = place.operation if kind.reduces else "none", place.root if kind.rooted else -1
    row = Row(collective, size_bytes, 0, name, operation, root, contender.name)
    try:
        work = contender.work(kind, size_bytes, place)
        row.size_bytes, row.count = work.task.size_bytes, work.task.count
        found = work.verify()
    except NotSupported as error:
        row.why = str(error)
        return row, None
    row.wrong, row.error = _everywhere(found.wrong), found.error
    return row, work


def _time(timed: Sequence[tuple[Row, Work]], plan: Plan) -> None:
    calls = []
    for _, work in timed:
        work.reset()
        begin = time.perf_counter()
        for _ in range(max(1, plan.warm_up)):
            work.before()
            work.call()
        each_s = _slowest([(time.perf_counter() - begin) / max(1, plan.warm_up)])[0]
        calls.append(plan.calls or max(1, min(MOST_CALLS, int(plan.seconds / plan.rounds / max(each_s, 1e-9)))))
    medians: list[list[float]] = [[] for _ in timed]
    for number in range(plan.rounds):
        order = range(len(timed)) if number % 2 == 0 else reversed(range(len(timed)))
        for i in order:
            row, work = timed[i]
            work.reset()
            dist.barrier()
            medians[i] += _slowest([statistics.median(_block(work, calls[i]))])
            row.calls += calls[i]
            if plan.check:
                row.wrong = (row.wrong or 0) + _everywhere(work.verify().wrong)
    for (row, _), found in zip(timed, medians, strict=True):
        if row.wrong == 0:
            row.time_s = statistics.median(found)
            row.spread = (max(found) - min(found)) / 2 / row.time_s


def _block(work: Work, calls: int) -> list[float]:
    found = []
    for _ in range(calls):
        work.before()
        begin = time.perf_counter()
        work.call()
        found.append(time.perf_counter() - begin)
    return found


def _slowest(values: Sequence[float]) -> list[float]:
    together = torch.tensor(values, dtype=torch.float64, device="cpu")
    dist.all_reduce(together, op=dist.ReduceOp.MAX)
    return [float(it) for it in together]


def _everywhere(wrong: int) -> int:
    together = torch.tensor([wrong], dtype=torch.int64, device="cpu")
    dist.all_reduce(together)
    return int(together)


def _sent_bytes(work: Work) -> int:
    """Bytes that all ranks send over ring in one call; 0 for another backend's."""
    work.before()
    before = traffic_of_process().bytes_sent
    work.call()
    sent = torch.tensor([traffic_of_process().bytes_sent - before], dtype=torch.int64, device="cpu")
    dist.all_reduce(sent)
    return int(sent)


def _ring_bytes(size_bytes: int, ranks: int) -> int:
    return 2 * (ranks - 1) * size_bytes
