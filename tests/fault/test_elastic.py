"""An elastic job: ranks die anywhere, and the others have the gradients of a job without them, to the bit."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.fault import elastic_jobs as jobs
from tests.fault.elastic_oracle import changes, compare, live, survivors
from tests.fault.faults import OUTLIVES_S, PHASES, Faults, sampled
from tests.train.harness import ring_is_built, run_outcomes, run_ranks

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")


@pytest.mark.parametrize(("victim", "phase"), sampled([(victim, phase) for victim in (0, 2) for phase in PHASES], 6))
def test_a_death_in_each_phase_of_a_step(tmp_path: Path, phase: str, victim: int) -> None:
    told = compare(tmp_path, 3, Faults().kill(victim, 1, phase))
    for one in told.values():
        assert one.sizes[-1] == 2
    assert [one.ranks[-1] for one in told.values()] == [0, 1]  # in the old order


def test_one_after_the_other_down_to_one(tmp_path: Path) -> None:
    told = compare(tmp_path, 4, Faults().kill(0, 1, "first bucket").kill(3, 2, "forward").kill(1, 3))
    assert told[2].sizes == [4, 3, 2, 1]
    assert told[2].ranks == [2, 1, 1, 0]


def test_a_segmentation_fault_with_children_that_live_on(tmp_path: Path) -> None:
    """They have the dead rank's descriptors."""
    told = compare(tmp_path, 3, Faults().kill(1, 1, number=signal.SIGSEGV, children=2))
    assert all(one.seconds[1] < OUTLIVES_S for one in told.values())


@pytest.mark.parametrize(
    ("world", "faults", "options"),
    [
        pytest.param(4, Faults().kill(0, 1).kill(2, 1), {}, id="two at once", marks=pytest.mark.slow),
        pytest.param(4, Faults().kill(0, 1).kill(1, 1).kill(3, 1), {}, id="all but one at once"),
        pytest.param(3, Faults().kill(1, 1), {"width": 8}, id="a small bucket, not reproducible"),
        pytest.param(3, Faults().kill(1, 2), {"accumulate": True}, id="micro-batches"),
        pytest.param(4, Faults().kill(1, 0).kill(2, 2), {"branches": True, "width": 8}, id="unused parameters"),
        pytest.param(3, Faults().kill(0, 1), {"norm": True, "width": 8}, id="buffers of rank 0"),
        pytest.param(3, Faults().kill(1, 1), {"norm": True, "width": 8}, id="buffers", marks=pytest.mark.slow),
        pytest.param(
            4, Faults().stop(1, 1, seconds=1).kill(2, 1), {}, id="a stopped rank is waited for while another is lost"
        ),
    ],
)
def test_the_bits_of_a_job_without_the_lost_ranks(
    tmp_path: Path, world: int, faults: Faults, options: dict[str, Any]
) -> None:
    compare(tmp_path, world, faults, **options)


@pytest.mark.parametrize("weight", [None, "samples"])
def test_parameters_that_are_frozen_where_a_rank_is_lost(tmp_path: Path, weight: str | None) -> None:
    """Between the micro-batches of a step: their gradients so far are averaged over the ranks that are left."""
    options: dict[str, Any] = {"accumulate": True, "freeze": (1, 2), "options": {"weight": weight}, "width": 8}
    told = compare(tmp_path, 4, Faults().kill(0, 1, "forward").kill(2, 2, "forward"), **options)
    first, second = changes(told)
    assert "as view 2; the agreement on frozen parameters was made again without the part of rank 0" in first
    assert "as view 3; the agreement on frozen parameters was made again without the part of rank 2" in second


@pytest.mark.parametrize(
    ("phase", "what"), [("forward", "the comparison of changed"), ("new parameters", "the broadcast of new")]
)
def test_parameters_that_are_replaced_where_rank_0_is_lost(tmp_path: Path, phase: str, what: str) -> None:
    """The new ones are the next rank's."""
    (line,) = changes(compare(tmp_path, 3, Faults().kill(0, 2, phase), replace=2, width=8))
    assert f"as view 2; {what} parameters was made again without the part of rank 0" in line


@pytest.mark.parametrize("infinite", [1, 2])
def test_a_loss_scale_follows_the_survivors_gradients(tmp_path: Path, infinite: int) -> None:
    told = compare(tmp_path, 3, Faults().kill(1, 2), overflow=(infinite, 2), width=8)
    before, after = (float(told[0].parameters[step].split()[-1]) for step in (1, 2))
    halved = after < before
    assert halved == (infinite == 2)  # what the dead rank had does not count


def test_who_had_an_overflow_is_asked_again(tmp_path: Path) -> None:
    """By the scaler, behind a backward that counts with the infinite gradients of the lost rank."""
    told = compare(tmp_path, 3, Faults().kill(1, 2, "after backward"), overflow=(1, 2), width=8)
    scales = [float(text.split()[-1]) for text in told[0].parameters]
    assert scales[2] < scales[1]
    assert "who had an overflow was made again without the part of rank 1" in changes(told)[0]


def test_a_stopped_rank_is_waited_for(tmp_path: Path) -> None:
    told = live(tmp_path, 3, Faults().stop(1, 1, seconds=1))
    assert all(one.sizes == [3, 3, 3, 3] for one in told.values())
    assert not any("lost" in line for one in told.values() for line in one.lines)


