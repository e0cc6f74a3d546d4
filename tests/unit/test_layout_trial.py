"""What bucket_cap_mb="auto" decides, on steps that are made up: no clock, no network."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from ringdp.ddp.bucket_layout import costs_of
from ringdp.ddp.layout_trial import BLOCK_STEPS, Layout, Trial, layouts
from ringdp.diagnosis.facts import Facts
from ringdp.diagnosis.window import FIELDS, Told, Window

TRIED = layouts([1 << 20, 2 << 20, 4 << 20])
Cost = Callable[[int, random.Random], float]
"""Seconds of a step with a layout."""


def train(
    cost: Cost, tried: Sequence[Layout] = TRIED, every: int = 20, steps: int = 400, seed: int = 1
) -> tuple[Trial, list[int]]:
    """Steps that the ranks tell each other of as StepReport does; the trial, and which layout each step had."""
    chance, used, told = random.Random(seed), [], dict[int, float]()
    trial = Trial(tried, 3)
    for done in range(3, steps):
        since_first = done - min(10, every) - 1  # heard in the forward after the next backward
        if since_first >= 0 and since_first % every == 0:
            trial.heard({step: it for step, it in told.items() if step < done}, done)
            told = {step: it for step, it in told.items() if step >= done}
        used.append(trial.layout_after(done))
        told[done + 1] = cost(used[-1], chance)
    return trial, used


def test_layouts_are_the_default_a_quarter_four_times_and_one_bucket() -> None:
    assert [one.caps_bytes for one in TRIED] == [
        (1 << 20, 2 << 20, 4 << 20),
        (1 << 18, 1 << 19, 1 << 20),
        (4 << 20, 8 << 20, 16 << 20),
        (),
    ]
    assert str(TRIED[1]) == "a quarter of the default size (256 KiB, 512 KiB, 1 MiB)"
    assert all(cap >= 1 for one in layouts([1]) for cap in one.caps_bytes)


@pytest.mark.parametrize("every", [1, 7, 20, 90])
@pytest.mark.parametrize("best", [1, 2, 3])
def test_what_is_clearly_faster_is_kept_whatever_the_ranks_tell_each_other_when(best: int, every: int) -> None:
    trial, used = train(lambda it, chance: (0.9 if it == best else 1.0) * chance.uniform(0.98, 1.02), every=every)
    assert trial.chosen == best
    assert used[-1] == best
    assert {0, 1, 2, 3} == set(used)
    assert trial.reason.startswith("a step takes ")
    assert trial.reason.endswith("with the default size")


@pytest.mark.parametrize("gain", [0.0, 0.02, -0.2])
def test_the_default_stays_where_nothing_is_clearly_faster(gain: float) -> None:
    trial, used = train(lambda it, chance: (1 - gain if it else 1.0) * chance.uniform(0.99, 1.01))
    assert (trial.chosen, used[-1]) == (0, 0)
    assert trial.reason.startswith("no other is clearly faster: a step takes ")
    assert len(used) - used[::-1].index(next(it for it in reversed(used) if it)) <= 12 * BLOCK_STEPS


def test_noise_of_a_tenth_keeps_the_default_nearly_always_and_never_keeps_what_is_slower() -> None:
    changed = 0
    for seed in range(200):
        trial, _ = train(lambda it, chance: (1.05 if it == 1 else 1.0) * chance.gauss(1, 0.1), steps=200, seed=seed)
        assert trial.chosen is not None
        assert trial.chosen != 1
        changed += trial.chosen != 0
    assert changed <= 4


def test_what_was_faster_once_by_chance_is_tried_again_before_it_is_kept() -> None:
    def cost(layout: int, _: random.Random, steps: list[int] = []) -> float:  # noqa: B006
        steps.append(layout)
        return 0.5 if layout == 2 and len(steps) < 50 else 1.0

    trial, used = train(cost)
    assert trial.chosen == 0
    assert used.count(2) > 3 * BLOCK_STEPS


def test_one_layout_needs_no_trial_and_what_was_not_measured_is_not_judged() -> None:
    trial = Trial(TRIED[:1], 3)
    assert (trial.chosen, trial.reason) == (0, "all sizes give the same buckets")
    trial = Trial(TRIED, 3)
    trial.heard({1000: 1.0}, 1000)
    assert (trial.chosen, trial.reason) == (0, "not all layouts were measured")


def test_a_step_costs_what_the_slowest_computes_and_the_least_waiting() -> None:
    rows = torch.zeros(2, 3, len(FIELDS), dtype=torch.float64)
    for rank, values in enumerate([(9.0, 1.0, 2.0, 0.5, 4.0, 3.0), (0.0, 1.0, 4.0, 0.5, 0.0, 1.0)]):
        rows[rank, :, :6] = torch.tensor(values)
    window = Window(30, rows, (Facts(),) * 2, (Told(0, 0, 0),) * 2)
    assert costs_of(window, 12) == {10: 6.5, 11: 6.5, 12: 6.5}
