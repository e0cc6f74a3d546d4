"""Samples in an elastic job: each one of an epoch is in exactly one step that counts, or a line names it."""

from __future__ import annotations

import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ringdp.data import Limits
from tests.fault import elastic_data_jobs as jobs
from tests.fault.elastic_oracle import survivors
from tests.fault.faults import PHASES, Faults, drawn
from tests.train.harness import ring_is_built, run_outcomes

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")
WORLD = 4
Parts = dict[int, list[int]]


def train(folder: Path, faults: Faults, **job: Any) -> tuple[dict[int, Any], list[tuple[int, Parts]]]:
    """What the survivors tell; and of each step its epoch, and what each rank had that has a part in it."""
    told = live(folder, faults, **job)
    return told, parts_of(folder, faults, told, range(WORLD))


def live(folder: Path, faults: Faults, **job: Any) -> dict[int, Any]:
    given: dict[str, Any] = {"samples": 100, "batch": 12, "epochs": 3, "ahead": (0,) * WORLD} | job
    outcomes = run_outcomes(
        jobs.balanced, str(folder), faults, world_size=WORLD, backend=None, others_stay=True, **given
    )
    return survivors(outcomes, faults.ended())


def parts_of(folder: Path, faults: Faults, told: dict[int, Any], places: Sequence[int]) -> list[tuple[int, Parts]]:
    """`places`: those that train together."""
    (steps,) = {told[place]["steps"] for place in places if place in told}
    members = faults.members(WORLD, range(steps))
    parts: list[tuple[int, Parts]] = [(-1, {}) for _ in range(steps)]
    for place in places:
        for line in (folder / f"samples-{place}").read_text().splitlines():
            epoch, step, samples = json.loads(line)
            if step < steps and place in members[step]:
                parts[step] = (epoch, parts[step][1] | {place: samples})
    return parts


def check_samples(
    folder: Path, parts: list[tuple[int, Parts]], samples: int, epochs: int, places: Sequence[int]
) -> None:
    seen: dict[int, Counter[int]] = defaultdict(Counter)
    for epoch, of_step in parts:
        for one in of_step.values():
            seen[epoch].update(one)
    logs = [(folder / f"log-{place}").read_text().splitlines() for place in places]
    lines = {line for log in logs for line in log if "in no step: no batch" in line}
    dropped: Counter[int] = Counter()
    for line in lines:
        epoch, count = map(int, re.findall(r"epoch (\d+): (\d+) samples", line)[0])
        dropped[epoch] += count
    for epoch in range(epochs):
        twice = [sample for sample, times in seen[epoch].items() if times > 1]
        assert not twice, f"epoch {epoch}"
        assert samples - len(seen[epoch]) == dropped[epoch], f"epoch {epoch}: {sorted(lines)}"


