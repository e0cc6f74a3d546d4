"""An elastic job whose program calls collectives of its own, or has much in its steps: all hear of a loss alike."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.fault import elastic_collective_jobs as jobs
from tests.fault import elastic_oracle as oracle
from tests.fault.faults import Faults, sampled
from tests.train.harness import ring_is_built, run_outcomes

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")


def survivors(job: Any, folder: Path, *arguments: Any) -> list[Any]:
    """Of a job whose rank 1 is killed."""
    outcomes = run_outcomes(job, str(folder), *arguments, world_size=3, backend=None)
    return list(oracle.survivors(outcomes, {1: signal.SIGKILL}).values())


@pytest.mark.parametrize(
    ("kind", "late"),
    [case for kind in jobs.CALLS for case in (sampled([(kind, 0), (kind, 2)][:: 1 if len(kind) % 2 else -1], 1))],
)
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


@pytest.mark.parametrize("phase", sampled(["forward", "last bucket", "optimizer"], 1))
def test_much_in_one_step(tmp_path: Path, phase: str) -> None:
    told = oracle.compare(tmp_path, 3, Faults().kill(1, 2, phase), jobs.everything)
    assert told[0].sizes[-1] == 2
