"""The limits of the table of algorithms for a simulated place; ``benchmarks tune`` measures them on a real one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from ringdp.config.tuning import FORMAT, Tuning
from ringdp.costs import DIRECT_RANKS
from ringdp.errors import InvalidArgumentError, SystemResourceError
from ringdp.tools.algorithm_table import best_limit, fold_limit
from ringdp.tools.simulate import outcome
from ringdp.tools.simulate.place import Place

SIZES = tuple(1 << exponent for exponent in range(10, 26))
"""Bytes at which a limit may lie."""

_HOPELESS = 2.0  # times as long as the other one: larger sizes are not tried


def limits(place: Place, tuning: Tuning) -> dict[str, int]:
    """Names and values of limits, for all-reduces of float32 in that layout.

    A limit is the size at which going over from one algorithm to the next costs least over all sizes.

    Raises:
        InvalidArgumentError: one rank, or hosts so far apart that no limit counts.
    """
    if place.ranks < 2:
        raise InvalidArgumentError("--tune needs two ranks")
    if outcome.is_far(place, tuning):
        raise InvalidArgumentError("--tune: hosts that are far apart exchange in pairs at any size: there is no limit")
    direct = place.ranks <= max(2, _direct_ranks(place, tuning))
    large = "two_level" if place.layout == "several_ranks_per_host" else "ring"
    found: dict[str, int] = {}
    beyond = {size: _seconds(place, size, large) for size in SIZES}
    even = len({host.ranks for host in place.hosts}) == 1
    if even:
        halved = {size: _seconds(place, size, "halving") for size in SIZES}
        limit = best_limit({size: (halved[size], beyond[size]) for size in SIZES})
        found["halving_rank_bytes"] = -(-limit // place.ranks)
        beyond = {size: halved[size] if size <= limit else beyond[size] for size in SIZES}
    if direct and place.layout == "one_rank_per_host" and place.ranks > 2:
        in_pairs = {size: _seconds(place, size, "pairwise") for size in SIZES}
        found["pairwise_bytes"] = best_limit({size: (in_pairs[size], beyond[size]) for size in SIZES})
        beyond = {size: in_pairs[size] if size <= found["pairwise_bytes"] else beyond[size] for size in SIZES}
    if even and not direct:  # a tree takes as long as halving for small buffers
        return found
    times = {}
    for size in SIZES:
        times[size] = (_seconds(place, size, "fold" if direct else "tree"), beyond[size])
        if times[size][0] > _HOPELESS * times[size][1]:
            break
    limit = best_limit(times)
    if place.ranks == 2:
        found["fold_two_ranks_bytes"] = limit
    else:
        found["fold_sent_bytes"] = fold_limit(limit, place.ranks, direct=direct)
    return found


def write(path: Path, place: Place, found: Mapping[str, int], words: str) -> None:
    """A file of RINGDP_TUNING. Raises SystemResourceError."""
    content = {"ringdp_tuning": FORMAT, "machine": words, "layouts": {place.layout: dict(found)}}
    try:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise SystemResourceError(f"{path}: {error.strerror}") from None


def _direct_ranks(place: Place, tuning: Tuning) -> int:
    return tuning.limits.get(f"{place.layout}.direct_ranks", DIRECT_RANKS)


def _seconds(place: Place, size_bytes: int, algorithm: str) -> float:
    found = outcome.simulate(place, size_bytes, algorithm)
    if found.seconds is None:
        raise InvalidArgumentError(f"--tune: {found.why_not}")
    return found.seconds
