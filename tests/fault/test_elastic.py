"""An elastic job: ranks die anywhere, and the others have the gradients of a job without them, to the bit."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.fault import elastic_jobs as jobs
from tests.fault.elastic_jobs import OUTLIVES_S, PHASES, Death
from tests.fault.elastic_oracle import changes, check_equal, live, members_after, plain
from tests.train.harness import ring_is_built, run_outcomes, run_ranks

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("victim", [0, 2])
def test_a_death_in_each_phase_of_a_step(tmp_path: Path, phase: str, victim: int) -> None:
    deaths = (Death(victim, 1, phase),)
    told = live(tmp_path, 3, deaths)
    check_equal(told, plain(tmp_path, members_after(3, deaths)))
    for one in told.values():
        assert one.sizes[-1] == 2
    assert sorted(one.ranks[-1] for one in told.values()) == [0, 1]
    assert [one.ranks[-1] for one in told.values()] == [0, 1]  # in the old order


def test_one_after_the_other_down_to_one(tmp_path: Path) -> None:
    deaths = (Death(0, 1, "first bucket"), Death(3, 2, "forward"), Death(1, 3, "last bucket"))
    told = live(tmp_path, 4, deaths)
    check_equal(told, plain(tmp_path, members_after(4, deaths)))
    assert told[2].sizes == [4, 3, 2, 1]
    assert told[2].ranks == [2, 1, 1, 0]


def test_two_at_once(tmp_path: Path) -> None:
    deaths = (Death(0, 1, "last bucket"), Death(2, 1, "last bucket"))
    told = live(tmp_path, 4, deaths)
    check_equal(told, plain(tmp_path, members_after(4, deaths)))


def test_all_but_one_at_once(tmp_path: Path) -> None:
    deaths = tuple(Death(place, 1, "last bucket") for place in (0, 1, 3))
    told = live(tmp_path, 4, deaths)
    check_equal(told, plain(tmp_path, members_after(4, deaths)))


def test_a_segmentation_fault_with_children_that_live_on(tmp_path: Path) -> None:
    """They have the dead rank's descriptors."""
    deaths = (Death(1, 1, "last bucket", number=signal.SIGSEGV, children=2),)
    told = live(tmp_path, 3, deaths)
    check_equal(told, plain(tmp_path, members_after(3, deaths)))
    assert all(one.seconds[1] < OUTLIVES_S / 2 for one in told.values())


def test_a_step_of_the_default_reduction_a_small_bucket(tmp_path: Path) -> None:
    deaths = (Death(1, 1, "last bucket"),)
    told = live(tmp_path, 3, deaths, width=8)
    check_equal(told, plain(tmp_path, members_after(3, deaths), width=8))


def test_micro_batches(tmp_path: Path) -> None:
    deaths = (Death(1, 2, "last bucket"),)
    told = live(tmp_path, 3, deaths, accumulate=True)
    check_equal(told, plain(tmp_path, members_after(3, deaths), accumulate=True))


@pytest.mark.parametrize("weight", [None, "samples"])
def test_parameters_that_are_frozen_where_a_rank_is_lost(tmp_path: Path, weight: str | None) -> None:
    """Between the micro-batches of a step: their gradients so far are averaged over the ranks that are left."""
    deaths = (Death(0, 1, "forward"), Death(2, 2, "forward"))
    options: dict[str, Any] = {"accumulate": True, "freeze": (1, 2), "options": {"weight": weight}, "width": 8}
    told = live(tmp_path, 4, deaths, **options)
    check_equal(told, plain(tmp_path, members_after(4, deaths), **options))
    first, second = changes(told)
    assert "as view 2; the agreement on frozen parameters was made again without the part of rank 0" in first
    assert "as view 3; the agreement on frozen parameters was made again without the part of rank 2" in second


