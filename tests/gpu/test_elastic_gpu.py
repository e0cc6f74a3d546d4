"""An elastic job whose tensors are on the GPU: a rank is killed, another one comes in its place (elastic_job.py)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.gpu.test_mixed_job_gpu import run

pytestmark = pytest.mark.gpu

RANKS, SAMPLES, EPOCHS = 3, 480, 40
WAYS = ("steps:none", "steps:int8", "steps:topk", "rounds:none", "rounds:int4", "rounds:sparse2")


def train(device: str, way: str, folder: Path) -> list[dict[str, object]]:
    """What each rank that came to its end wrote."""
    launcher = [sys.executable, "launch.py", "--elastic", "--nproc-per-node", str(RANKS), "--log-dir", f"{folder}/logs"]
    run(*launcher, "tests/gpu/elastic_job.py", device, way, str(folder))
    return [json.loads(path.read_text()) for path in folder.glob("end-*")]


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_is_killed_and_replaced(way: str, tmp_path: Path) -> None:
    ends = train("cuda", way, tmp_path)
    assert len(ends) == RANKS
    assert {str(end["device"]).partition(":")[0] for end in ends} == {"cuda"}
    assert len({end["hash"] for end in ends}) == 1, "the ranks have different parameters"
    assert {end["ranks"] for end in ends} == {RANKS}, "nobody came in the place of the one that was killed"
    batches = [json.loads(line) for path in tmp_path.glob("audit-*") for line in path.read_text().splitlines()]
    seen = {(it["epoch"], sample) for it in batches for sample in it["samples"]}
    assert len(seen) == SAMPLES * EPOCHS, "a sample was in no step"
