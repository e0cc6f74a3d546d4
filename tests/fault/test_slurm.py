"""Real Slurm on two hosts: where ranks meet, how many threads they get, and what is told about what went wrong."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ringdp.config import threads
from tests.fault.launch_jobs import ROOT, script
from tests.fault.slurm import Cluster, why_not

TRAIN = f"""
    import os, signal, socket, sys
    sys.path.insert(0, {str(ROOT)!r})
    import torch
    import ringdp

    ringdp.init()
    model = ringdp.RingDP(torch.nn.Linear(4, 1))
    model(torch.ones(2, 4) * (1 + ringdp.rank())).sum().backward()
    if sys.argv[1:] == [str(ringdp.rank())]:
        os.kill(os.getpid(), signal.SIGKILL)
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    place = f"rank {{ringdp.rank()}} of {{int(total)}} on {{socket.gethostname()}}, local {{ringdp.local_rank()}}"
    gradient = model.module.weight.grad.sum().item()
    sys.stdout.write(f"{{place}}, {{torch.get_num_threads()}} threads, gradient {{gradient}}\\n")
    ringdp.shutdown()
"""

CORES = threads.usable_cores()
pytestmark = [pytest.mark.nightly, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(f"Slurm: {reason}")
    with Cluster(tmp_path_factory.mktemp("slurm")) as it:
        yield it


@pytest.fixture
def train(cluster: Cluster) -> Path:
    return script(cluster.folder, TRAIN, "train.py")


def test_srun_on_two_hosts(cluster: Cluster, train: Path) -> None:
    for per_host, ranks, given in ((2, 4, []), (1, 2, ["-c", str(CORES)])):
        size = ["-N", "2", "-n", f"{ranks}", "--ntasks-per-node", f"{per_host}"]
        done = cluster.run("srun", *size, *given, sys.executable, train)
        assert done.returncode == 0, done.stderr + cluster.logs()
        share = threads.threads_per_rank(CORES, 1) if given else 1  # Slurm gives a task one core unless -c says more
        mean = 2 * 4 * sum(range(1, ranks + 1)) / ranks
        assert sorted(done.stdout.splitlines()) == [
            f"rank {rank} of {ranks} on n{1 + rank // per_host}, local {rank % per_host}, {share} threads,"
            f" gradient {mean}"
            for rank in range(ranks)
        ]


def test_a_step_that_begins_on_the_second_host(cluster: Cluster, train: Path) -> None:
    """Neither the host where the user is nor the job's first has rank 0."""
    told = cluster.batch(f"srun -N 1 -n 2 -w n2 --exact {sys.executable} {train}", "-N", "2", "-n", "4")
    assert "rank 0 of 2 on n2" in told
    assert "rank 1 of 2 on n2" in told


def test_a_batch_script_without_srun_is_told(cluster: Cluster, train: Path) -> None:
    told = cluster.batch(f"{sys.executable} {train}", "-n", "2")
    assert "rank 0 of 1 on n1" in told
    assert "a Slurm job of 2 tasks (SLURM_NTASKS), which srun did not start" in told
    assert "srun python train.py" in told


def test_a_killed_rank_is_named_by_the_others(cluster: Cluster, train: Path) -> None:
    done = cluster.run("srun", "-n", "4", "-N", "2", "-l", sys.executable, train, "3")
    assert done.returncode != 0
    for rank in range(3):
        (line,) = [it for it in done.stderr.splitlines() if it.startswith(f"{rank}: ") and "PeerLostError" in it]
        assert re.search(r"rank [012] \(host n[12]\) lost rank 3 \(host n2, pid \d+\)", line)
    assert "srun: error: n2: task 3: Killed" in done.stderr
