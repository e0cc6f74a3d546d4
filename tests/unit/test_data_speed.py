"""The pace of a rank from its times, and when it is worth another split. Clocks are made up; no ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringdp.data.speed import UNKNOWN, Measured, SpeedModel, worth_it
from ringdp.data.split import Pace, RankLimits, split
from ringdp.errors import InvalidArgumentError


def steps(model: SpeedModel, work: float, seconds: float, count: int = 20) -> Measured:
    for _ in range(count):
        model.add(work, seconds)
    return model.measured()


def test_a_pace_needs_some_steps() -> None:
    model = SpeedModel()
    assert steps(model, 10, 1.0, 7) == UNKNOWN
    assert steps(model, 10, 1.0, 1) == Measured(Pace(0.1), 0.0)


@given(st.floats(0.001, 1), st.floats(0, 40), st.integers(16, 100), st.integers(120, 300))
def test_two_splits_tell_overhead_from_work(seconds: float, overhead: float, first: int, second: int) -> None:
    model, true = SpeedModel(), Pace(seconds, overhead)
    steps(model, first, true.time(first))
    model.split_changed()
    known = steps(model, second, true.time(second)).pace
    assert known.seconds == pytest.approx(true.seconds, rel=1e-6)
    assert known.overhead == pytest.approx(true.overhead, rel=1e-6, abs=1e-6)


@given(st.randoms(use_true_random=False), st.floats(0.3, 3))
def test_a_jump_is_known_after_eight_steps(rng: random.Random, ratio: float) -> None:
    if 0.8 < ratio < 1.25:
        return
    model = SpeedModel()
    for _ in range(150):
        model.add(64, rng.uniform(0.98, 1.02))
    model.measured()
    for _ in range(8):
        model.add(64, ratio * rng.uniform(0.98, 1.02))
    assert model.measured().pace.seconds * 64 == pytest.approx(ratio, rel=0.03)


def test_an_outlier_changes_little() -> None:
    model = SpeedModel()
    steps(model, 10, 1.0, 30)
    model.add(10, 50.0)
    assert model.measured().pace.seconds == pytest.approx(0.1)


@pytest.mark.parametrize("step_s", [0.003, 0.009, 0.04])
def test_pauses_of_a_quota_count(step_s: float) -> None:
    """Half a core: 50 ms of each 100 ms the rank stands still, which most of its steps do not see."""
    model, ran = SpeedModel(), 0.0
    for _ in range(1000):
        ran, before = ran + step_s, ran
        pauses = int(ran / 0.05) - int(before / 0.05)
        model.add(32, step_s + 0.05 * pauses)
    assert model.measured().pace.seconds * 32 == pytest.approx(2 * step_s, rel=0.15)


@pytest.mark.parametrize(("work", "seconds"), [(1, float("nan")), (1, float("inf")), (1, -1.0), (float("nan"), 1.0)])
def test_times_that_cannot_be_are_refused(work: float, seconds: float) -> None:
    with pytest.raises(InvalidArgumentError, match="cannot take"):
        SpeedModel().add(work, seconds)


_LIMITS = RankLimits((1, 1), (64, 64))


def _of_64(paces: Sequence[Pace]) -> list[int]:
    return split(paces, 64, _LIMITS, None, 64)


def test_no_split_comes_of_a_rank_that_is_not_known() -> None:
    slow, fast = Measured(Pace(3.0)), Measured(Pace(1.0))
    now = (Pace(), Pace())
    assert worth_it([slow, fast], now, _of_64)
    nan = Measured(Pace(float("nan")))
    for unknown in (UNKNOWN, nan, Measured(Pace(1.0), float("nan")), Measured(Pace(1.0, float("nan")))):
        assert not worth_it([slow, unknown], now, _of_64)
    assert not worth_it([Measured(Pace(1.02)), fast], now, _of_64)  # 1 % to gain
    assert not worth_it([Measured(Pace(1.4), 0.1), fast], now, _of_64)  # within the noise


def test_a_split_is_left_for_whole_samples_that_are_gained() -> None:
    measured = [Measured(Pace(2.15, 2.0)), Measured(Pace(1.15, 4.0))]
    assert _of_64([one.pace for one in measured]) == [22, 42]
    assert worth_it(measured, (Pace(1.78), Pace(1.0)), _of_64)  # 23 and 41: 2 % slower
    assert not worth_it(measured, (Pace(1.88), Pace(0.99)), _of_64)  # 22 and 42, too


@settings(deadline=None)
@given(st.lists(st.floats(0.5, 2), min_size=1, max_size=4))
def test_the_split_that_was_chosen_is_not_left_again(seconds: list[float]) -> None:
    measured = [Measured(Pace(it)) for it in seconds]
    n = len(seconds)
    limits = RankLimits((1,) * n, (256,) * n)
    assert not worth_it(measured, tuple(one.pace for one in measured), lambda by: split(by, 256, limits, None, 256))
