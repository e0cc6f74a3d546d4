"""GPU ranks and CPU ranks in one job, on one host and on two: the same bits (mixed_job.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.lib import hosts

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
JOB = [sys.executable, "tests/gpu/mixed_job.py", "cuda"]


def run(*command: str) -> str:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def all_four_agree(output: str) -> None:
    for rank, device in enumerate(["cuda:0", "cpu"] * 2):
        assert f"rank {rank} on {device}: same bits on 4 ranks" in output, output


def test_on_one_host(tmp_path: Path) -> None:
    launcher = [sys.executable, "launch.py", "--nproc-per-node", "4", "--console", "all", "--log-dir", str(tmp_path)]
    all_four_agree(run(*launcher, *JOB[1:]))


def test_on_two_hosts_that_share_the_gpu() -> None:
    """Two network namespaces, in each a rank on the GPU and one on the CPU."""
    if reason := hosts.why_not():
        pytest.skip(reason)
    words = [sys.executable, "-m", "benchmarks", "hosts", "run", "--hosts", "2", "--per-host", "2", "--rate", "none"]
    all_four_agree(run(*words, "--", *JOB))
