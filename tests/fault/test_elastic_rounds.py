"""Rounds in an elastic job: a round counts with the part of a lost rank, or is made again by those that are left.

The bits are those of jobs without elasticity, each of exactly the ranks whose parts are in the mean.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from ringdp import Compression, Fragments
from ringdp.compression import Int8, Sparse2
from tests.fault import elastic_round_jobs as jobs
from tests.fault.elastic_jobs import Told
from tests.fault.elastic_oracle import changes, check_equal, live, plain, survivors
from tests.fault.faults import Fault, Faults, drawn, sampled
from tests.train.harness import ring_is_built, run_outcomes, run_ranks

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")

BEFORE = ("forward", "leaving", "between")
"""A rank that dies there has no part in the mean."""
BEHIND = ("landed", "after")
"""It has one."""
EITHER = ("sent", "arrived", "done")
"""It has one if all others have the mean."""
PHASES = (*BEFORE, *EITHER, *BEHIND)


def compare(folder: Path, world: int, faults: Faults, **options: Any) -> dict[int, Told]:
    """A fault in a place that its step does not have ends no rank."""
    named: dict[str, Any] = {"world_size": world, "backend": None, "others_stay": True}
    outcomes = run_outcomes(jobs.train, str(folder), jobs.STEPS, faults, **named, **options)
    died = {one.rank: faults.ended()[one.rank] for one in outcomes if "died with code" in (one.text or "")}
    told = survivors(outcomes, died)
    means, *others = [one.extra["means"] for one in told.values()]
    assert all(one == means for one in others), [means, *others]
    for fault in (it for it in faults.all if it.ends and it.rank in died):
        check_members(means, fault)
    if "sites" not in options:
        apart = run_ranks(jobs.train, str(folder), jobs.STEPS, elastic=False, means=means, **named, **options)
        if not may_round(means, options["options"].get("compression")):
            check_equal(told, [(one.gradients, one.parameters) for one in apart])
        return told
    by_step = [{it.members for it in means if min(it.landed, jobs.LAST) == step} for step in jobs.STEPS]
    assert all(len(it) < 2 for it in by_step)
    following = [tuple(told)]
    for members in reversed(by_step):
        following.append(next(iter(members), following[-1]))
    check_equal(told, plain(following[:0:-1], jobs.train, jobs.STEPS, **options))
    return told


def may_round(means: list[jobs.Mean], compression: Any) -> bool:
    """Whether residuals may have gone from four ranks to three, and then to fewer, without a mean of three: what an
    owner owes is divided by 3 then and multiplied by 3 again, which rounds."""
    of_fragments = [[4, *(len(it.members) for it in means if it.fragment == number)] for number in range(3)]
    changes = itertools.chain.from_iterable(itertools.pairwise(sizes) for sizes in of_fragments)
    return compression is not None and any(was == 4 and now < 3 for was, now in changes)


def check_members(means: list[jobs.Mean], fault: Fault) -> None:
    """Whether the lost rank has its part in each mean, as far as that does not depend on who was faster."""
    first_landed = next((it for it in means if it.landed == fault.step), None)
    for mean in means:
        at_once = fault.phase == "after" or (fault.phase == "landed" and mean is first_landed)
        if mean.landed < fault.step or (mean.landed == fault.step and at_once):
            assert fault.rank in mean.members, (mean, fault)
        elif mean.left > fault.step or (mean.left == fault.step and fault.phase in BEFORE):
            assert fault.rank not in mean.members, (mean, fault)


@pytest.mark.parametrize("phase", ["between", "again", *sampled([it for it in PHASES if it != "between"], 3)])
def test_a_death_in_each_phase_of_a_round(tmp_path: Path, phase: str) -> None:
    """With momentum of the outer optimizer, and residuals."""
    faults = Faults().kill(1, 4, "between" if phase == "again" else phase)
    if phase == "again":
        faults = faults.kill(3, 4, phase)
    told = compare(tmp_path, 4, faults, options={"every": 2, "compression": Int8(error_feedback=True)}, finish=True)
    lines = changes(told)
    if phase == "between":
        (line,) = lines
        assert "DiLoCo step 4, every 2, fragment 1/1" in line
        assert "was made again without the part of rank 1" in line
    assert len(told) == 4 - len(faults.ended())
    assert all(one.sizes[-1] == len(told) for one in told.values())


SPARSE: dict[str, Any] = {"every": 2, "compression": Sparse2(1 / 1024), "clip": 1.0}


@pytest.mark.parametrize("phase", ["between", *sampled([it for it in PHASES if it != "between"], 1)])
def test_a_death_in_each_phase_of_a_sparse_round(tmp_path: Path, phase: str) -> None:
    """A rank's residual does not depend on the others: what leaves again is the same code."""
    faults = Faults().kill(1, 4, phase)
    told = compare(tmp_path, 3, faults, options=SPARSE, outer="usual", samples=True, finish=True)
    assert len(told) == 2


