"""What a step of an elastic job may have: codes, weights, hooks, reports; the bits are those without elasticity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ringdp.compression import Int8
from tests.fault import elastic_feature_jobs as jobs
from tests.fault.elastic_jobs import HOOKS, Death
from tests.fault.elastic_oracle import check_equal, live, members_after, plain
from tests.train.harness import ring_is_built, run_outcomes

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")

ENDS = ("forward", "first bucket", "last bucket", "after backward", "optimizer")


def compare(folder: Path, world: int, deaths: tuple[Death, ...], **options: Any) -> dict[int, Any]:
    told = live(folder, world, deaths, **options)
    check_equal(told, plain(folder, members_after(world, deaths), **options))
    return told


@pytest.mark.parametrize("phase", ENDS)
def test_int8_with_error_feedback_in_each_phase(tmp_path: Path, phase: str) -> None:
    told = compare(tmp_path, 3, (Death(1, 2, phase),), options={"compression": Int8(error_feedback=True)})
    for one in told.values():
        assert one.extra["coded"] > 100_000  # it was codes that were compared
        (line,) = [line for line in one.lines if "was lost" in line]
        assert "error feedback held is lost with them" in line


@pytest.mark.parametrize("codec", ["int4", "bf16", "nf4"])
def test_other_codecs_one_after_the_other_down_to_one(tmp_path: Path, codec: str) -> None:
    deaths = (Death(0, 1, "last bucket"), Death(3, 2, "after backward"), Death(1, 3, "first bucket"))
    told = compare(tmp_path, 4, deaths, options={"compression": codec})
    assert told[2].sizes == [4, 3, 2, 1] or told[2].sizes == [4, 3, 3, 1]


def test_codes_without_rank_order_and_warm_up(tmp_path: Path) -> None:
    options = {"options": {"compression": "int8", "reproducible": False, "warmup_steps": 0}}
    compare(tmp_path, 3, (Death(2, 1, "last bucket"),), **options)


@pytest.mark.parametrize("phase", ENDS)
@pytest.mark.parametrize("width", [8, 300])
def test_weights_by_samples(tmp_path: Path, phase: str, width: int) -> None:
    options: dict[str, Any] = {"options": {"weight": "samples"}, "uneven": True, "width": width}
    told = compare(tmp_path, 3, (Death(1, 1, phase),), **options)
    for one in told.values():
        (line,) = [line for line in one.lines if "was lost" in line]
        known = "step 2 was made again without the part of rank 1: its batch, of weight 8, is in no step"
        if phase in ("first bucket", "last bucket"):  # the ranks have told each other their weights
            assert known in line
        else:
            assert "weight" not in line
            assert (phase == "forward") == ("step 2 was made again" in line)


def test_weights_of_micro_batches_with_buffers_and_codes(tmp_path: Path) -> None:
    options: dict[str, Any] = {"options": {"weight": "samples", "compression": "int4"}, "uneven": True}
    options |= {"accumulate": True, "norm": True}
    compare(tmp_path, 4, (Death(0, 1, "first bucket"), Death(2, 2, "forward")), **options)


@pytest.mark.parametrize("hook", list(HOOKS))
def test_hooks_of_one_operation(tmp_path: Path, hook: str) -> None:
    compare(tmp_path, 3, (Death(1, 1, "first bucket"), Death(2, 2, "last bucket")), hook=hook, width=300)


@pytest.mark.parametrize("phase", ENDS)
def test_reports_and_the_guard_go_on(tmp_path: Path, phase: str) -> None:
    more = jobs.GUARDED_WITHIN + 10 if phase == "last bucket" else 0  # the guard needs them to see each parameter
    outcomes = run_outcomes(jobs.reports, str(tmp_path), Death(1, 5, phase), more, world_size=3, backend=None)
    for outcome in outcomes:
        assert outcome.rank == 1 or outcome.text is None, outcome.text
    told = [outcome.value for outcome in outcomes if outcome.rank != 1]
    for one in told:
        assert one["before"] == 3  # rows of the report
        assert one["after"] == 2
        assert one["guarded"] is True
        assert one["differs"] == (more > 0)  # a replica that was changed on purpose is found
    assert told[0]["steps"] == told[1]["steps"]
