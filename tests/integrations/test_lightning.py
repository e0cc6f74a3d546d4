"""RingDPTrainerStrategy in Lightning's Trainer: two ranks against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integrations import training
from tests.integrations.environment import python_with, run_ranks
from tests.integrations.training import assert_weights

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(480)]


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(python_with("pytorch-lightning"), "tests.integrations.lightning_job")


def test_training_with_accumulation_and_clipping_equals_one_process(results: list[dict[str, Any]]) -> None:
    expected = training.by_one_process(steps=3, accumulate=3, clip=0.5)
    for rank in results:
        trained = rank["trained"]
        assert (trained["wrapped"], trained["backend"]) == (True, "ring")
        assert trained["reductions"] == 3, "accumulate_grad_batches must keep two of three backwards quiet"
        assert_weights(trained["weights"], expected)


@pytest.mark.parametrize("case", ["manual", "named", "resumed"])
def test_other_ways_to_the_same_weights(results: list[dict[str, Any]], case: str) -> None:
    """Manual optimization, the strategy by its name, and two steps followed by a third from their checkpoint."""
    for rank in results:
        assert rank[case]["wrapped"]
        assert_weights(rank[case]["weights"], training.by_one_process(steps=3))
    assert results[0][case]["loss"] == results[1][case]["loss"], "sync_dist is an average over the ranks"


def test_a_communication_hook_is_registered_on_cpus(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert rank["hooked"]["hook"] == "fp16_compress_hook"
        for ours, theirs in zip(rank["hooked"]["weights"], training.by_one_process(steps=3), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.01)