def test_one_line_says_what_was_lost_and_what_became_of_the_step(tmp_path: Path) -> None:
    told = live(tmp_path, 3, Faults().kill(1, 1))
    for one in told.values():  # with how long the repair took
        assert all(re.search(r"; [0-9.]+ s$", line) for line in one.lines if "was lost" in line)
    (line,) = changes(told)
    found = re.fullmatch(
        r"rank 1 \(host \S+, pid \d+\) was lost \(.+\); 2 of 3 ranks go on, numbered from 0, as view 2; step 2 was"
        r" made again without the part of rank 1: its batch is not in it",
        line,
    )
    assert found, line


def test_the_line_says_which_step_has_the_part_of_the_lost_ranks(tmp_path: Path) -> None:
    """Ranks 1 and 2 die behind their backward of step 2, which counts therefore; the next one is without them."""
    told = live(tmp_path, 4, Faults().kill(1, 1, "after backward").kill(2, 1, "after backward"))
    theirs = r"the parts? of (?P<{}>rank 1|rank 2|ranks 1 and 2)"
    for one in told.values():
        lines = [line for line in one.lines if " lost " in line]
        lost = set()
        for line in lines:
            found = re.search(
                rf"as view \d(; step 2 counts, with {theirs.format('with')})?"
                rf"(; step 3 (?P<tense>is|was) made again without {theirs.format('without')}: "
                r"(its batch is|their batches are) not in it)?; [0-9.]+ s$",
                line,
            )
            assert found, line
            assert found["tense"] in (None, "was" if line == lines[-1] else "is"), lines
            who = {found["with"], found["without"]} - {None}
            assert len(who) == 1, line
            lost |= set(re.findall(r"\d", who.pop()))
        assert lost == {"1", "2"}, lines


@pytest.mark.parametrize(("victim", "phase"), [(0, "checkpoint"), (1, "checkpoint"), (0, "checkpoint's write")])
def test_a_death_in_a_checkpoint(tmp_path: Path, victim: int, phase: str) -> None:
    told = live(tmp_path, 3, Faults().kill(victim, 1, phase), each_step="checkpoint", width=8)
    assert [one.sizes for one in told.values()] == [[3, 2, 2, 2]] * 2
    saved = sorted(path.name[:17] for path in (tmp_path / "checkpoints").iterdir())
    assert saved == [f"step-{step:012d}" for step in (1, 2, 3)]  # whole, and no unfinished one is left


@pytest.mark.parametrize("call", [call for call in jobs.EACH_STEP if call != "mean and state"])
def test_a_death_around_a_call_of_ringdp_that_all_ranks_make(tmp_path: Path, call: str) -> None:
    told = live(tmp_path, 3, Faults().kill(1, 2, "optimizer"), each_step=call, width=8)
    expected: dict[str, list[float]] = {"mean": [1.0] * 4, "unit": [3.0, 3.0, 2.0, 2.0]}
    assert all(one.extra[call] == expected.get(call, [None] * 4) for one in told.values())
    assert all(one.sizes == [3, 3, 2, 2] for one in told.values())
    (line,) = changes(told)
    named = {"mean": "mean", "unit": "a unit of the script"}.get(call, f"{call}()")
    assert f"{named} was made again without the part of rank 1" in line


@pytest.mark.parametrize("victim", sampled([0, 1, 2], 2))
def test_a_collective_of_the_program_itself(tmp_path: Path, victim: int) -> None:
    outcomes = run_outcomes(jobs.own_collective, str(tmp_path), victim, world_size=3, backend=None)
    told = survivors(outcomes, {victim: signal.SIGKILL})
    left = [place for place in range(3) if place != victim]
    for place, one in told.items():
        assert f"rank {victim}" in one["text"]
        assert "new members" in one["text"]
        assert (one["view"], one["survivors"]) == (2, left)
        assert (one["sum"], one["size"], one["rank"]) == (2.0, 2, left.index(place))
        assert (one["ranks"], one["places"], one["of_a_new_group"]) == ([0, 1], left, 4.0)
    assert len({tuple(one["gradients"]) for one in told.values()}) == 1


@pytest.mark.parametrize("victim", sampled([0, 2], 1))
def test_a_program_that_goes_on_from_its_checkpoint(tmp_path: Path, victim: int) -> None:
    outcomes = run_outcomes(jobs.goes_on_from_its_checkpoint, str(tmp_path), victim, world_size=3, backend=None)
    told = list(survivors(outcomes, {victim: signal.SIGKILL}).values())
    assert [one["again"] for one in told] == [1, 1]
    assert [one["made"] for one in told] == [[0, 1, 2, 3, 3, 4, 5]] * 2
    assert told[0]["parameters"] == told[1]["parameters"]


def test_another_job_of_a_process_that_was_left_alone(tmp_path: Path) -> None:
    outcomes = run_outcomes(jobs.another_job_afterwards, str(tmp_path), world_size=3, backend=None, others_stay=True)
    assert set(survivors(outcomes, {1: signal.SIGKILL}).values()) == {2.0}


def test_what_cannot_be_repaired_is_refused_by_name(tmp_path: Path) -> None:
    for said in run_ranks(jobs.refusals, str(tmp_path), world_size=2, backend=None):
        assert set(said) == set(jobs.REFUSED)
        for name, (_, text) in said.items():
            assert name in text