@pytest.mark.parametrize("kind", ["DiLoCo", "LocalSGD"])
def test_a_round_that_some_have_done_is_made_again(tmp_path: Path, kind: str) -> None:
    """Rank 0 has the mean with the part of rank 1, and rank 2 has not: nothing of it is left on rank 0."""
    options: dict[str, Any] = {"every": 2, "compression": Int8(error_feedback=True)}
    if kind == "LocalSGD":
        options["average_momenta"] = True
    faults = Faults().kill(1, 4, "done").do(2, 4, "done", jobs.Incomplete())
    told = compare(tmp_path, 3, faults, kind=kind, options=options)
    (line,) = changes(told)
    assert "was made again without the part of rank 1" in line


@pytest.mark.parametrize("compression", sampled([None, "int8", "int4"], 1))
def test_one_after_the_other_down_to_one(tmp_path: Path, compression: str | None) -> None:
    faults = Faults().kill(0, 2, "between").kill(3, 4, "forward").kill(1, 6, "sent")
    compare(tmp_path, 4, faults, options={"every": 2, "compression": compression})


def test_sparse_rounds_one_after_the_other_down_to_one(tmp_path: Path) -> None:
    faults = Faults().kill(0, 2, "between").kill(1, 6, "sent")
    compare(tmp_path, 3, faults, options=SPARSE, outer="usual")


@pytest.mark.parametrize("delay", [1, 3])
def test_fragments_on_their_way_leave_again(tmp_path: Path, delay: int) -> None:
    """They left before the loss, and are waited for behind it, as is one that another unit has told of."""
    options = {"every": 4, "fragments": Fragments(2, delay=delay), "compression": Int8(error_feedback=True)}
    faults = Faults().kill(2, 4, "between").kill(0, 6, "after")
    told = compare(tmp_path, 4, faults, options=options, width=300, mean_each=2)
    assert told[1].gradients == told[3].gradients
    means = told[1].extra["means"]
    assert means[-1].members == (1, 3)
    on_their_way = [it for it in means if it.left < 4 < it.landed or it.left < 6 < it.landed]
    assert len(on_their_way) == (0 if delay == 1 else 2)


def test_local_sgd_with_momenta(tmp_path: Path) -> None:
    options = {"every": 3, "average_momenta": True}
    compare(tmp_path, 3, Faults().kill(0, 3, "between"), kind="LocalSGD", options=options, norm=True, finish=True)


@pytest.mark.parametrize("phase", sampled([*BEFORE, "landed"], 1))
def test_rounds_by_time(tmp_path: Path, phase: str) -> None:
    faults = Faults().kill(1, 3, phase)
    outcomes = run_outcomes(jobs.unequal, str(tmp_path), faults, world_size=3, backend=None)
    told = survivors(outcomes, faults.ended())
    assert told[0]["parameters"] == told[2]["parameters"]
    sizes = [len(it.members) for it in told[0]["means"]]
    assert sizes == [len(it.members) for it in told[2]["means"]]
    assert (sizes[0], sizes[-1]) == (3, 2)


SITES = ((0, 2), (1, 3, 4))


