"""One backward through several RingDPs of an elastic job is one unit: a lost rank's part is in all or in none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.fault import elastic_joint_jobs as jobs
from tests.fault import elastic_oracle as oracle
from tests.fault.faults import Faults, sampled
from tests.train.harness import ring_is_built, run_outcomes

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")

INSIDE = ("first", "between", "second", "last")


def compare(folder: Path, faults: Faults, world: int = 3, **options: Any) -> list[str]:
    return oracle.changes(oracle.compare(folder, world, faults, jobs.train, **options))


@pytest.mark.parametrize("phase", ["after backward", *sampled(["forward", *INSIDE], 3)])
def test_two_of_which_one_feeds_the_other(tmp_path: Path, phase: str) -> None:
    (line,) = compare(tmp_path, Faults().kill(1, 2, phase))
    if phase in INSIDE:
        assert "; step 3 was made again without the part of rank 1: its batch is not in it" in line


SHAPES = {
    "repeated": [Faults().kill(0, 1, phase) for phase in INSIDE],  # its backward runs inside the other's
    "repeated inside": [Faults().kill(0, 1, phase) for phase in INSIDE if phase != "between"],
    "recomputed": [Faults().kill(1, 2, "between"), Faults().kill(1, 2, "last")],
    "side by side": [Faults().kill(2, 1, "first"), Faults().kill(2, 1, "second")],
    "repeated twice": [Faults().kill(1, 2, "forward")],  # it counts each time
    "three": [Faults().kill(0, 1, "second").kill(2, 2, "third")],
}


@pytest.mark.parametrize(
    ("shape", "faults"),
    [
        pytest.param(shape, case.values[0], marks=case.marks, id=f"{shape}-{number}")
        for shape, faults in SHAPES.items()
        for number, case in enumerate(sampled(faults, (len(faults) + 1) // 2))
    ],
)
def test_each_way_in_which_backwards_meet(tmp_path: Path, shape: str, faults: Faults) -> None:
    compare(tmp_path, faults, shape=shape)


def test_two_deaths_in_one_backward(tmp_path: Path) -> None:
    compare(tmp_path, Faults().kill(0, 1, "between").kill(2, 1, "last"), world=4)


OPTIONS: dict[str, dict[str, Any]] = {
    "int8 first": {"options": ({"compression": "int8"}, {}, {})},
    "int4 second": {"options": ({}, {"compression": "int4"}, {})},
    "weights": {"options": ({"weight": "samples"}, {"gradient_as_bucket_view": False}, {})},
    "hook": {"hook": "allreduce"},
    "retain_graph": {"keyword": {"retain_graph": True}},
}


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        case
        for number, name in enumerate(OPTIONS)
        for case in sampled([(name, "between"), (name, "last")][:: 1 - 2 * (number % 2)], 1)
    ],
)
def test_options_of_one_of_them(tmp_path: Path, name: str, phase: str) -> None:
    compare(tmp_path, Faults().kill(1, 1, phase).kill(0, 2, "first"), **OPTIONS[name])


@pytest.mark.parametrize(("step", "phase"), [(1, "first"), (2, "second")])
def test_one_of_them_under_no_sync(tmp_path: Path, step: int, phase: str) -> None:
    """Its gradients add up in odd steps, and the lost rank's are in no step."""
    (line,) = compare(tmp_path, Faults().kill(1, step, phase), alone=True)
    if step == 2:  # the networks have made other numbers of steps
        assert re.search(r"; the backward of steps \d, \d was made again without the part of rank 1", line), line


def test_an_exception_leaves_no_step_behind(tmp_path: Path) -> None:
    outcomes = run_outcomes(jobs.left_by_an_exception, str(tmp_path), world_size=2, backend=None)
    told = [outcome.value for outcome in outcomes]
    for outcome in outcomes:
        assert outcome.text is None, outcome.text
        assert outcome.value["raised"] == "of another size"
        assert "Expected to have finished reduction in the prior iteration" in outcome.value["said"]
    assert told[0]["gradient"] == told[1]["gradient"]
