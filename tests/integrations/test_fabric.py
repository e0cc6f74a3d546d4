"""RingDPStrategy in Lightning Fabric: two ranks against one process, by every way that Fabric starts them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integrations import training
from tests.integrations.environment import python_with, run_ranks
from tests.integrations.training import assert_weights

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(480)]

JOB = "tests.integrations.fabric_job"


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """What the two ranks found, started by ringrun."""
    return run_ranks(python_with("lightning-fabric"), JOB, "external")


def test_training_with_accumulation_and_clipping_equals_one_process(results: list[dict[str, Any]]) -> None:
    expected = training.by_one_process(steps=3, accumulate=3, clip=0.5)
    for rank in results:
        trained = rank["trained"]
        assert (trained["wrapper"], trained["backend"]) == ("RingDP", "ring")
        assert trained["reductions"] == 3, "no_backward_sync must keep two of three backwards quiet"
        assert_weights(trained["weights"], expected)


def test_a_saved_training_goes_on_in_fresh_objects(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert_weights(rank["resumed"], training.by_one_process(steps=3))


def test_collectives_give_every_rank_the_same(results: list[dict[str, Any]]) -> None:
    for rank in results:
        found = rank["collectives"]
        assert found["mean"].tolist() == [1.5, 10.0]
        assert found["sum"].tolist() == [3, 20]
        assert found["gathered"].tolist() == [[0, 0], [1, 1]]
        assert found["object"] == {"from": 1}


def test_a_data_set_is_shared_out(results: list[dict[str, Any]]) -> None:
    assert [rank["shares"] for rank in results] == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]


@pytest.mark.parametrize(
    ("launcher", "how"),
    [("torch.distributed.run", "external"), (None, "popen"), (None, "spawn"), (None, "fork")],
    ids=["torchrun", "popen", "spawn", "fork"],
)
def test_every_launcher_trains_alike(launcher: str | None, how: str) -> None:
    steps, accumulate, clip = (3, 3, 0.5) if how == "external" else (3, 1, None)
    expected = training.by_one_process(steps=steps, accumulate=accumulate, clip=clip)
    for rank in run_ranks(python_with("lightning-fabric"), JOB, how, launcher=launcher):
        assert (rank["trained"]["wrapper"], rank["trained"]["backend"]) == ("RingDP", "ring")
        assert_weights(rank["trained"]["weights"], expected)


def test_ranks_agree_to_the_bit(results: list[dict[str, Any]]) -> None:
    first, second = (rank["trained"]["weights"] for rank in results)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
