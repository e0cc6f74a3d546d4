"""dist_async when ranks die at one of their messages: a worker is counted no more, an owner is an error that names it,
or, in an elastic job, its slices go on from its last save with the ranks that are left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fault import async_jobs as jobs
from tests.fault.async_jobs import Plan
from tests.fault.faults import sampled
from tests.train.harness import Outcome, ring_is_built, run_outcomes, run_ranks

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")

AT = (("", False), ("", True), ("ANSWER", False), ("ANSWER", True))
LAST = ("LEAVE", "BYE")
KINDS = (*(it for it in jobs.REQUESTS if it not in LAST), "ANSWER")
OF_STEPS = [*((kind, n) for kind in ("PUSH", "TICK", "PULL") for n in (0, 3)), ("LEAVE", 0), ("BYE", 0)]


def survivors(outcomes: list[Outcome], victim: int) -> list[Outcome]:
    assert "code -9" in (outcomes[victim].text or ""), outcomes[victim].text
    left = [one for one in outcomes if one.rank != victim]
    for one in left:
        assert one.text is None, one.text
    return left


@pytest.mark.parametrize(
    ("victim", "plan"),
    [
        (1, Plan("", 2)),
        *sampled([(v, Plan(k, n, after)) for v in (0, 1, 2) for n in range(9) for k, after in AT], 2),
    ],
)
@pytest.mark.parametrize("staleness", [2, None])
def test_a_lost_owners_slices_go_on_from_its_last_save(
    tmp_path: Path, victim: int, plan: Plan, staleness: int | None
) -> None:
    world = 3
    outcomes = run_outcomes(
        jobs.elastic, str(tmp_path), victim, plan, staleness, world_size=world, backend=None, others_stay=True
    )
    told = [one.value for one in survivors(outcomes, victim)]
    others = world - 1
    for one in told:
        assert one["workers"] == others
        assert (one["moved"], one["kept"]) == (told[0]["moved"], told[0]["kept"])
        (lost_pushes,) = {one["stats"].lost_pushes}
        [moved], kept = one["moved"], one["kept"]
        # At the save there were 3 pushes of 3 ranks; of those after it all count but the lost ones, and in the moved
        # slices none of the victim's.
        assert moved == world * jobs.SAVED + others * (jobs.STEPS - jobs.SAVED) - lost_pushes
        assert all(it >= others * jobs.STEPS + jobs.SAVED for it in kept)
        assert staleness is None or max(one["stats"].staleness) <= staleness
    lines = [line for one in told for line in one["lines"] if "of a dist_async store lost" in line]
    assert len(lines) == 1
    assert f"rank {victim} of a dist_async store lost with its slices: they are those of clock {jobs.SAVED}" in lines[0]
    assert f"{told[0]['stats'].lost_pushes} pushes" in lines[0]


def test_a_job_whose_ranks_come_has_no_such_store(tmp_path: Path) -> None:
    for name in ("True", "False"):
        (tmp_path / name).mkdir()
    for one in run_outcomes(jobs.beside_a_job, str(tmp_path), world_size=2, backend=None):
        assert one.text is None, one.text
        assert len(one.value) == 2
        assert all("ringdp.elastic.Job and an asynchronous store or table" in text for text in one.value)


def test_a_rank_that_shuts_down_serves_the_others_until_they_have_left(tmp_path: Path) -> None:
    value, _ = run_ranks(jobs.left_open, str(tmp_path), world_size=2, backend=None)
    assert value.eq(5).all()


def test_without_a_save_the_loss_is_said(tmp_path: Path) -> None:
    outcomes = run_outcomes(jobs.without_saves, str(tmp_path), 1, world_size=3, backend=None, others_stay=True)
    for one in survivors(outcomes, 1):
        assert one.value.startswith("MembershipChanged: slices of a dist_async store were lost with rank 1")
        assert "call save(folder)" in one.value


@pytest.mark.parametrize(
    "plan",
    [Plan("TICK", 1), *sampled([Plan(kind, n, after) for kind in KINDS for n in (0, 3) for after in (False, True)], 3)],
)
def test_without_elasticity_a_lost_owner_is_an_error_that_names_it(tmp_path: Path, plan: Plan) -> None:
    outcomes = run_outcomes(jobs.owner_is_killed, str(tmp_path), 2, plan, world_size=3, backend=None)
    for one in survivors(outcomes, 2):
        text, took_s = one.value
        assert text.startswith("PeerLostError")
        assert "rank 2" in text
        assert took_s < 10


@pytest.mark.parametrize("plan", [Plan(kind, n, after) for kind in LAST for n in (0, 1) for after in (False, True)])
def test_who_dies_while_all_leave_keeps_nobody(tmp_path: Path, plan: Plan) -> None:
    outcomes = run_outcomes(jobs.owner_is_killed, str(tmp_path), 2, plan, world_size=3, backend=None)
    for one in survivors(outcomes, 2):
        text, took_s = one.value
        assert text == "nothing" or (text.startswith("PeerLostError") and "rank 2" in text)
        assert took_s < 10


@pytest.mark.parametrize(
    "plan",
    [Plan("PUSH", 0), *sampled([Plan(k, n, a) for k, n in OF_STEPS for a in (False, True)], 2)],
)
def test_a_worker_that_dies_is_waited_for_no_more(tmp_path: Path, plan: Plan) -> None:
    outcomes = run_outcomes(jobs.worker_is_killed, str(tmp_path), 1, plan, world_size=4, backend=None)
    first, third, server = (one.value for one in survivors(outcomes, 1))
    assert first[0] == third[0] == 50
    assert server[0] >= 100
    assert max(first[1][-1], third[1][-1]) == server[0]
