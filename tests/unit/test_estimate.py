"""torch's time estimation on ring: the model's terms of the other collectives, and their sum."""

from __future__ import annotations

import pytest

from ringdp import costs as cost_model
from ringdp.costs import AlgorithmCosts, HostLayout
from ringdp.tools.estimate import estimated_us, work

MIB = 1 << 20
PLACES = {
    "one host": HostLayout((4,), 4),
    "a rank on each host": HostLayout((1, 1, 1, 1), 4),
    "two hosts": HostLayout((2, 2), 4),
}
COLLECTIVES = ("all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter", "all_to_all", "send")


@pytest.mark.parametrize("place", PLACES.values(), ids=list(PLACES))
def test_an_all_reduce_costs_what_its_two_halves_cost(place: HostLayout) -> None:
    """A ring is a reduce-scatter and an all-gather (Patarasuk and Yuan, section 3)."""
    halves = [work(what, "ring", "float32", MIB, place=place) for what in ("reduce_scatter", "all_gather")]
    whole = cost_model.work("ring", place, 4 * MIB)
    assert sum(it.rank_bytes for it in halves) == whole.rank_bytes
    assert sum(it.added_bytes for it in halves) == whole.added_bytes
    costs = AlgorithmCosts()
    assert sum(it.seconds(costs, place) for it in halves) == pytest.approx(whole.seconds(costs, place))


@pytest.mark.parametrize("place", PLACES.values(), ids=list(PLACES))
@pytest.mark.parametrize("collective", COLLECTIVES)
def test_more_bytes_take_more_time(collective: str, place: HostLayout) -> None:
    costs = AlgorithmCosts()
    times = [work(collective, "ring", "float32", size, place=place).seconds(costs, place) for size in (0, MIB, 2 * MIB)]
    assert 0 < times[0] < times[1] < times[2]
    assert times[2] - times[1] == pytest.approx(times[1] - times[0])


def test_the_sum_is_in_microseconds_and_alone_is_free() -> None:
    one = estimated_us([("all_reduce", "ring", "float32", 25 * MIB)], [0, 1])
    # 2 hosts: 25 MiB leave each, at the model's 8.4 ns a byte
    assert one == pytest.approx(25 * MIB * 8.4e-3, rel=0.01)
    barrier = estimated_us([("barrier", "exchange", "uint8", 0)], [0, 1])
    assert 0 < barrier < 1000
    both = [("all_reduce", "ring", "float32", 25 * MIB), ("barrier", "exchange", "uint8", 0)]
    assert estimated_us(both, [0, 1]) == pytest.approx(one + barrier)
    assert estimated_us(both, [0]) == 0
    compressed = estimated_us([("all_reduce", "compressed", "float32", MIB)], [0, 1])
    assert compressed == estimated_us([("all_reduce", "pairwise", "float32", MIB)], [0, 1])
