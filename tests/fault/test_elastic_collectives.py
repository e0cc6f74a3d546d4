"""An elastic job whose program calls collectives of its own, or has much in its steps: all hear of a loss alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fault import elastic_collective_jobs as jobs
from tests.fault.elastic_jobs import Death
from tests.train.harness import ring_is_built, run_outcomes, run_ranks

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")


def survivors(job: Any, folder: Path, *arguments: Any, victim: int = 1) -> list[Any]:
    outcomes = run_outcomes(job, str(folder), *arguments, world_size=3, backend=None)
    for outcome in outcomes:
        assert outcome.rank == victim or outcome.text is None, outcome.text
    return [outcome.value for outcome in outcomes if outcome.rank != victim]


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("kind", list(jobs.CALLS))
def test_each_kind_of_collective(tmp_path: Path, kind: str, late: int) -> None:
    told = survivors(jobs.own, tmp_path, kind, late)
    for one in told:
        assert "rank 1" in one["raised"]
        assert one["survivors"] == [0, 2]
        assert (one["sum"], one["size"]) == (2.0, 2)
    assert told[0]["gradients"] == told[1]["gradients"]


def test_groups_of_the_program_made_before(tmp_path: Path) -> None:
    told = survivors(jobs.groups, tmp_path)
    for one in told:
        assert "rank 1" in one["raised"]  # for good: the group has lost a member
        assert (one["sum"], one["size"]) == (2.0, 2)
    assert told[0]["gradients"] == told[1]["gradients"]


def test_an_optimizer_with_collectives(tmp_path: Path) -> None:
    for one in survivors(jobs.zero_redundancy, tmp_path):
        assert "rank 1" in one["raised"]
        assert one["sum"] == 2.0


@pytest.mark.parametrize("phase", ["forward", "last bucket", "optimizer"])
def test_much_in_one_step(tmp_path: Path, phase: str) -> None:
    death = Death(1, 2, phase)
    told = survivors(jobs.everything, tmp_path, death, None, range(4), None)
    assert told[0]["sizes"][-1] == 2
    first = run_ranks(
        jobs.everything,
        _folder(tmp_path, "a"),
        death,
        (0, 1, 2),
        range(2 + (phase == "optimizer")),
        None,
        world_size=3,
        backend=None,
    )[0]
    rest = range(2 + (phase == "optimizer"), 4)
    second = run_ranks(
        jobs.everything, _folder(tmp_path, "b"), death, (0, 2), rest, first["state"], world_size=2, backend=None
    )[0]
    for one in told:
        assert one["gradients"] == first["gradients"] + second["gradients"]
        assert one["parameters"] == second["parameters"]


def _folder(folder: Path, name: str) -> str:
    (folder / name).mkdir()
    return str(folder / name)
