"""What must hold of a job of churn.py, read from what its ranks wrote down (`churn_rank.Record`)."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.failures.churn_rank import CODES, EXACT, SAMPLES, coefficients, digest

MORE_DESCRIPTORS = 2
"""A file that a rank has open at the moment when it counts."""
COUNTED = 20
"""Steps behind a change of the members, of which the least counts."""
OWED = 0.1
"""Of a projection, by which what the ranks owe may be off: a step's rounding makes 1e-4 of it."""


@dataclass(frozen=True)
class Step:
    number: int
    size: int  # of the group, behind the step
    first: float  # of the mean: the members' sum of 2**place, by their number
    gradients: str
    parameters: str
    at: float
    descriptors: int
    threads: int = 0


@dataclass
class Told:
    """By one rank; of one that was killed, up to then.

    Attributes:
        views: numbers and places.
        batches: by step, the samples that it had, and their epoch; ledgers: those of the step's mean, and its places.
        owed: by step the projections of its gradient, of its residuals behind it, and of the mean.
        rounds: by number, the digest of the global parameters, and the places of the members.
        audit: by step, the samples of the last batch that it was given for it.
        site: of two.
        launcher: 0: the one of the job; otherwise which of those that joined it.
        left: with which exit code; None: it did not.
    """

    place: int
    pid: int = 0
    steps: list[Step] = field(default_factory=list)
    views: list[tuple[int, str]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    means: dict[int, float] = field(default_factory=dict)
    batches: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    ledgers: dict[int, tuple[int, list[int], list[int]]] = field(default_factory=dict)
    owed: dict[int, tuple[float, float, float]] = field(default_factory=dict)
    rounds: dict[int, tuple[str, str]] = field(default_factory=dict)
    audit: dict[int, list[int]] = field(default_factory=dict)
    site: int = 0
    launcher: int = 0
    started: float = 0.0
    left: int | None = None
    ended: bool = False


def read(folder: Path, place: int, newest: int = 0) -> Told:
    """`newest`: only so many bytes at the end of the record."""
    told = Told(place)
    path = folder / f"record-{place}"
    if not path.exists():
        return told
    with path.open("rb") as file:
        if newest and path.stat().st_size > newest:
            file.seek(-newest, 2)
            file.readline()
        lines = file.read().decode().splitlines(keepends=True)
    for line in lines:
        if not line.endswith("\n"):
            break
        what, *words = line[:-1].split("\t")
        _READ.get(what, lambda told, words: None)(told, words)
    return told


def _step(told: Told, words: list[str]) -> None:
    number, size, first, gradients, parameters, at, descriptors, threads = words
    numbers = int(descriptors), int(threads)
    told.steps.append(Step(int(number), int(size), float.fromhex(first), gradients, parameters, float(at), *numbers))


def _begins(told: Told, words: list[str]) -> None:
    told.pid = int(words[0])


def _started(told: Told, words: list[str]) -> None:
    told.launcher, told.started = int(words[1]), float(words[2])


def _numbers(text: str) -> list[int]:
    return [int(one) for one in text.split()]


_READ: dict[str, Callable[[Told, list[str]], object]] = {
    "step": _step,
    "begins": _begins,
    "started": _started,
    "view": lambda told, words: told.views.append((int(words[0]), words[1])),
    "line": lambda told, words: told.lines.append(words[0]),
    "mean": lambda told, words: told.means.update({int(words[0]): float(words[1])}),
    "batch": lambda told, words: told.batches.update({int(words[0]): (int(words[1]), _numbers(words[2]))}),
    "ledger": lambda told, words: told.ledgers.update(
        {int(words[0]): (int(words[1]), _numbers(words[2]), _numbers(words[3]))}
    ),
    "owed": lambda told, words: told.owed.update({int(words[0]): (float(words[1]), float(words[2]), float(words[3]))}),
    "round": lambda told, words: told.rounds.update({int(words[0]): (words[1], words[2])}),
    "site": lambda told, words: setattr(told, "site", int(words[0])),
    "left": lambda told, words: setattr(told, "left", int(words[0])),
    "ends": lambda told, words: setattr(told, "ended", True),
}


def read_audit(folder: Path, told: Told) -> None:
    path = folder / f"audit-{told.place}"
    for line in path.read_text().splitlines() if path.exists() else ():
        it = json.loads(line)
        told.audit[it["step"]] = it["samples"]


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
    if kind in CODES:
        site = {one.place: one.site for one in told}.__getitem__
        problems = _histories(told, living, site) + _rounds(told) + _views_of_sites(told, living, site)
        return problems + _means(told, site) + _descriptors(told, living)
    problems = _histories(told, living) + _views(told, living) + _descriptors(told, living)
    if kind in EXACT or kind == "topk":
        problems += _means(told, exact=kind in EXACT) + _lines(told)
    if kind == "topk":
        problems += _samples(told) + _owed(told)
    return problems


def wrong_where_ranks_come(told: list[Told], kind: str, survivors: Iterable[int]) -> list[str]:
    """Of a job of `ringdp.elastic`; its ranks are known by their pids. Steps are counted from 1."""
    living = set(survivors)
    if kind == "job-quorum":  # ranks are at steps of their own, and a late one does not see each turn
        problems = _same_bits(told, all_seen=False) + _views_where_ranks_come(told)
        behind = [f"process {it.place} lived and has no end" for it in told if it.place in living and not it.ended]
        return problems + behind + _grown([one for one in told if one.place in living])
    problems = _same_bits(told) + (_samples if kind == "job" else _samples_of_rounds)(told)
    problems += _views_where_ranks_come(told)
    last = max((one.steps[-1].number for one in told if one.steps), default=0)
    for one in told:
        if one.place in living and not (one.ended and one.steps and one.steps[-1].number == last):
            at = one.steps[-1].number if one.steps else 0
            problems.append(f"process {one.place} lived and made {at} of {last} steps, end: {one.ended}")
    return problems + _grown([one for one in told if one.place in living])


def all_places(place: int) -> int:
    return 0


def _histories(told: list[Told], living: set[int], site: Callable[[int], int] = all_places) -> list[str]:
    """Of a step that counts for some ranks, all have the same bits, and each rank has made all steps in turn."""
    problems = _same_bits(told, site)
    longest = max((len(one.steps) for one in told), default=0)
    for one in told:
        if one.steps and one.steps[0].number != 0:
            problems.append(f"place {one.place} left out a step, or made one twice")
        if one.place in living and (len(one.steps) != longest or not one.ended):
            problems.append(f"place {one.place} lived and made {len(one.steps)} of {longest} steps, end: {one.ended}")
        for number, mean in one.means.items():
            if mean != float(number):
                problems.append(f"the mean of place {one.place} in step {number} is {mean}")
    return problems


def _same_bits(told: list[Told], site: Callable[[int], int] = all_places, *, all_seen: bool = True) -> list[str]:
    problems = []
    seen: dict[tuple[int, int], tuple[int, Step]] = {}
    for one in told:
        if all_seen and any(after.number != before.number + 1 for before, after in itertools.pairwise(one.steps)):
            problems.append(f"place {one.place} left out a step, or made one twice")
        for step in one.steps:
            place, other = seen.setdefault((step.number, site(one.place)), (one.place, step))
            if (step.gradients, step.parameters) != (other.gradients, other.parameters):
                problems.append(f"step {step.number} has counted with other bits for places {place} and {one.place}")
                break
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


def _means(told: list[Told], site: Callable[[int], int] = all_places, *, exact: bool = True) -> list[str]:
    """The mean of a step is over the members of some view, exactly, and views only lose members."""
    problems = []
    ranks = len(told)
    computed: dict[tuple[int, tuple[int, ...]], str] = {}
    for one in told:
        before: tuple[int, ...] = tuple(place for place in range(ranks) if site(place) == site(one.place))
        views = [before, *(tuple(int(place) for place in re.findall(r"\d+", places)) for _, places in one.views)]
        for step in one.steps:
            members = members_of(step.first, ranks)
            key = (step.number, members)
            if members not in views or not set(members) <= set(before) or one.place not in members:
                problems.append(f"step {step.number} of place {one.place} is the mean of places {members}: {step}")
                break
            before = members
            if not exact:
                continue
            if key not in computed:
                computed[key] = mean_of(members, step.number)
            if computed[key] != step.gradients:
                problems.append(f"step {step.number} of place {one.place} is not exactly the mean of {members}")
    return problems


def _views_of_sites(told: list[Told], living: set[int], site: Callable[[int], int]) -> list[str]:
    """Each site has views of its own, and all ranks have those of both sites; each is a line."""
    problems = []

    def of_both(views: Iterable[tuple[int, str]]) -> list[tuple[int, str]]:
        return [it for it in views if len({site(int(place)) for place in re.findall(r"\d+", it[1])}) == 2]

    seen: dict[int, Told] = {}
    for one in told:
        if one.place not in living:
            continue
        changes = [line for line in one.lines if " lost (" in line]
        if len(changes) != len(one.views):
            problems.append(f"place {one.place} wrote {len(changes)} lines of {len(one.views)} changes: {changes}")
        other = seen.setdefault(one.site, one)
        if sorted(other.views) != sorted(one.views):
            problems.append(f"place {one.place} went through {one.views}, place {other.place} through {other.views}")
        first = next(iter(seen.values()))
        if of_both(first.views) != of_both(one.views):
            problems.append(f"place {one.place} went through {one.views}, place {first.place} through {first.views}")
    return problems


def _rounds(told: list[Told]) -> list[str]:
    """All have the same bits of the global parameters behind each round, and the same members, which become fewer."""
    problems = []
    seen: dict[int, tuple[int, tuple[str, str]]] = {}
    for one in told:
        before: set[int] | None = None
        if list(one.rounds) != list(range(1, len(one.rounds) + 1)):
            problems.append(f"place {one.place} left out a round: {list(one.rounds)}")
        for number, (bits, members) in one.rounds.items():
            place, (others, _) = seen.setdefault(number, (one.place, (bits, members)))
            if bits != others:
                problems.append(f"round {number} ended with other bits for places {place} and {one.place}")
            now = set(_numbers(members))
            if one.place not in now or (before is not None and not now <= before):
                problems.append(f"round {number} of place {one.place} has members {members}")
            before = now
    return problems


def _views_where_ranks_come(told: list[Told]) -> list[str]:
    """A view has the same places for all that were in it; a rank goes through all from its first one on."""
    problems = []
    seen: dict[int, tuple[int, str]] = {}
    for one in told:
        numbers = [number for number, _ in one.views]
        if numbers != list(range(numbers[0], numbers[0] + len(numbers)) if numbers else ()):
            problems.append(f"process {one.place} went through views {numbers}")
        for number, places in one.views:
            process, others = seen.setdefault(number, (one.place, places))
            if places != others:
                problems.append(f"view {number} has {places} for process {one.place}, {others} for {process}")
        counts = Counter(re.findall(r" as view (\d+);", " ".join(line for line in one.lines if " lost (" in line)))
        if twice := [view for view, times in counts.items() if times > 1]:
            problems.append(f"process {one.place} wrote two lines of the views {twice}")
    return problems


def _samples(told: list[Told]) -> list[str]:
    """The mean of a step has the samples that its ranks were given, and each sample of an epoch is in one of them, or
    a line says how many are in none."""
    problems = []
    steps: dict[int, tuple[int, list[int], list[int]]] = {}
    given: dict[tuple[int, int], list[int]] = {}  # by place and step; in jobs in which ranks come, of the last one
    for one in told:
        for step, ledger in one.ledgers.items():
            if steps.setdefault(step, ledger) != ledger:
                problems.append(f"place {one.place} had other samples in step {step}: {ledger}, {steps[step]}")
        given |= {(one.place, step): samples for step, (_, samples) in one.batches.items()}
    for step, (_, samples, places) in steps.items():
        had = [given.get((place, step)) for place in places]
        if given and (None in had or sorted(itertools.chain.from_iterable(it or () for it in had)) != sorted(samples)):
            problems.append(f"the mean of step {step} has samples {samples}, places {places} had {had}")
    problems += _audited(told, steps)
    seen: dict[int, Counter[int]] = defaultdict(Counter)
    for epoch, samples, _ in steps.values():
        seen[epoch].update(samples)
    dropped = _dropped(told)
    last = max(seen, default=0)
    for epoch, counts in seen.items():
        if twice := [sample for sample, times in counts.items() if times > 1]:
            problems.append(f"epoch {epoch} has samples twice: {twice}")
        missing = SAMPLES - len(counts)
        if epoch < last and missing != dropped[epoch]:
            problems.append(f"epoch {epoch} is without {missing} samples, and the lines name {dropped[epoch]}")
    return problems


def _samples_of_rounds(told: list[Told]) -> list[str]:
    """All ranks have the same samples in the mean of a round; in all rounds each sample is as often as there were
    epochs, or once more, or a line says how many are in none."""
    problems = []
    rounds: dict[int, tuple[int, list[int], list[int]]] = {}
    for one in told:
        for number, ledger in one.ledgers.items():
            if rounds.setdefault(number, ledger) != ledger:
                problems.append(f"place {one.place} had other samples in round {number}: {ledger}, {rounds[number]}")
    counts = Counter(sample for _, samples, _ in rounds.values() for sample in samples)
    epochs = max((epoch for epoch, _, _ in rounds.values()), default=0)
    if often := [sample for sample, times in counts.items() if times > epochs + 1]:
        problems.append(f"samples {often} are in more than {epochs + 1} rounds")
    missing = sum(max(epochs - counts[sample], 0) for sample in range(SAMPLES))
    if missing > (dropped := sum(_dropped(told).values())):
        problems.append(f"{epochs} epochs are without {missing} samples, and the lines name {dropped}")
    return problems


def _dropped(told: list[Told]) -> Counter[int]:
    """By epoch, the samples that lines say are in no step."""
    dropped: Counter[int] = Counter()
    for line in {line for one in told for line in one.lines if "in no step: no batch" in line}:
        if found := re.search(r"epoch (\d+): (\d+) samples", line):
            dropped[int(found[1])] += int(found[2])
    return dropped


def _audited(told: list[Told], steps: dict[int, tuple[int, list[int], list[int]]]) -> list[str]:
    """Where ranks write an audit: of those that made a step, it has the samples of the step's mean."""
    audited: dict[int, list[int]] = defaultdict(list)
    makers: Counter[int] = Counter()
    for one in told:
        for step in one.steps if one.audit else ():
            audited[step.number] += one.audit.get(step.number, [])
            makers[step.number] += 1
    return [
        f"the mean of step {step} has samples {samples}, the audit of its ranks {sorted(audited[step])}"
        for step, (_, samples, places) in steps.items()
        if makers[step] == len(places) and sorted(audited[step]) != sorted(samples)
    ]


def _owed(told: list[Told]) -> list[str]:
    """What error feedback keeps: the gradients of a step and what was owed before are its mean and what is owed."""
    problems = []
    by_place = {one.place: one.owed for one in told}
    for step in sorted({step for one in told for step in one.ledgers}):
        places = next(one.ledgers[step][2] for one in told if step in one.ledgers)
        if step == 0 or not all(step in by_place[place] and step - 1 in by_place[place] for place in places):
            continue  # one of them died before it could write
        kept = sum(by_place[it][step - 1][1] + by_place[it][step][0] - by_place[it][step][1] for it in places)
        sent = len(places) * by_place[places[0]][step][2]
        if abs(kept - sent) > OWED:
            problems.append(f"in step {step} the ranks owe {sent - kept:g} more than what was left out")
    return problems


def pauses(told: Sequence[Told], stops: Sequence[tuple[float, float]]) -> list[tuple[float, float, int]]:
    """The longest one between two steps of each process, less the time for which ranks were stopped: seconds, when,
    and whose."""
    found = []
    for one in told:
        of_one = [(0.0, 0.0, one.place)]
        for before, after in itertools.pairwise(one.steps):
            stopped = sum(max(0.0, min(after.at, end) - max(before.at, begin)) for begin, end in stops)
            of_one.append((after.at - before.at - stopped, before.at, one.place))
        found.append(max(of_one))
    return found


def _grown(told: Sequence[Told]) -> list[str]:
    """Each time when ranks have come, there are as many descriptors and threads as when there were so many before.
    (While newcomers are met, and after losses, there are more.)"""
    problems = []
    for one in told:
        first: dict[int, dict[str, int]] = {}
        size_before = 0
        for size, group in itertools.groupby(one.steps, lambda step: step.size):
            steps = list(group)[:COUNTED]
            now = {what: min(getattr(it, what) for it in steps) for what in ("descriptors", "threads")}
            if size > size_before:
                before = first.setdefault(size, now)
                problems += [
                    f"process {one.place} of {size} had {before[what]} {what}, and {now[what]} later"
                    for what in now
                    if now[what] > before[what] + MORE_DESCRIPTORS
                ]
            size_before = size
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
