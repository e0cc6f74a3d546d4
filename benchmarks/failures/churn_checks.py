"""What must hold of a job of churn.py, read from what its ranks wrote down (`churn_rank.Record`)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.failures.churn_rank import EXACT, coefficients, digest

MORE_DESCRIPTORS = 2
"""A file that a rank has open at the moment when it counts."""


@dataclass(frozen=True)
class Step:
    number: int
    size: int  # of the group, behind the step
    first: float  # of the mean: the members' sum of 2**place, by their number
    gradients: str
    parameters: str
    at: float
    descriptors: int


@dataclass
class Told:
    """By one rank; of one that was killed, up to then."""

    place: int
    pid: int = 0
    steps: list[Step] = field(default_factory=list)
    views: list[tuple[int, str]] = field(default_factory=list)  # number, places
    lines: list[str] = field(default_factory=list)
    means: dict[int, float] = field(default_factory=dict)
    ended: bool = False


def read(folder: Path, place: int) -> Told:
    told = Told(place)
    path = folder / f"record-{place}"
    for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
        if not line.endswith("\n"):
            break
        what, *words = line[:-1].split("\t")
        if what == "step":
            number, size, first, gradients, parameters, at, descriptors = words
            told.steps.append(
                Step(int(number), int(size), float.fromhex(first), gradients, parameters, float(at), int(descriptors))
            )
        elif what == "view":
            told.views.append((int(words[0]), words[1]))
        elif what == "line":
            told.lines.append(words[0])
        elif what == "mean":
            told.means[int(words[0])] = float(words[1])
        elif what == "begins":
            told.pid = int(words[0])
        elif what == "ends":
            told.ended = True
    return told


def members_of(first: float, ranks: int) -> tuple[int, ...]:
    """Whose mean it is; empty: nobody's."""
    for size in range(1, ranks + 1):
        total = round(first * size)
        members = tuple(place for place in range(ranks) if total >> place & 1)
        if len(members) == size and abs(total - first * size) < 1e-3 and total < 1 << ranks:
            return members
    return ()


def mean_of(members: tuple[int, ...], step: int) -> str:
    """The digest of the gradients of that step, computed without RingDP."""
    given = [coefficients(place, step) for place in members]
    sums = [torch.stack(parts).sum(0) for parts in zip(*given, strict=True)]
    return digest([one / len(members) for one in sums])


def wrong(told: list[Told], kind: str, survivors: Iterable[int]) -> list[str]:
    """Every sentence that does not hold, in words."""
    living = set(survivors)
    problems = _histories(told, living) + _views(told, living) + _descriptors(told, living)
    if kind in EXACT:
        problems += _means(told) + _lines(told)
    return problems


def _histories(told: list[Told], living: set[int]) -> list[str]:
    """Of a step that counts for some ranks, all have the same bits, and each rank has made all steps in turn."""
    problems = []
    seen: dict[int, tuple[int, Step]] = {}
    longest = max((len(one.steps) for one in told), default=0)
    for one in told:
        if [step.number for step in one.steps] != list(range(len(one.steps))):
            problems.append(f"place {one.place} left out a step, or made one twice")
        if one.place in living and (len(one.steps) != longest or not one.ended):
            problems.append(f"place {one.place} lived and made {len(one.steps)} of {longest} steps, end: {one.ended}")
        for step in one.steps:
            place, other = seen.setdefault(step.number, (one.place, step))
            if (step.gradients, step.parameters) != (other.gradients, other.parameters):
                problems.append(f"step {step.number} has counted with other bits for places {place} and {one.place}")
        for number, mean in one.means.items():
            if mean != float(number):
                problems.append(f"the mean of place {one.place} in step {number} is {mean}")
    return problems


def _views(told: list[Told], living: set[int]) -> list[str]:
    """All have gone through the same views, in the same order; who died has not seen the last of them."""
    problems = []
    seen = max((one.views for one in told), key=len, default=[])
    for one in told:
        if one.views != seen[: len(one.views)] or (one.place in living and len(one.views) != len(seen)):
            problems.append(f"place {one.place} went through {one.views}, others through {seen}")
        changes = [line for line in one.lines if " lost (" in line]
        if one.place in living and len(changes) != len(one.views):
            problems.append(f"place {one.place} wrote {len(changes)} lines of {len(one.views)} changes: {changes}")
    return problems


def _means(told: list[Told]) -> list[str]:
    """The mean of a step is over the members of some view, exactly, and views only lose members."""
    problems = []
    ranks = len(told)
    computed: dict[tuple[int, tuple[int, ...]], str] = {}
    for one in told:
        before: tuple[int, ...] = tuple(range(ranks))
        views = [before, *(tuple(int(place) for place in re.findall(r"\d+", places)) for _, places in one.views)]
        for step in one.steps:
            members = members_of(step.first, ranks)
            key = (step.number, members)
            if members not in views or not set(members) <= set(before) or one.place not in members:
                problems.append(f"step {step.number} of place {one.place} is the mean of places {members}: {step}")
                break
            before = members
            if key not in computed:
                computed[key] = mean_of(members, step.number)
            if computed[key] != step.gradients:
                problems.append(f"step {step.number} of place {one.place} is not exactly the mean of {members}")
    return problems


def _lines(told: list[Told]) -> list[str]:
    """What a line says has become of a step is what has become of it."""
    problems = []
    for one in told:
        sums = {step.number: set(members_of(step.first, len(told))) for step in one.steps}
        views = {1: set(range(len(told)))}
        views |= {view: {int(place) for place in re.findall(r"\d+", places)} for view, places in one.views}
        for line in one.lines:
            if (told_view := re.search(r"as view (\d+);", line)) is None:
                continue
            # "the checkpoint of step 5 was made again" is not about the step.
            for number, outcome in re.findall(r"; step (\d+) (was made again|is made again|counts)", line):
                step = int(number) - 1
                if step not in sums:  # killed before it could write the step down
                    continue
                if (outcome == "counts") != (sums[step] > views[int(told_view[1])]):
                    problems.append(f"place {one.place} says {line!r}, and its step is the mean of {sums[step]}")
    return problems


def _descriptors(told: list[Told], living: set[int]) -> list[str]:
    """A rank has not more of them at its end than when all were there."""
    problems = []
    for one in told:
        early = [step.descriptors for step in one.steps[5:15]]
        late = [step.descriptors for step in one.steps[-10:]]
        if one.place in living and early and max(late) > max(early) + MORE_DESCRIPTORS:
            problems.append(f"place {one.place} had {max(early)} descriptors, and {max(late)} at its end")
    return problems
