"""One backward through several RingDPs of an elastic job is one unit: a lost rank's part is in all or in none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.fault import elastic_joint_jobs as jobs
from tests.fault.elastic_jobs import Death
from tests.fault.elastic_joint_jobs import PHASES
from tests.fault.elastic_oracle import STEPS, changes, check_equal, live, plain
from tests.train.harness import ring_is_built, run_outcomes

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")

INSIDE = ("first", "between", "second", "last")


def members_after(world: int, deaths: tuple[Death, ...]) -> list[tuple[int, ...]]:
    """Who has made each step: a rank that died behind its backward has."""
    return [
        tuple(
            place
            for place in range(world)
            if not any(
                death.place == place and (death.step < step or (death.step == step and death.phase != PHASES[-1]))
                for death in deaths
            )
        )
        for step in STEPS
    ]


def compare(folder: Path, deaths: tuple[Death, ...], world: int = 3, **options: Any) -> list[str]:
    told = live(folder, world, deaths, jobs.train, **options)
    check_equal(told, plain(folder, members_after(world, deaths), jobs.train, **options))
    return changes(told)


@pytest.mark.parametrize("phase", ["forward", *INSIDE, "after backward"])
def test_two_of_which_one_feeds_the_other(tmp_path: Path, phase: str) -> None:
    (line,) = compare(tmp_path, (Death(1, 2, phase),))
    if phase in INSIDE:
        assert "; step 3 was made again without the part of rank 1: its batch is in no step" in line


@pytest.mark.parametrize("phase", INSIDE)
@pytest.mark.parametrize("shape", ["repeated", "repeated inside"])
def test_one_whose_backward_runs_inside_the_others(tmp_path: Path, shape: str, phase: str) -> None:
    if (shape, phase) == ("repeated inside", "between"):
        pytest.skip("there is no such place")
    compare(tmp_path, (Death(0, 1, phase),), shape=shape)


@pytest.mark.parametrize("phase", ["between", "last"])
def test_one_that_is_recomputed(tmp_path: Path, phase: str) -> None:
    compare(tmp_path, (Death(1, 2, phase),), shape="recomputed")


@pytest.mark.parametrize("phase", ["first", "second"])
def test_two_beside_each_other(tmp_path: Path, phase: str) -> None:
    compare(tmp_path, (Death(2, 1, phase),), shape="side by side")


def test_three_and_two_deaths_down_to_one(tmp_path: Path) -> None:
    compare(tmp_path, (Death(0, 1, "second"), Death(2, 2, "third")), shape="three")


def test_two_deaths_in_one_backward(tmp_path: Path) -> None:
    compare(tmp_path, (Death(0, 1, "between"), Death(2, 1, "last")), world=4)


@pytest.mark.parametrize(
    "options",
    [
        {"options": ({"compression": "int8"}, {}, {})},
        {"options": ({}, {"compression": "int4"}, {})},
        {"options": ({"weight": "samples"}, {"gradient_as_bucket_view": False}, {})},
        {"hook": "allreduce"},
        {"keyword": {"retain_graph": True}},
    ],
    ids=["int8 first", "int4 second", "weights", "hook", "retain_graph"],
)
@pytest.mark.parametrize("phase", ["between", "last"])
def test_options_of_one_of_them(tmp_path: Path, phase: str, options: dict[str, Any]) -> None:
    compare(tmp_path, (Death(1, 1, phase), Death(0, 2, "first")), **options)


@pytest.mark.parametrize(("step", "phase"), [(1, "first"), (2, "second")])
def test_one_of_them_under_no_sync(tmp_path: Path, step: int, phase: str) -> None:
    """Its gradients add up in odd steps, and the lost rank's are in no step."""
    (line,) = compare(tmp_path, (Death(1, step, phase),), alone=True)
    if step == 2:  # the networks have made other numbers of steps
        assert re.search(r"; the backward of steps \d, \d was made again without the part of rank 1", line), line


def test_one_that_is_repeated_twice_counts_each_time(tmp_path: Path) -> None:
    compare(tmp_path, (Death(1, 2, "forward"),), shape="repeated twice")


def test_an_exception_leaves_no_step_behind(tmp_path: Path) -> None:
    outcomes = run_outcomes(jobs.left_by_an_exception, str(tmp_path), world_size=2, backend=None)
    told = [outcome.value for outcome in outcomes]
    for outcome in outcomes:
        assert outcome.text is None, outcome.text
        assert outcome.value["raised"] == "of another size"
        assert "Expected to have finished reduction in the prior iteration" in outcome.value["said"]
    assert told[0]["gradient"] == told[1]["gradient"]
