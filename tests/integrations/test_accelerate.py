"""RingAccelerator and use_ringdp in Hugging Face Accelerate: two ranks against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integrations import training
from tests.integrations.environment import python_with, run_ranks
from tests.integrations.training import assert_weights

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(480)]

JOB = "tests.integrations.accelerate_job"


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """What the two ranks found, started by ringrun."""
    return run_ranks(python_with("accelerate"), JOB)


def test_training_with_accumulation_and_clipping_equals_one_process(results: list[dict[str, Any]]) -> None:
    expected = training.by_one_process(steps=3, accumulate=3, clip=0.5)
    for rank in results:
        trained = rank["trained"]
        assert trained["wrapped"]
        assert trained["unwrapped"]
        assert (trained["backend"], trained["processes"]) == ("ring", 2)
        assert trained["reductions"] == 3, "accumulate() must keep two of three backwards quiet"
        assert_weights(trained["weights"], expected)


def test_autocast_equals_one_process_under_autocast(results: list[dict[str, Any]]) -> None:
    expected = training.by_one_process(steps=3, autocast=True)
    exact = training.by_one_process(steps=3)
    for rank in results:
        assert_weights(rank["autocast"]["weights"], expected)
    pairs = zip(results[0]["autocast"]["weights"], exact, strict=True)
    assert not all(torch.allclose(ours, full, rtol=1e-4) for ours, full in pairs), "autocast had no effect"


@pytest.mark.parametrize("case", ["compiled", "existing"])
def test_other_ways_to_the_same_weights(results: list[dict[str, Any]], case: str) -> None:
    for rank in results:
        assert rank[case]["wrapped"]
        assert rank[case]["unwrapped"]
        assert rank[case]["backend"] == "ring"
        assert_weights(rank[case]["weights"], training.by_one_process(steps=3))


def test_the_handler_s_communication_hook_is_registered(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert rank["hooked"]["hook"] == "fp16_compress_hook"
        for ours, theirs in zip(rank["hooked"]["weights"], training.by_one_process(steps=3), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.01)


def test_a_gradient_scaler_skips_on_all_ranks(results: list[dict[str, Any]]) -> None:
    for rank in results:
        scaled = rank["scaled"]
        assert_weights(scaled["weights"], training.by_one_process(steps=3))
        assert scaled["skipped"], "a gradient that is infinite on one rank is infinite in the mean of all"
        assert scaled["unchanged"]
        assert scaled["scale"] == 4.0


def test_a_saved_state_goes_on_in_fresh_objects(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert_weights(rank["resumed"], training.by_one_process(steps=3))


def test_gather_for_metrics_has_every_sample_once(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert sorted(rank["evaluated"]) == list(range(7))


def test_a_backward_is_synchronised_though_its_forward_was_not(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert_weights(rank["late"], training.by_one_process(steps=1, accumulate=2))


def test_ranks_are_known_without_a_launcher_s_variables(results: list[dict[str, Any]]) -> None:
    for rank in results:
        found = rank["unannounced"]
        assert (found["processes"], found["left"]) == (2, [])
        assert_weights(found["weights"], training.by_one_process(steps=1))


def test_what_is_refused_and_warned_of(results: list[dict[str, Any]]) -> None:
    for rank in results:
        assert "configured for FSDP" in rank["refusals"]["fsdp"]
        assert "call ringdp.init() before" in rank["refusals"]["gloo"]
