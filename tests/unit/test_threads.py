"""How many threads a rank gets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ringdp.config import threads
from ringdp.config.threads import cgroup_quota, threads_by_affinity, threads_per_rank, usable_cores


@pytest.mark.parametrize(
    ("cores", "local_ranks", "expected"),
    [(1, 1, 1), (2, 2, 1), (4, 2, 2), (6, 2, 2), (8, 2, 3), (64, 8, 7), (2, 4, 1), (7, 2, 2), (3, 1, 2)],
)
def test_a_core_is_left_to_communication_where_a_rank_has_more_than_two(
    cores: int, local_ranks: int, expected: int
) -> None:
    assert threads_per_rank(cores, local_ranks) == expected


def test_a_rank_alone_has_nothing_to_communicate() -> None:
    assert threads_per_rank(8, 1, alone=True) == 8


def test_the_affinity_mask_counts_not_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 5, 7})
    monkeypatch.setattr(threads, "cgroup_quota", lambda: None)
    assert usable_cores() == 3
    for quota, cores in ((2.5, 2), (0.5, 1), (8.0, 3)):
        monkeypatch.setattr(threads, "cgroup_quota", lambda quota=quota: quota)
        assert usable_cores() == cores


def group(mount: Path, path: str, **files: str) -> None:
    folder = mount / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_smallest_quota_on_the_way_up_holds_v2(tmp_path: Path) -> None:
    proc = tmp_path / "cgroup"
    proc.write_text("0::/pod/container\n")
    group(tmp_path / "fs", "pod", cpu__max="150000 100000\n")
    group(tmp_path / "fs", "pod/container", cpu__max="max 100000\n")
    assert cgroup_quota(proc, tmp_path / "fs") == 1.5


def test_quota_v1_and_a_path_of_the_host_that_is_not_mounted(tmp_path: Path) -> None:
    proc = tmp_path / "cgroup"
    proc.write_text("4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n")
    group(tmp_path / "fs", "cpu,cpuacct", cpu__cfs_quota_us="250000\n", cpu__cfs_period_us="100000\n")
    assert cgroup_quota(proc, tmp_path / "fs") == 2.5


def test_no_quota(tmp_path: Path) -> None:
    proc = tmp_path / "cgroup"
    assert cgroup_quota(proc, tmp_path) is None
    proc.write_text("1:cpu:/\n0::/\n")
    group(tmp_path / "fs", "cpu", cpu__cfs_quota_us="-1\n", cpu__cfs_period_us="100000\n")
    assert cgroup_quota(proc, tmp_path / "fs") is None


@pytest.mark.parametrize(
    ("own", "local_ranks", "host", "environ", "expected"),
    [
        (16, 4, 16, {}, 3),  # not bound
        (1, 2, 16, {}, 1),  # to a core
        (8, 4, 16, {}, 3),  # to a socket, two on each
        (8, 2, 16, {}, 7),
        (8, 4, 64, {"SLURM_CPUS_ON_NODE": "8"}, 2),  # a job that has a part of the host
        (4, 2, 64, {"SLURM_CPUS_ON_NODE": "8"}, 3),
        (2, 4, 2, {}, 1),
        (16, 4, 16, {"OMP_NUM_THREADS": "5"}, None),
        (16, 4, 16, {"MKL_NUM_THREADS": "5"}, None),
    ],
)
def test_what_mpirun_and_srun_bound_a_rank_to_counts(
    own: int, local_ranks: int, host: int, environ: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: own)
    monkeypatch.setattr(threads, "cgroup_quota", lambda: None)
    monkeypatch.setattr(os, "cpu_count", lambda: host)
    assert threads_by_affinity(environ, local_ranks) == expected
