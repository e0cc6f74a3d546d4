"""What an elastic job has to be equal to: jobs without elasticity, of exactly the ranks that made each step."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

from tests.fault import elastic_jobs as jobs
from tests.fault.elastic_jobs import PHASES, Death, Told
from tests.train.harness import run_outcomes, run_ranks

STEPS = range(4)


def live(
    folder: Path, world: int, deaths: tuple[Death, ...], train: Callable[..., Told] = jobs.train, **options: Any
) -> dict[int, Told]:
    """By place, what the ranks tell that live to the end. All others have died."""
    outcomes = run_outcomes(train, str(folder), STEPS, deaths, world_size=world, backend=None, **options)
    dead = {death.place: death.number for death in deaths if death.stop_s == 0}
    for outcome in outcomes:
        if outcome.rank in dead:
            assert f"died with code -{dead[outcome.rank]}" in (outcome.text or "")
        else:
            assert outcome.text is None, outcome.text
    return {outcome.rank: outcome.value for outcome in outcomes if outcome.rank not in dead}


def plain(
    folder: Path, members: list[tuple[int, ...]], train: Callable[..., Told] = jobs.train, **options: Any
) -> tuple[list[str], list[str]]:
    """The gradients and parameters of a job without elasticity, in which exactly these have made each step.

    A new job begins where the members change. Each of its ranks has what error feedback of the same place held.
    """
    gradients: list[str] = []
    parameters: list[str] = []
    state = None
    for places, steps in groupby(STEPS, lambda step: members[step - STEPS.start]):
        made = list(steps)
        own = folder / f"plain{made[0]}"
        own.mkdir()
        told: list[Told] = run_ranks(
            train,
            str(own),
            range(made[0], made[-1] + 1),
            elastic=False,
            places=places,
            state=state,
            world_size=len(places),
            backend=None,
            **options,
        )
        gradients += told[0].gradients
        parameters += told[0].parameters
        state = told[0].state
        for own_of_each in ("residuals", "left"):
            state[own_of_each] = {place: one.state.get(own_of_each) for place, one in zip(places, told, strict=True)}
    return gradients, parameters


def check_equal(told: dict[int, Told], expected: tuple[list[str], list[str]]) -> None:
    for place, one in told.items():
        assert one.gradients == expected[0], f"gradients of place {place}"
        assert one.parameters == expected[1], f"parameters of place {place}"


def changes(told: dict[int, Told]) -> list[str]:
    """The lines of the changes, which all ranks have written alike, but for the times."""
    same = [[re.sub(r"; [0-9.]+ s$", "", line) for line in one.lines if " lost " in line] for one in told.values()]
    assert all(lines == same[0] for lines in same), same
    return same[0]


def members_after(world: int, deaths: tuple[Death, ...]) -> list[tuple[int, ...]]:
    """Who has made each step: a rank that died behind its backward has."""
    members = []
    for step in STEPS:
        gone = {
            death.place
            for death in deaths
            if death.step < step or (death.step == step and PHASES.index(death.phase) < PHASES.index("after backward"))
        }
        members.append(tuple(place for place in range(world) if place not in gone))
    return members
