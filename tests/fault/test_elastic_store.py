"""A rank dies in a change of members, at each of its accesses to the launcher's store: the others go on, to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fault import elastic_store_jobs as jobs
from tests.fault.elastic_jobs import Told
from tests.fault.elastic_oracle import STEPS, Results, changes, check_equal, plain, survivors
from tests.fault.faults import Faults, sampled
from tests.train.harness import ring_is_built, run_outcomes

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")

WORLD = 4
FIRST = Faults().kill(3, 1)  # what the change is for
LEADER, FOLLOWER = 0, 1
MOST_ACCESSES = 200


def expected(second: int | None) -> list[Results]:
    """By who dies in the change: of a job of the ranks that are left, without elasticity."""
    return plain((FIRST if second is None else FIRST.kill(second, 1)).members(WORLD, STEPS))


def live(folder: Path, second: int, at: int | str) -> tuple[dict[int, Told], bool]:
    """What those tell that live to the end, and whether `second` was killed."""
    outcomes = run_outcomes(jobs.train, str(folder), STEPS, FIRST, place=second, at=at, world_size=WORLD, backend=None)
    died = "died with code -9" in (outcomes[second].text or "")
    return survivors(outcomes, (FIRST.kill(second, 1) if died else FIRST).ended()), died


@pytest.mark.parametrize("at", ["after compare_set", *sampled(["before set", "after set", "before compare_set"], 1)])
def test_the_leader_is_killed_in_a_change(tmp_path: Path, at: str) -> None:
    told, died = live(tmp_path, LEADER, at)
    assert died
    check_equal(told, expected(LEADER))
    lines = changes(told)
    if at == "after compare_set":  # its decision stands, and names it
        first, second = lines
        assert "3 of 4 ranks go on" in first
        assert "as view 2; step 2 is made again without the part of rank 3" in first
        assert "2 of 3 ranks go on" in second
        assert "as view 3; step 2 was made again without the part of rank 0" in second
    else:
        (line,) = lines
        assert "2 of 4 ranks go on" in line
        assert "; step 2 was made again without the parts of ranks 0 and 3: their batches are not in it" in line


@pytest.mark.parametrize("at", sampled(["before set", "after set", "after check"], 2))
def test_another_rank_is_killed_in_a_change(tmp_path: Path, at: str) -> None:
    told, died = live(tmp_path, FOLLOWER, at)
    assert died
    check_equal(told, expected(FOLLOWER))
    lines = changes(told)
    assert " was made again without" in lines[-1]
    assert all(" is made again without" in line for line in lines[:-1])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("second", [LEADER, FOLLOWER])
def test_a_rank_is_killed_at_each_of_its_accesses(tmp_path: Path, second: int) -> None:
    """Until the change is over before that access. How many there are depends on how long the others take."""
    for at in range(1, MOST_ACCESSES):
        folder = tmp_path / str(at)
        folder.mkdir()
        told, died = live(folder, second, at)
        check_equal(told, expected(second if died else None))
        assert " was made again without" in changes(told)[-1]
        if not died:
            assert at > 3
            print(f"rank {second} was killed at each of {at - 1} accesses")
            return
    pytest.fail(f"a change took {MOST_ACCESSES} accesses")
