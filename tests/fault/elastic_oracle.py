"""What an elastic job has to be equal to: jobs without elasticity, of exactly the ranks that made each step."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.fault import elastic_jobs as jobs
from tests.fault.elastic_jobs import Told
from tests.fault.faults import Faults
from tests.train.harness import Outcome, name_jobs_after, run_outcomes, run_ranks

STEPS = range(4)
Train = Callable[..., Told]
Results = tuple[list[str], list[str]]
"""The gradients and the parameters after each step."""


def survivors(outcomes: list[Outcome], ended: dict[int, int]) -> dict[int, Any]:
    """By place, what the ranks tell that live to the end. All others were ended by their signals."""
    for outcome in outcomes:
        if outcome.rank in ended:
            assert f"died with code -{ended[outcome.rank]}" in (outcome.text or "lived"), outcome.text
        else:
            assert outcome.text is None, outcome.text
    return {outcome.rank: outcome.value for outcome in outcomes if outcome.rank not in ended}


def live(
    folder: Path, world: int, faults: Faults, train: Train = jobs.train, steps: range = STEPS, **options: Any
) -> dict[int, Told]:
    outcomes = run_outcomes(
        train, str(folder), steps, faults, world_size=world, backend=None, others_stay=True, **options
    )
    return survivors(outcomes, faults.ended())


def compare(folder: Path, world: int, faults: Faults, train: Train = jobs.train, **options: Any) -> dict[int, Told]:
    """A job with these faults, whose results have to be those of jobs without elasticity."""
    told = live(folder, world, faults, train, **options)
    check_equal(told, plain(faults.members(world, STEPS), train, **options))
    return told


_known: dict[str, list[Results]] = {}


def plain(
    members: list[tuple[int, ...]], train: Train = jobs.train, steps: range = STEPS, **options: Any
) -> list[Results]:
    """By place, of jobs without elasticity, in which exactly these have made each step."""
    key = repr((train.__module__, members, steps, sorted(options.items())))
    if key not in _known:
        with tempfile.TemporaryDirectory(prefix="ringdp-plain-") as folder:
            world = 1 + max(members[0])
            given: dict[str, Any] = {"world_size": world, "backend": None, "others_stay": True}
            results = run_ranks(in_turn, folder, train, members, steps, options, **given)
        _known[key] = results
    return _known[key]


def in_turn(
    folder: str, train: Train, members: list[tuple[int, ...]], all_steps: range, options: dict[str, Any]
) -> Results:
    """On a rank: a new job begins where the members change, with the state that this rank has."""
    me = int(os.environ["RANK"])
    gradients: list[str] = []
    parameters: list[str] = []
    state: dict[str, Any] | None = None
    for places, steps in groupby(all_steps, lambda step: members[step - all_steps.start]):
        made = list(steps)
        if me not in places:
            break
        os.environ |= {"RANK": str(places.index(me)), "WORLD_SIZE": str(len(places))}
        at = Path(folder, str(made[0]))
        at.mkdir(exist_ok=True)
        name_jobs_after(str(at))
        told = train(str(at), range(made[0], made[-1] + 1), elastic=False, places=places, state=state, **options)
        gradients += told.gradients
        parameters += told.parameters
        state = told.state
    return gradients, parameters


def check_equal(told: dict[int, Told], expected: list[Results]) -> None:
    for place, one in told.items():
        gradients, parameters = expected[place]
        assert one.gradients == gradients, f"gradients of place {place}"
        assert one.parameters == parameters, f"parameters of place {place}"


def changes(told: dict[int, Told]) -> list[str]:
    """The lines of the changes, which all ranks have written alike, but for the times."""
    same = [[re.sub(r"; [0-9.]+ s$", "", line) for line in one.lines if " lost " in line] for one in told.values()]
    assert all(lines == same[0] for lines in same), same
    return same[0]