@pytest.mark.parametrize(
    ("phase", "what"), [("forward", "the comparison of changed"), ("new parameters", "the broadcast of new")]
)
def test_parameters_that_are_replaced_where_rank_0_is_lost(tmp_path: Path, phase: str, what: str) -> None:
    """The new ones are the next rank's."""
    told = live(tmp_path, 3, (Death(0, 2, phase),), replace=2, width=8)
    members = [(0, 1, 2), (0, 1, 2), (1, 2), (1, 2)]
    check_equal(told, plain(tmp_path, members, replace=2, width=8))
    (line,) = changes(told)
    assert f"as view 2; {what} parameters was made again without the part of rank 0" in line


def test_parameters_that_some_ranks_do_not_use(tmp_path: Path) -> None:
    deaths = (Death(1, 0, "last bucket"), Death(2, 2, "last bucket"))
    told = live(tmp_path, 4, deaths, branches=True, width=8)
    check_equal(told, plain(tmp_path, members_after(4, deaths), branches=True, width=8))


@pytest.mark.parametrize("infinite", [1, 2])
def test_a_loss_scale_follows_the_survivors_gradients(tmp_path: Path, infinite: int) -> None:
    deaths = (Death(1, 2, "last bucket"),)
    options: dict[str, Any] = {"overflow": (infinite, 2), "width": 8}
    told = live(tmp_path, 3, deaths, **options)
    check_equal(told, plain(tmp_path, members_after(3, deaths), **options))
    before, after = (float(told[0].parameters[step].split()[-1]) for step in (1, 2))
    halved = after < before
    assert halved == (infinite == 2)  # what the dead rank had does not count


@pytest.mark.parametrize("victim", [0, 1])
def test_buffers_that_each_forward_broadcasts(tmp_path: Path, victim: int) -> None:
    deaths = (Death(victim, 1, "last bucket"),)
    told = live(tmp_path, 3, deaths, norm=True, width=8)
    check_equal(told, plain(tmp_path, members_after(3, deaths), norm=True, width=8))


def test_a_stopped_rank_is_waited_for(tmp_path: Path) -> None:
    told = live(tmp_path, 3, (Death(1, 1, "first bucket", stop_s=1.5),))
    assert all(one.sizes == [3, 3, 3, 3] for one in told.values())
    assert not any("lost" in line for one in told.values() for line in one.lines)


def test_a_stopped_rank_is_waited_for_while_another_is_lost(tmp_path: Path) -> None:
    deaths = (Death(1, 1, "first bucket", stop_s=1.5), Death(2, 1, "last bucket"))
    told = live(tmp_path, 4, deaths)
    check_equal(told, plain(tmp_path, members_after(4, deaths[1:])))


def test_one_line_says_what_was_lost_and_what_became_of_the_step(tmp_path: Path) -> None:
    told = live(tmp_path, 3, (Death(1, 1, "last bucket"),))
    (line,) = changes(told)
    found = re.fullmatch(
        r"rank 1 \(host \S+, pid \d+\) was lost \(.+\); 2 of 3 ranks go on, numbered from 0, as view 2; step 2 was"
        r" made again without the part of rank 1: its batch is in no step",
        line,
    )
    assert found, line


def test_the_line_says_which_step_has_the_part_of_the_lost_ranks(tmp_path: Path) -> None:
    """Ranks 1 and 2 die behind their backward of step 2, which counts therefore; the next one is without them."""
    told = live(tmp_path, 4, (Death(1, 1, "after backward"), Death(2, 1, "after backward")))
    theirs = r"the parts? of (?P<{}>rank 1|rank 2|ranks 1 and 2)"
    for one in told.values():
        lines = [line for line in one.lines if " lost " in line]
        lost = set()
        for line in lines:
            found = re.search(
                rf"as view \d(; step 2 counts, with {theirs.format('with')})?"
                rf"(; step 3 (?P<tense>is|was) made again without {theirs.format('without')}: "
                r"(its batch is|their batches are) in no step)?; [0-9.]+ s$",
                line,
            )
            assert found, line
            assert found["tense"] in (None, "was" if line == lines[-1] else "is"), lines
            who = {found["with"], found["without"]} - {None}
            assert len(who) == 1, line
            lost |= set(re.findall(r"\d", who.pop()))
        assert lost == {"1", "2"}, lines


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("phase", ["checkpoint", "checkpoint's write"])
def test_a_death_in_a_checkpoint(tmp_path: Path, victim: int, phase: str) -> None:
    if (victim, phase) == (1, "checkpoint's write"):
        pytest.skip("rank 0 alone writes")
    told = live(tmp_path, 3, (Death(victim, 1, phase),), each_step="checkpoint", width=8)
    assert [one.sizes for one in told.values()] == [[3, 2, 2, 2]] * 2
    saved = sorted(path.name[:17] for path in (tmp_path / "checkpoints").iterdir())
    assert saved == [f"step-{step:012d}" for step in (1, 2, 3)]  # whole, and no unfinished one is left


