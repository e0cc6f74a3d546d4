"""A rank of an elastic job in other libraries is killed: the others end their epochs, with the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integrations.environment import output_of, python_with

pytestmark = [pytest.mark.integrations, pytest.mark.timeout(480)]

STEPS = 2 * 10  # two epochs of 120 samples in batches of 4 on three ranks


@pytest.mark.parametrize(
    ("library", "packages", "told"),
    [
        ("accelerate", ["accelerate"], [2.0, 2.0, 2.0]),
        ("lightning", ["pytorch-lightning"], [2.0]),
        ("transformers", ["accelerate", "transformers"], [2.0]),
    ],
)
def test_an_epoch_ends_well_after_a_loss(tmp_path: Path, library: str, packages: list[str], told: list[float]) -> None:
    python = python_with(*packages)
    command = [str(python), "-m", "ringdp.launch", "--elastic", "--max-replacements", "0", "-n", "3"]
    said = output_of([*command, "-m", "tests.integrations.elastic_job", str(tmp_path), library], tmp_path)
    assert "step 4 was made again without the part of rank 1" in said
    found = [torch.load(tmp_path / f"place{place}.pt") for place in (0, 2)]
    for one in found:
        assert (one["told"], one["steps"]) == (told, STEPS)
        assert all(map(torch.equal, one["weights"], found[0]["weights"]))
    assert not (tmp_path / "place1.pt").exists()
