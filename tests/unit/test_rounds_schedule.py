"""ringdp/rounds: when fragments leave and land, how parameters are dealt, and the outer optimizer's arithmetic."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringdp.errors import InvalidArgumentError
from ringdp.rounds.fragments import dealt
from ringdp.rounds.outer import OfTorch, outer_steps
from ringdp.rounds.schedule import MEASURED_STEPS, Schedule, TimedSchedule, Turn

STEPS = 120


@st.composite
def rules(draw: st.DrawFn) -> dict[str, int]:
    every = draw(st.integers(1, 30))
    delay = draw(st.integers(0, every - 1))
    return {
        "every": every,
        "fragments": draw(st.integers(1, 12)),
        "delay": delay,
        "warmup_steps": draw(st.integers(0, 20)),
    }


def check(turn: Turn, step: int, in_flight: dict[int, int]) -> None:
    """Nothing lands that has not left, or leaves while it is in flight."""
    for one in turn.lands:
        del in_flight[one]
    for one in turn.leaves:
        assert one not in in_flight
        in_flight[one] = step
    for one in turn.lands_at_once:
        assert in_flight.pop(one) == step


@given(rules())
def test_each_fragment_leaves_once_a_round_and_lands_in_time(rule: dict[str, int]) -> None:
    schedule, in_flight = Schedule(**rule), dict[int, int]()
    left: list[list[int]] = [[] for _ in range(rule["fragments"])]
    for step in range(1, STEPS + 1):
        turn = schedule.advance()
        assert turn.exact == (step <= rule["warmup_steps"])
        for one in turn.lands:
            assert step - in_flight[one] == rule["delay"]
        check(turn, step, in_flight)
        assert bool(turn.lands_at_once) == (bool(turn.leaves) and (turn.exact or rule["delay"] == 0))
        for one in () if turn.exact else turn.leaves:
            left[one].append(step)
    rounds = (STEPS - rule["warmup_steps"]) // rule["every"]
    assert schedule.round == rounds
    for fragment, steps in enumerate(left):
        first = rule["warmup_steps"] + -(-(fragment + 1) * rule["every"] // rule["fragments"])
        assert steps == list(range(first, STEPS + 1, rule["every"]))
        assert len(steps) in (rounds, rounds + 1)


@given(rules(), st.integers(1, STEPS))
def test_the_last_turn_brings_all_changes(rule: dict[str, int], steps: int) -> None:
    schedule, in_flight, left = Schedule(**rule), dict[int, int](), [0] * rule["fragments"]
    for step in range(1, steps + 1):
        turn = schedule.advance()
        check(turn, step, in_flight)
        for one in turn.leaves:
            left[one] = step
    turn = schedule.finish()
    assert set(turn.lands) == set(in_flight)
    assert set(turn.leaves) == {one for one, when in enumerate(left) if when < steps}
    check(turn, steps, in_flight)
    assert not in_flight
    assert not schedule.finish().leaves
    assert not schedule.advance().lands  # and goes on, with a new round


@given(rules(), st.integers(0, STEPS))
def test_it_goes_on_from_its_state(rule: dict[str, int], steps: int) -> None:
    schedule, again = Schedule(**rule), Schedule(**rule)
    for _ in range(steps):
        schedule.advance()
    again.load(json.loads(json.dumps(schedule.state())))
    for _ in range(70):
        assert again.advance() == schedule.advance()
        assert again.label() == schedule.label()


@given(st.lists(st.integers(1, 15), min_size=1, max_size=30), st.integers(1, 5), st.integers(0, 12))
def test_rounds_may_have_any_lengths(lengths: list[int], fragments: int, delay: int) -> None:
    """A fragment that has not landed when its next turn comes lands first."""
    begins, total = {}, 0
    for length in lengths:
        begins[total] = length
        total += length
    schedule, in_flight = Schedule(begins.__getitem__, fragments, delay), dict[int, int]()
    ends = []
    for step in range(1, total + 1):
        turn = schedule.advance()
        check(turn, step, in_flight)
        assert all(step - when <= delay for when in in_flight.values())
        if fragments - 1 in turn.leaves:
            ends.append(step)
    assert ends == [begin + length for begin, length in begins.items()]
    assert schedule.round == len(lengths)


@pytest.mark.parametrize("length", [0, 2.0, None, True])
def test_a_length_that_is_none_is_refused(length: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"every\(0\): its result must be a whole number from 1 on"):
        Schedule(lambda step: length).advance()


@settings(max_examples=60)
@given(
    st.integers(2, 20),
    st.integers(1, 4),
    st.integers(0, 3),
    st.lists(st.floats(0.01, 0.2), min_size=1, max_size=4),
    st.floats(0.0, 0.3),
)
def test_by_time_ranks_leave_in_the_same_order_and_make_every_steps_on_average(
    every: int, fragments: int, delay: int, step_s: list[float], on_the_way_s: float
) -> None:
    """Ranks of made-up speeds: each steps until the agreed time, and nobody waits long."""
    ranks = [TimedSchedule(every, fragments, delay) for _ in step_s]
    clocks, steps = [0.0] * len(ranks), [0] * len(ranks)
    for rank, schedule in enumerate(ranks):
        for _ in range(MEASURED_STEPS):
            clocks[rank] += step_s[rank]
            turn = schedule.advance(schedule.due(clocks[rank]))
        assert turn.meets
    met_s = max(clocks)
    for rank, schedule in enumerate(ranks):
        clocks[rank] = met_s
        schedule.begin_turn(met_s, step_s)
    turns = 40
    for number in range(turns):
        fragment, arrived = number % fragments, []
        for rank, schedule in enumerate(ranks):
            while True:
                clocks[rank] += step_s[rank]
                steps[rank] += 1
                turn = schedule.advance(schedule.due(clocks[rank]))
                if turn.leaves:
                    break
            assert turn.leaves == (fragment,)
            assert f"turn {number + 1}," in schedule.label()
            arrived.append(clocks[rank])
        come_s = max(arrived) + on_the_way_s
        for schedule in ranks:
            schedule.begin_turn(come_s, step_s)
    turn_s = every / fragments / (sum(1 / one for one in step_s) / len(step_s))
    assert max(clocks) <= met_s + turns * (turn_s + max(step_s) + on_the_way_s) + 1e-6
    assert all(schedule.round == turns // fragments for schedule in ranks)


def test_by_time_a_state_begins_its_turn_anew() -> None:
    schedule = TimedSchedule(4)
    for _ in range(MEASURED_STEPS):
        schedule.advance(False)
    schedule.begin_turn(0.0, [1.0])
    again = TimedSchedule(4)
    again.load(json.loads(json.dumps(schedule.state())))
    assert not again.due(100.0)
    assert not again.due(103.9)
    assert again.due(104.0)
    assert again.advance(True).leaves == (0,)
    assert not again.due(1000.0)  # the others are still in the turn before


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=60), st.data())
def test_parameters_are_dealt_once_and_evenly(sizes: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(sizes)))
    fragments = dealt(sizes, count)
    assert sorted(i for one in fragments for i in one) == list(range(len(sizes)))
    assert all(fragments)
    loads = [sum(sizes[i] for i in one) for one in fragments]
    assert max(loads) - min(loads) <= max(sizes)


def test_equal_layers_are_strided_over_depth() -> None:
    assert dealt([10] * 6, 2) == [[0, 2, 4], [1, 3, 5]]


@pytest.mark.parametrize(
    "outer",
    [{"lr": 0.7, "momentum": 0.9, "nesterov": True}, {"lr": 0.5, "momentum": 0.9}, {"lr": 0.3}, {"lr": 1.0}],
    ids=str,
)
def test_the_outer_step_is_torchs_sgd(outer: dict[str, Any]) -> None:
    torch.manual_seed(0)
    ours, theirs = (torch.ones(50, dtype=torch.float64) for _ in range(2))
    [mine] = outer_steps(outer, [ours])
    its = OfTorch(theirs, lambda parameters: torch.optim.SGD(parameters, **outer))
    for _ in range(20):
        mean = torch.randn(50, dtype=torch.float64)
        mine.step(mean.clone())
        its.step(mean.clone())
        assert torch.allclose(ours, theirs, rtol=1e-14, atol=1e-14)
    [again] = outer_steps(outer, [ours.clone()])
    again.load(mine.state())
    assert again.state().keys() == mine.state().keys()
