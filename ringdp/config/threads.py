"""How many compute threads each rank gets, where the user has not set OMP_NUM_THREADS."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path

_log = logging.getLogger("ringdp.process_group")


def threads_per_rank(cores: int, local_ranks: int, *, alone: bool = False) -> int:
    """The cores of this host, shared out.

    torchrun's 1 leaves most of a CPU machine idle, and all cores on each rank make the ranks fight. A rank has two
    more threads that run while backward computes: one drives communication, one runs callbacks. With more than two
    cores per rank one core is left to them: an intra-op pool waits for its slowest thread, so a pool that shares a core
    with communication is slowed down as a whole. With one or two cores that would cost half of the arithmetic, and
    sharing is cheaper.

    Args:
        cores: cores this host gives the job.
        local_ranks: ranks on this host.
        alone: the job is one rank, so that there is no communication.
    """
    share = cores // local_ranks
    return max(1, share - 1 if share > 2 and not alone else share)


def threads_by_affinity(environ: Mapping[str, str], local_ranks: int) -> int | None:
    """The same for a rank that mpirun or srun has started, which may have bound it to some of the cores.

    Args:
        environ: has OMP_NUM_THREADS or MKL_NUM_THREADS where the user has set the number.
        local_ranks: ranks on this host.

    Returns:
        None where the user has set it.
    """
    if environ.get("OMP_NUM_THREADS") or environ.get("MKL_NUM_THREADS"):
        return None
    own = usable_cores()
    given = environ.get("SLURM_CPUS_ON_NODE", "")  # by Slurm to the job, which may have a part of the host
    quota = cgroup_quota()
    host = int(given) if given.isdecimal() else (os.cpu_count() or 1) if quota is None else max(1, math.floor(quota))
    if own * local_ranks > host:  # several share them
        return threads_per_rank(max(host, local_ranks), local_ranks)
    return threads_per_rank(own, 1)


def chosen_by_user() -> bool:
    """Whether the environment says how many threads compute."""
    return bool(os.environ.get("OMP_NUM_THREADS") or os.environ.get("MKL_NUM_THREADS"))


def share_cores(local_ranks: int) -> None:
    """Give this rank, which mpirun or srun has started, its share of the cores, unless it takes less already."""
    import torch

    share = threads_by_affinity(os.environ, local_ranks)
    if share is not None and share < torch.get_num_threads():
        _log.info("%d compute threads: this rank's share of the cores (OMP_NUM_THREADS overrides it)", share)
        torch.set_num_threads(share)


def usable_cores() -> int:
    """Cores this process may use: its affinity mask, cut down to its cgroup's CPU quota; at least 1."""
    cores = len(os.sched_getaffinity(0))
    quota = cgroup_quota()
    return cores if quota is None else max(1, min(cores, math.floor(quota)))


def cgroup_quota(proc: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> float | None:
    """The smallest CPU quota, in cores, on the way from this process's cgroup to the root; None without one.

    Reads cgroup v2 (``cpu.max``) and v1 (``cpu.cfs_quota_us``), see cgroups(7). Inside a container the path in
    /proc may name directories of the host that are not mounted; then the mount itself is what counts.
    """
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return None
    quotas: list[float] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        names = controllers.split(",")
        if controllers and "cpu" not in names:
            continue
        roots = [mount] if not controllers else [mount / controllers, mount / "cpu"]
        for root in roots:
            for folder in _upwards(root, path):
                quota = _quota_of(folder)
                if quota is not None:
                    quotas.append(quota)
    return min(quotas, default=None)


def _upwards(root: Path, path: str) -> list[Path]:
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    return [root.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]


def _quota_of(folder: Path) -> float | None:
    """Cores one cgroup folder allows; None where it sets no limit."""
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return None if quota == "max" or int(quota) <= 0 else int(quota) / int(period)
    except (OSError, ValueError):
        return None
