"""RingDP over groups of some ranks, in an elastic job: a group goes on without a rank that it has lost."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from ringdp.compression import Int8
from tests.fault import elastic_group_jobs as jobs
from tests.fault.elastic_oracle import compare, survivors
from tests.fault.faults import PHASES, Faults, drawn, sampled
from tests.train.harness import ring_is_built, run_outcomes

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")

PAIRS = ((0, 2), (1, 3))


@pytest.mark.parametrize(("victim", "phase"), sampled([(victim, phase) for victim in (0, 3) for phase in PHASES], 3))
def test_a_group_goes_on_without_a_rank_and_the_other_does_not_notice(tmp_path: Path, victim: int, phase: str) -> None:
    told = compare(tmp_path, 4, Faults().kill(victim, 1, phase), groups=PAIRS)
    for place, one in told.items():
        alone = place == {0: 2, 3: 1}[victim]
        assert one.sizes == ([2, 1 if phase in PHASES[:3] else 2, 1, 1] if alone else [2] * 4)
        assert any("was lost" in line for line in one.lines) == alone


def test_two_groups_lose_ranks_in_turn(tmp_path: Path) -> None:
    faults = Faults().kill(0, 1, "first bucket").kill(3, 1).kill(4, 2, "forward")
    compare(tmp_path, 6, faults, groups=((0, 2, 4), (1, 3, 5)), options={"compression": Int8(error_feedback=True)})


def test_numbers_of_ranks_are_those_of_the_default_group(tmp_path: Path) -> None:
    """It learns of the loss later, in an operation of its own; a group that is made then has its numbers."""
    faults = Faults().kill(0, 1)
    told = survivors(run_outcomes(jobs.numbers, str(tmp_path), faults, world_size=4, backend=None), faults.ended())
    assert told[1]["before"] == ([1, 3], 0, 2)
    assert told[2]["before"] == ([2], 0, 1)
    assert told[1]["after"] == ([0, 2], 0, 2)
    assert told[2]["after"] == ([1], 0, 1)
    assert all(one["world"] == [0, 1, 2] for one in told.values())
    assert told[1]["from"] == told[3]["from"] == 3.0
    assert all(one["of a new group"] == 3.0 for one in told.values())


def drawn_job(number: int) -> tuple[Faults, dict[str, Any]]:
    draw = random.Random(number)
    places = draw.sample(range(5), 5)
    cut = draw.choice([1, 2, 3])
    job: dict[str, Any] = {"groups": (tuple(sorted(places[:cut])), tuple(sorted(places[cut:])))}
    job["options"] = {"compression": draw.choice([None, None, "int8", Int8(error_feedback=True), "bf16"])}
    job["width"] = draw.choice([8, 300])
    job[draw.choice(["accumulate", "branches", "norm"])] = True
    faults, step = Faults(), draw.randrange(3)
    for place in draw.sample(range(5), draw.choice([1, 2, 3])):
        faults = faults.kill(place, step, draw.choice(PHASES))
        step = min(step + draw.randrange(2), 3)
    return faults, job


@pytest.mark.parametrize("number", drawn(100, quick=40))
def test_a_drawn_job(tmp_path: Path, number: int) -> None:
    faults, job = drawn_job(number)
    compare(tmp_path, 5, faults, **job)
