"""How long collectives of ``ring`` should take, for torch's time estimation: the cost model's answer.

Only all-reduces have a choice of algorithms, so only they are in `cost_model`; the others' terms are here, in the same
words and from the same sources.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from ringdp import costs as cost_model
from ringdp.config import RingConfig
from ringdp.costs import AlgorithmCosts, HostLayout, Work

Operation = tuple[str, str, str, int]
"""Collective, algorithm, type of the elements, bytes of one rank's share: its input; of a reduce-scatter its output."""


def estimated_us(operations: Sequence[Operation], hosts: Sequence[int]) -> float:
    """The microseconds of the operations one after another, by the model, with RINGDP_TUNING's constants.

    A compressed all-reduce counts as an exact one. Ranks that wait for a late one are not in the model.

    Args:
        hosts: the number of each rank's host, ``[ranks]``.
    """
    counts = Counter(hosts)
    place = HostLayout(tuple(counts[host] for host in sorted(counts)), len(os.sched_getaffinity(0)))
    costs = AlgorithmCosts(**RingConfig.from_environment().tuning.costs)
    return sum(work(*operation, place=place).seconds(costs, place) for operation in operations) * 1e6


def work(collective: str, algorithm: str, dtype: str, size_bytes: int, *, place: HostLayout) -> Work:
    """The model's terms of one operation."""
    if place.ranks == 1:
        return Work()
    if collective == "all_reduce":
        known = algorithm if algorithm in cost_model.ALGORITHMS else "pairwise"
        return cost_model.work(known, place, size_bytes, dtype=dtype)
    return _COLLECTIVES[collective](place, float(size_bytes))


def _steps(place: HostLayout, steps: float, sent: float, leaving: float, added: float = 0.0) -> Work:
    """`steps` messages in a row; a rank sends `sent` bytes, and `leaving` leave the busiest host."""
    several = len(place.per_host) > 1
    return Work(
        local_messages=0 if several else steps,
        remote_messages=steps if several else 0,
        local_bytes=sent if max(place.per_host) > 1 else 0.0,
        link_bytes=leaving if several else 0.0,
        added_bytes=added,
        rank_bytes=sent,
    )


def _outside(place: HostLayout) -> int:
    """Of all ordered pairs of ranks, those that cross the busiest host's link in one direction."""
    return max(count * (place.ranks - count) for count in place.per_host)


def _all_gather(place: HostLayout, size: float) -> Work:
    sent = (place.ranks - 1) * size
    return _steps(place, place.ranks - 1, sent, sent)


def _reduce_scatter(place: HostLayout, size: float) -> Work:
    sent = (place.ranks - 1) * size
    return _steps(place, place.ranks - 1, sent, sent, added=sent)


def _broadcast(place: HostLayout, size: float) -> Work:
    """A chain in pieces: the last rank has everything some messages after the first one."""
    return _steps(place, place.ranks - 1, size, size)


def _reduce(place: HostLayout, size: float) -> Work:
    return _steps(place, place.ranks - 1, size, size, added=size)


def _rooted(place: HostLayout, size: float) -> Work:
    """A gather or a scatter: the root's link carries everything."""
    total = (place.ranks - 1) * size
    return _steps(place, place.ranks - 1, total, (place.ranks - min(place.per_host)) * size)


def _all_to_all(place: HostLayout, size: float) -> Work:
    piece = size / place.ranks
    return _steps(place, place.ranks - 1, (place.ranks - 1) * piece, _outside(place) * piece)


def _barrier(place: HostLayout, size: float) -> Work:
    return _steps(place, math.ceil(math.log2(place.ranks)), 0.0, 0.0)


def _message(place: HostLayout, size: float) -> Work:
    return _steps(place, 1, size, size)


_COLLECTIVES: Mapping[str, Callable[[HostLayout, float], Work]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _rooted,
    "scatter": _rooted,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
    "send": _message,
    "recv": _message,
}
