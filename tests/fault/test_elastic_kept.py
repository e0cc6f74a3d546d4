"""What ranks keep for each other in an elastic job: the values of a key-value store, and the rows of a table."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ringdp.kvstore.updates import resolve
from tests.fault import elastic_store_kept_jobs as jobs
from tests.fault.elastic_oracle import survivors
from tests.fault.faults import Faults, sampled
from tests.train.harness import ring_is_built, run_outcomes, run_ranks

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built")
STEPS = range(5)
PLANS = (((1, 2, "last bucket"),), ((0, 1, "after backward"), (2, 3, "forward")))
CASES = [
    (way, optimizer, plan)
    for way in ("push", "pushpull", "attach")
    for optimizer in (None, "sgd", "adam")
    for plan in PLANS
]


def expected(members: list[tuple[int, ...]], optimizer: str | None) -> dict[str, torch.Tensor]:
    """In one process: each push with the sum of the ranks that have made it."""
    values = {name: torch.zeros(shape) for name, shape in jobs.SHAPES.items()}
    kind, numbers = resolve(optimizer or "sgd", {"learning_rate": 0.5})
    one = kind(list(values.values()), **numbers)
    for step, places in zip(STEPS, members, strict=True):
        for name, value in values.items():
            value.grad = torch.stack([jobs.pushed(name, place, step) for place in places]).sum(0)
        if optimizer is None:
            for value in values.values():
                assert value.grad is not None
                value.copy_(value.grad)
        else:
            one.step()
    return values


@pytest.mark.parametrize(("way", "optimizer", "plan"), sampled(CASES, 4))
def test_a_store_loses_nothing(
    tmp_path: Path, way: str, optimizer: str | None, plan: tuple[tuple[int, int, str], ...]
) -> None:
    """Neither values nor the optimizer's state."""
    faults = Faults()
    for rank, step, phase in plan:
        faults = faults.kill(rank, step, phase)
    outcomes = run_outcomes(jobs.store, str(tmp_path), STEPS, faults, way, optimizer, world_size=3, backend=None)
    told = survivors(outcomes, faults.ended())
    members = faults.members(3, STEPS)
    for one in told.values():
        assert one["sizes"][-1] == len(members[-1])
        for name, value in expected(members, optimizer).items():
            assert torch.equal(one["values"][name], value), name
    first, *others = told.values()
    for other in others:
        assert str(other["state"]) == str(first["state"])


@pytest.mark.parametrize(
    ("compression", "flushes"),
    [({"type": "topk", "fraction": 0.1}, 60), *sampled([({"type": "2bit", "threshold": 1.0}, 45)], 1)],
)
@pytest.mark.parametrize("phase", sampled(["last bucket", "after backward"], 1))
def test_what_a_compressed_store_owes_is_kept(
    tmp_path: Path, compression: dict[str, object], flushes: int, phase: str
) -> None:
    """Error feedback pays all that the ranks that are left have pushed, once, whoever was lost. Two of four are killed
    at once, so that no mean is over three, which would round."""
    faults = Faults().kill(1, 2, phase).kill(2, 2, phase)
    outcomes = run_outcomes(
        jobs.compressed, str(tmp_path), STEPS, faults, compression, flushes, world_size=4, backend=None
    )
    told = survivors(outcomes, faults.ended())
    assert sorted(told) == [0, 3]
    owed = torch.stack([jobs.pushed("matrix", place, step) for place in told for step in STEPS]).sum(0)
    for one in told.values():
        assert torch.equal(one["matrix"], -owed)


@pytest.mark.parametrize("victim", sampled([0, 1, 2], 1))
def test_a_table_goes_on_from_its_last_save(tmp_path: Path, victim: int) -> None:
    saved = tmp_path / "saved"
    faults = Faults().kill(victim, 3, "forward")
    outcomes = run_outcomes(
        jobs.table, str(tmp_path), STEPS, faults, str(saved), elastic=True, world_size=3, backend=None
    )
    told = survivors(outcomes, faults.ended())
    left = sorted(told)
    again = tmp_path / "again"
    again.mkdir()
    plain = run_ranks(
        plain_table, str(again), range(jobs.SAVED + 1, STEPS.stop), str(saved), left, world_size=2, backend=None
    )
    for one in told.values():
        assert one["error"]
        assert torch.equal(one["rows"], plain[0]["rows"])
    assert sum(one["local"] for one in told.values()) == jobs.ROWS


def plain_table(folder: str, steps: range, saved: str, places: list[int]) -> dict[str, torch.Tensor]:
    """A job without elasticity, with the data of these places."""
    import os
    from unittest import mock

    place = places[int(os.environ["RANK"])]
    step = jobs.table_step
    with mock.patch.object(jobs, "table_step", lambda table, _, number: step(table, place, number)):
        return jobs.table(folder, steps, Faults(), saved, elastic=False)
