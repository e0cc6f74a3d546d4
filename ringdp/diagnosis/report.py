"""The result of `RingDP.report`: the last steps of all ranks, the buckets of this one, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ringdp.diagnosis.clocks import Offset
from ringdp.diagnosis.verdict import Verdict
from ringdp.text import cut, format_size, format_time, short_table, table


@dataclass(frozen=True)
class RankRow:
    """Where a rank's step goes; means over the steps of the report, in seconds. Of all but `coding_s` the sum is
    `step_s`.

    Attributes:
        rank, host: the rank and its host.
        step_s: the whole step.
        between_s: after the optimizer and before the forward: data loading, evaluation, logging.
        forward_s: the forward and the loss.
        backward_s: to the last gradient.
        optimizer_s: from the end of the last backward to the end of the optimizer.
        peer_wait_s: waiting for a rank that computes longer.
        waits_for: that rank; None: it waits for none.
        link_wait_s: waiting for the slow link that the verdict names.
        exposed_s: waiting for communication beyond that.
        coding_s: of the last two, about, encoding and decoding.
        clock_s: this rank's clock minus rank 0's; None: not known yet.
        clock_error_s: the largest error of that.
        memory_bytes: resident memory.
    """

    rank: int
    host: str
    step_s: float
    between_s: float
    forward_s: float
    backward_s: float
    optimizer_s: float
    peer_wait_s: float
    waits_for: int | None
    link_wait_s: float
    exposed_s: float
    coding_s: float
    clock_s: float | None
    clock_error_s: float
    memory_bytes: int


@dataclass(frozen=True)
class BucketTimes:
    """One bucket of this rank in its last step. Times are in seconds since that step's first bucket was ready.

    Attributes:
        name: its number and parameters.
        algorithm: what reduced it.
        bytes: of its gradients.
        ratio: how many times smaller its codes are; 1.0: it is not compressed.
        ready_s: all its gradients were there.
        sent_s: its turn had come; None: not recorded.
        first_byte_s: the first byte of another rank came; None: not recorded.
        last_byte_s: the last one came; None: not recorded.
        reduced_s: the mean was there.
        exposed_s: for which the end of backward waited for it.
    """

    name: str
    algorithm: str
    bytes: int
    ratio: float
    ready_s: float
    sent_s: float | None
    first_byte_s: float | None
    last_byte_s: float | None
    reduced_s: float
    exposed_s: float


@dataclass(frozen=True)
class Report:
    """Prints as tables, with the verdict above.

    Attributes:
        step: the last step that it covers; 0: the ranks have not exchanged any message yet.
        steps: how many.
        ranks: a row for each rank.
        buckets: a row for each bucket of this rank.
        verdict: the largest cost; None: no message has come yet.
    """

    step: int
    steps: int
    ranks: tuple[RankRow, ...]
    buckets: tuple[BucketTimes, ...]
    verdict: Verdict | None

    def __str__(self) -> str:
        if self.verdict is None:
            return "No report yet: the ranks exchange their times after 10 steps (one rank alone never)."
        parts = [str(self.verdict), self._split(), self._clocks(), self._buckets()]
        return "\n\n".join(part for part in parts if part)

    def _split(self) -> str:
        columns = [
            f"steps {self.step - self.steps + 1} to {self.step}",
            "step",
            "between",
            "forward",
            "backward",
            "optimizer",
            "slow peer",
            "slow link",
            "exposed",
            "coding",
        ]
        rows = [
            [
                f"rank {one.rank}",
                *map(_time, (one.step_s, one.between_s, one.forward_s, one.backward_s, one.optimizer_s)),
                _time(one.peer_wait_s) + ("" if one.waits_for is None else f" ({one.waits_for})"),
                *map(_time, (one.link_wait_s, one.exposed_s, one.coding_s)),
            ]
            for one in self.ranks
        ]
        return table(columns, rows)

    def _clocks(self) -> str:
        known = [one for one in self.ranks if one.clock_error_s > 0 and one.clock_s is not None]
        if not known:
            return ""
        shown = [f"rank {one.rank} {one.clock_s * 1e3:+.3f} ms (± {one.clock_error_s * 1e3:.3f})" for one in known]  # type: ignore[operator]
        return "clocks against rank 0's: " + ", ".join(shown)

    def _buckets(self) -> str:
        rows = [
            [
                cut(one.name, 40),
                one.algorithm,
                format_size(one.bytes),
                "" if one.ratio == 1 else f"{one.ratio:.1f}",
                *map(_time, (one.ready_s, one.sent_s, one.first_byte_s, one.last_byte_s, one.reduced_s, one.exposed_s)),
            ]
            for one in self.buckets
        ]
        columns = ["bucket", "algorithm", "bytes", "ratio", "ready", "sent", "first", "last", "reduced", "exposed"]
        return short_table(columns, rows) if rows else ""


def _time(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return "0" if seconds < 5e-7 else format_time(seconds)


NOTHING_YET = Report(0, 0, (), (), None)


def clock_of(offsets: Sequence[Offset], rank: int) -> Offset:
    return offsets[rank] if rank < len(offsets) else Offset(None, float("inf"))
