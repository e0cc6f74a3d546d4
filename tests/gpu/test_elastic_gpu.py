"""An elastic job whose tensors are on the GPU: a rank is killed, another one comes in its place (elastic_job.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
RANKS, SAMPLES, EPOCHS = 3, 480, 40
WAYS = ("steps:none", "steps:int8", "steps:topk", "rounds:none", "rounds:int4", "rounds:sparse2")


def train(device: str, way: str, folder: Path) -> list[dict[str, object]]:
    """What each rank that came to its end wrote."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "launch.py", "--elastic", "--nproc-per-node", str(RANKS), "--log-dir"]
    command += [str(folder / "logs"), "tests/gpu/elastic_job.py", device, way, str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout
    return [json.loads(path.read_text()) for path in folder.glob("end-*")]


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_is_killed_and_replaced(way: str, tmp_path: Path) -> None:
    ends = train("cuda", way, tmp_path)
    assert len(ends) == RANKS
    assert {str(end["device"]).partition(":")[0] for end in ends} == {"cuda"}
    assert len({end["hash"] for end in ends}) == 1, "the ranks have different parameters"
    assert {end["ranks"] for end in ends} == {RANKS}, "nobody came in the place of the one that was killed"
    batches = [json.loads(line) for path in tmp_path.glob("audit-*") for line in path.read_text().splitlines()]
    seen = Counter((it["epoch"], sample) for it in batches for sample in it["samples"])
    assert len(seen) == SAMPLES * EPOCHS, "a sample was in no step"