def check_weights(told: dict[int, Any], parts: list[tuple[int, Parts]], samples: int, places: Sequence[int]) -> None:
    """One process that trains each step with the samples of the ranks that have a part in it."""
    x, y = jobs.data(samples)
    alone = jobs.net()
    optimizer = torch.optim.SGD(alone.parameters(), 0.05)
    for _, of_step in parts:
        batch = [sample for one in of_step.values() for sample in one]
        (alone(x[batch]) - y[batch]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for place in (it for it in places if it in told):
        for mine, theirs in zip(told[place]["weights"], alone.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs.detach(), rtol=1e-9, atol=1e-9)


GROUPS: list[tuple[tuple[int, ...], ...]] = [(), (), ((0, 2), (1, 3)), ((3,), (0, 1, 2))]


def drawn_job(number: int) -> tuple[Faults, dict[str, Any]]:
    draw = random.Random(number)
    faults, step = Faults(), draw.randrange(14)
    for place in draw.sample(range(WORLD), draw.choice([1, 1, 2, 3])):
        faults = faults.kill(place, step, draw.choice(PHASES))
        step = min(step + draw.randrange(8), 21)
    job: dict[str, Any] = {"ahead": tuple(draw.choice([0, 0, 1, 3, 20]) for _ in range(WORLD))}
    job["balance"] = draw.choice(["equal", "speed", (1.0, 2.0, 3.0, 1.0)])
    job["samples"] = draw.choice([96, 100, 119])
    job["cost"] = draw.random() < 0.3
    job["groups"] = draw.choice(GROUPS)
    return faults, job


@pytest.mark.parametrize("number", drawn(60, quick=30))
def test_a_drawn_job(tmp_path: Path, number: int) -> None:
    faults, job = drawn_job(number)
    told = live(tmp_path, faults, **job)
    for places in job["groups"] or [range(WORLD)]:
        if any(place in told for place in places):
            parts = parts_of(tmp_path, faults, told, places)
            check_samples(tmp_path, parts, job["samples"], 3, places)
            check_weights(told, parts, job["samples"], places)


def test_a_rank_that_is_lost_while_samplers_are_made(tmp_path: Path) -> None:
    outcomes = run_outcomes(jobs.lost_when_it_was_made, str(tmp_path), world_size=3, backend=None)
    assert "died with code 9" in (outcomes[0].text or "")
    assert sorted(sample for one in outcomes[1:] for sample in one.value) == list(range(48))


def test_a_state_saved_behind_a_loss_has_what_is_left(tmp_path: Path) -> None:
    """The step that was made again without a rank, and before the sampler has split anew."""
    told, parts = train(tmp_path, Faults().kill(2, 3, "first bucket"), ahead=(2, 0, 1, 0), epochs=1, save_at=3)
    saved = told[0]["saved"]
    assert all(one["saved"] == saved for one in told.values())
    assert (saved["epoch"], saved["position"], len(saved["left_over"])) == (0, 4, 3)
    trained = [sample for _, of_step in parts[:4] for one in of_step.values() for sample in one]
    assert not set(trained) & set(saved["left_over"])
    assert len(trained) + 3 == 4 * 12


def test_the_limits_of_those_that_are_left(tmp_path: Path) -> None:
    """Fewer ranks cannot take the batch: an error on each of them."""
    outcomes = run_outcomes(
        jobs.balanced,
        str(tmp_path),
        Faults().kill(1, 3),
        world_size=WORLD,
        backend=None,
        samples=100,
        batch=12,
        epochs=1,
        ahead=(0,) * WORLD,
        limits=Limits(most=3),
    )
    for outcome in outcomes:
        if outcome.rank != 1:
            assert "InvalidStateError" in (outcome.text or "")
            assert "without rank 1, lost on the way, 3 ranks with most=3 (multiple=1) take 9 samples" in str(
                outcome.error
            )


@pytest.mark.parametrize("job", [jobs.followed, jobs.prepared])
def test_torchs_sampler_follows(tmp_path: Path, job: Callable[..., list[list[int]]]) -> None:
    """From the epoch after the loss on, all samples are visited again."""
    faults = Faults().kill(1, 1, "forward")
    outcomes = run_outcomes(job, str(tmp_path), faults, 48, 4, world_size=WORLD, backend=None)
    told = survivors(outcomes, faults.ended())
    for epoch in (2, 3):
        assert sorted(sample for one in told.values() for sample in one[epoch]) == list(range(48))
    assert len({sample for one in told.values() for sample in one[1]}) == 36


@pytest.mark.parametrize("number", drawn(40, quick=2))
def test_torchs_sampler_over_a_group(tmp_path: Path, number: int) -> None:
    """The steps of the faults are epochs: a rank dies in its second batch, and is there when the epoch begins."""
    draw = random.Random(number)
    faults, groups = Faults(), draw.choice(GROUPS)
    for place in draw.sample(range(WORLD), draw.choice([1, 1, 2, 3])):
        faults = faults.kill(place, draw.randrange(4), "forward")
    given: dict[str, Any] = {"groups": groups, "world_size": WORLD, "backend": None, "others_stay": True}
    outcomes = run_outcomes(jobs.followed, str(tmp_path), faults, 48, 4, **given)
    told = survivors(outcomes, faults.ended())
    for places in groups or [range(WORLD)]:
        last = {it.rank: it.step for it in faults.all}
        for epoch in range(4):
            began = [place for place in places if last.get(place, 4) >= epoch]
            left = [place for place in places if place in told]
            seen = [sample for place in left for sample in told[place][epoch]]
            assert len(seen) == len(set(seen)) == len(left) * 48 // len(began or [0])