@pytest.mark.parametrize("call", list(jobs.EACH_STEP))
def test_a_death_around_a_call_of_ringdp_that_all_ranks_make(tmp_path: Path, call: str) -> None:
    told = live(tmp_path, 3, (Death(1, 2, "optimizer"),), each_step=call, width=8)
    assert all(one.extra[call] == [1.0 if call == "mean" else None] * 4 for one in told.values())
    assert all(one.sizes == [3, 3, 2, 2] for one in told.values())
    (line,) = changes(told)
    assert f"{call}{'()' * (call != 'mean')} was made again without the part of rank 1" in line


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_collective_of_the_program_itself(tmp_path: Path, victim: int) -> None:
    outcomes = run_outcomes(jobs.own_collective, str(tmp_path), victim, world_size=3, backend=None)
    told = {outcome.rank: outcome.value for outcome in outcomes if outcome.rank != victim}
    for outcome in outcomes:
        assert outcome.rank == victim or outcome.text is None, outcome.text
    left = [place for place in range(3) if place != victim]
    for place, one in told.items():
        assert f"rank {victim}" in one["text"]
        assert "new members" in one["text"]
        assert (one["view"], one["survivors"]) == (2, left)
        assert (one["sum"], one["size"], one["rank"]) == (2.0, 2, left.index(place))
        assert (one["ranks"], one["places"], one["of_a_new_group"]) == ([0, 1], left, 4.0)
    assert len({tuple(one["gradients"]) for one in told.values()}) == 1


@pytest.mark.parametrize("victim", [0, 2])
def test_a_program_that_goes_on_from_its_checkpoint(tmp_path: Path, victim: int) -> None:
    outcomes = run_outcomes(jobs.goes_on_from_its_checkpoint, str(tmp_path), victim, world_size=3, backend=None)
    told = [outcome.value for outcome in outcomes if outcome.rank != victim]
    assert [one["again"] for one in told] == [1, 1]
    assert [one["made"] for one in told] == [[0, 1, 2, 3, 3, 4, 5]] * 2
    assert told[0]["parameters"] == told[1]["parameters"]


def test_what_cannot_be_repaired_is_refused_by_name(tmp_path: Path) -> None:
    expected = {
        "compression": "TopK",
        "compression set later": "PowerSGD",
        "measuring": "measure_compression",
        "guard": "guard_every",
        "skipping": "skip_all_reduce_unused_params",
        "mixed precision": "mixed_precision",
        "local sgd": "LocalSGD",
        "sparse": "sparse gradients",
        "hook": "communication hook noop_hook",
        "hook of the program": "mine",
        "hook over another group": "another group",
        "join": "Join",
        "subgroup": "default process group",
        "sampler": "BalancedSampler",
        "kvstore": "key-value store",
        "sharded embedding": "ShardedEmbedding",
        "diloco": "DiLoCo",
        "sparse all_reduce": "sparse tensors",
    }
    for said in run_ranks(jobs.refusals, str(tmp_path), tuple(expected), world_size=2, backend=None):
        assert set(said) == set(expected)
        for kind, words in expected.items():
            assert words in said[kind], said[kind]


def test_how_long_a_repair_takes(tmp_path: Path) -> None:
    """No bound: the figures go into docs/lab/elastic.md; here they are only there."""
    told = live(tmp_path, 3, (Death(1, 1, "last bucket"),))
    for one in told.values():
        (line,) = [line for line in one.lines if "was lost" in line]
        assert float(line.split()[-2]) < 30
