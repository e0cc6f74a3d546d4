"""RingConfig and prepare_model in Ray Train: a local cluster with two workers against one process."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integrations import training
from tests.integrations.environment import ROOT, output_of, python_with, run_ranks
from tests.integrations.training import assert_weights

pytestmark = [pytest.mark.integrations, pytest.mark.slow, pytest.mark.timeout(600)]


def test_workers_are_a_ring_and_train_as_one_process() -> None:
    for rank in run_ranks(python_with("ray"), "tests.integrations.ray_job", launcher=None):
        assert (rank["wrapped"], rank["backend"], rank["world"]) == (True, "ring", 2)
        assert_weights(rank["weights"], training.by_one_process(steps=3))


def test_the_example(tmp_path: Path) -> None:
    said = output_of([str(python_with("ray")), str(ROOT / "examples" / "ray_train.py")], tmp_path)
    assert re.search(r"2 workers on ring: accuracy 0\.9\d+, 1 set of weights", said)
