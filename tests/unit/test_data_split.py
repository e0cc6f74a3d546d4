"""How a global batch is split: laws over any ranks, paces, limits and costs. No torch, no ranks."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringdp.data.split import Pace, RankLimits, counts, shares, split

PACES = st.builds(Pace, seconds=st.floats(0.01, 100), overhead=st.floats(0, 50))


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Pace], int, RankLimits]:
    """Paces, a global batch, and limits that it can be split within."""
    paces = draw(st.lists(PACES, min_size=1, max_size=8))
    multiple = draw(st.integers(1, 8))
    least = draw(st.tuples(*[st.integers(0, 20)] * len(paces)))
    units = [-(-low // multiple) for low in least]
    room = draw(st.tuples(*[st.integers(0, 10)] * len(paces)))
    total = sum(units) + draw(st.integers(0, sum(room)))
    most = tuple((low + more) * multiple + multiple - 1 for low, more in zip(units, room, strict=True))
    return paces, total * multiple, RankLimits(least, most, multiple)


@given(cases())
def test_a_split_sums_to_the_batch_and_keeps_limits_and_multiples(case: tuple[list[Pace], int, RankLimits]) -> None:
    paces, size, limits = case
    parts = split(paces, size, limits, None, size)
    assert sum(parts) == size
    for part, low, high in zip(parts, limits.least, limits.most, strict=True):
        assert low <= part <= high
        assert part % limits.multiple == 0


@given(cases(), st.data())
def test_a_split_by_cost_keeps_the_same_laws(case: tuple[list[Pace], int, RankLimits], data: st.DataObject) -> None:
    paces, size, limits = case
    costs = data.draw(st.lists(st.floats(0, 1000), min_size=size, max_size=size))
    parts = split(paces, size, limits, costs, size)
    assert sum(parts) == size
    assert all(low <= it <= high for it, low, high in zip(parts, limits.least, limits.most, strict=True))
    assert all(part % limits.multiple == 0 for part in parts)


@given(cases(), st.data())
def test_a_short_last_batch_is_split_whole_and_under_the_most(
    case: tuple[list[Pace], int, RankLimits], data: st.DataObject
) -> None:
    paces, size, limits = case
    if size == 0:
        return
    total = data.draw(st.integers(1, size))
    parts = split(paces, size, limits, None, total)
    assert sum(parts) == total
    assert all(0 <= part <= high for part, high in zip(parts, limits.most, strict=True))
    if total >= len(paces):
        assert all(part >= min(1, low) for part, low in zip(parts, limits.least, strict=True))


@given(cases())
def test_no_other_shares_make_the_slowest_rank_faster(case: tuple[list[Pace], int, RankLimits]) -> None:
    paces, size, limits = case
    low = [float(units[0] * limits.multiple) for units in limits.units]
    high = [float(units[1] * limits.multiple) for units in limits.units]
    parts = shares(paces, size, low, high)
    assert math.isclose(sum(parts), size, abs_tol=1e-6)
    slowest = max(pace.time(part) for pace, part in zip(paces, parts, strict=True))
    # In less time, the ranks together could not do all of it.
    less = 0.999 * slowest
    possible = [
        min(max(less / pace.seconds - pace.overhead, floor), ceiling)
        for pace, floor, ceiling in zip(paces, low, high, strict=True)
    ]
    at_least = max(pace.time(floor) for pace, floor in zip(paces, low, strict=True))
    assert sum(possible) < size + 1e-6 or slowest <= at_least * (1 + 1e-9)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=8), st.integers(0, 1000))
def test_counts_are_the_largest_remainders(weights: list[float], total: int) -> None:
    exact = [total * weight / sum(weights) for weight in weights]
    parts = counts(exact, total, RankLimits((0,) * len(weights), (total,) * len(weights)))
    assert sum(parts) == total
    assert all(abs(part - it) < 1 + 1e-9 for part, it in zip(parts, exact, strict=True))
    raised = [it - math.floor(it) for part, it in zip(parts, exact, strict=True) if part > it]
    lowered = [it - math.floor(it) for part, it in zip(parts, exact, strict=True) if part < it]
    assert not raised or not lowered or min(raised) >= max(lowered) - 1e-9


def test_the_split_of_two_ranks_of_which_one_is_half_as_fast() -> None:
    whole = RankLimits((1, 1), (128, 128))
    assert split([Pace(1.0, 5.0), Pace(2.0, 2.5)], 128, whole, None, 128) == [85, 43]
    assert split([Pace(1.0), Pace(1.0)], 7, whole, None, 7) == [4, 3]
    assert split([Pace(1.0), Pace(2.0)], 128, RankLimits((1, 1), (64, 128)), None, 128) == [64, 64]


def test_costs_are_shared_where_samples_are_not() -> None:
    long_first = [10.0] * 4 + [1.0] * 40
    parts = split([Pace(), Pace()], 44, RankLimits((1, 1), (44, 44)), long_first, 44)
    assert parts == [4, 40]
    ends = [0, parts[0], sum(parts)]
    assert [sum(long_first[a:b]) for a, b in pairwise(ends)] == [40.0, 40.0]


@pytest.mark.parametrize("costs", [[0.0] * 6, [1e-300] * 6, [1e300] * 6])
def test_costs_of_any_size_give_a_split(costs: list[float]) -> None:
    assert split([Pace(), Pace(), Pace()], 6, RankLimits((1,) * 3, (6,) * 3), costs, 6) == [2, 2, 2]
