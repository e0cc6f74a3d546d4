"""RingTrainer in Hugging Face transformers: two ranks against the plain Trainer in one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.integrations.environment import python_with, run_ranks
from tests.integrations.training import assert_weights

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(480)]

JOB = "tests.integrations.transformers_job"


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return run_ranks(python_with("transformers", "accelerate"), JOB, 1, launcher=None, ranks=1)[0]


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    return run_ranks(python_with("transformers", "accelerate"), JOB, 2)


@pytest.mark.parametrize("case", ["trained", "resumed"])
def test_training_equals_the_plain_trainer(results: list[dict[str, Any]], alone: dict[str, Any], case: str) -> None:
    """Four steps with accumulation and clipping; and the last two of them again from the checkpoint of step two."""
    for rank in results:
        found = rank[case]
        assert (found["wrapped"], found["bare"], found["backend"]) == (True, True, "ring")
        assert found["reductions"] == (4 if case == "trained" else 2), "one reduction per step, not per batch"
        assert_weights(found["weights"], alone["trained"]["weights"])
        assert found["eval_loss"] == pytest.approx(alone["trained"]["eval_loss"], rel=1e-4)