@pytest.mark.parametrize(
    "faults",
    sampled(
        [
            Faults().kill(3, 3, "forward"),
            Faults().kill(0, 4, "after").kill(4, 7, "forward"),
            Faults().kill(2, 2, "landed").kill(0, 5, "forward"),  # the last one of a site
            Faults().kill(0, 3, "forward").kill(2, 3, "forward"),
        ],
        2,
    ),
)
@pytest.mark.parametrize("compression", [None, *sampled([Int8(error_feedback=True)], 0)])
def test_sites_that_lose_a_rank(tmp_path: Path, faults: Faults, compression: Any) -> None:
    """One goes on with the others, and one that has none left is taken out."""
    options: dict[str, Any] = {"every": 2, "compression": compression}
    compare(tmp_path, 5, faults, options=options, sites=SITES)


def test_rounds_between_counterparts_are_over_all_ranks(tmp_path: Path) -> None:
    """So that a rank whose counterpart is lost goes on as those of its site do."""
    faults = Faults().kill(1, 3, "forward").kill(2, 6, "after")
    compare(tmp_path, 5, faults, options={"every": 2}, sites=SITES, counterparts=True)


def test_rounds_over_a_part_of_a_site_are_refused(tmp_path: Path) -> None:
    run_ranks(jobs.part_of_a_site, str(tmp_path), world_size=3, backend=None)


@pytest.mark.parametrize("phase", sampled(["leaving", "between", "sent", "done"], 1))
def test_a_site_that_loses_a_rank_in_the_exchange(tmp_path: Path, phase: str) -> None:
    """Its gradient of that step is in the site's mean."""
    faults = Faults().kill(3, 4, phase)
    told = live(tmp_path, 5, faults, jobs.train, jobs.STEPS, options={"every": 2}, sites=SITES)
    assert all(one.gradients == told[0].gradients for one in told.values())
    assert told[1].parameters == told[4].parameters
    assert told[0].parameters == told[2].parameters
    assert told[1].parameters[2] != told[0].parameters[2]  # between rounds


def drawn_job(number: int) -> tuple[Faults, dict[str, Any]]:
    """One to three ranks of four are lost, some at once, some in the repair."""
    draw = random.Random(number)
    every = draw.choice([2, 3, 4])
    fragments = draw.choice([1, 1, 2, 3])
    delay = draw.choice([0, 0, 1, every - 1])
    options: dict[str, Any] = {"every": every, "fragments": Fragments(fragments, delay=delay)}
    codec = draw.choice([None, "int8", "bf16", Int8(error_feedback=True), "int4", SPARSE["compression"]])
    warm = draw.choice([0, 0, 2])
    options["compression"] = Compression(codec, warmup_steps=warm) if warm else codec
    job: dict[str, Any] = {"options": options, "width": draw.choice([8, 8, 300])}
    job["kind"] = draw.choice(["DiLoCo", "DiLoCo", "LocalSGD"])
    if job["kind"] == "LocalSGD":
        options["average_momenta"] = delay == 0 and draw.random() < 0.5
    else:
        job["outer"] = draw.choice(list(jobs.OUTER))
    job["samples"] = draw.random() < 0.3
    job["finish"] = draw.random() < 0.5
    job["mean_each"] = draw.choice([0, 0, 1, 3])
    if draw.random() < 0.2:
        job["infinite"] = (draw.randrange(4), draw.randrange(1, 9))
    faults, step = Faults(), draw.randrange(1, jobs.LAST + job["finish"])
    phases = [it for it in PHASES if it != "after" or step <= jobs.LAST]
    lost = draw.sample(range(4), draw.choice([1, 1, 2, 3]))
    for count, place in enumerate(lost):
        phase = draw.choice([*phases, "done", *(["again", "again"] if count else [])])
        faults = faults.kill(place, step, phase)
        if phase == "done":
            faults = faults.do(draw.choice([it for it in range(4) if it not in lost]), step, phase, jobs.Incomplete())
        step = min(step + draw.choice([0, 0, 1, 2]), jobs.LAST)
    return faults, job


@pytest.mark.parametrize("number", drawn(300, quick=40))
def test_a_drawn_job(tmp_path: Path, number: int) -> None:
    faults, job = drawn_job(number)
    compare(tmp_path, 4, faults, **job)
