"""Hydra's mpiexec: MPICH, Intel MPI."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from ringdp.config.environments.environment import LaunchEnvironment, meeting_point, optional_integer, whole_number

COUNTS = ("MPI_LOCALNRANKS", "PMI_SIZE")  # ranks on this host, and in the job


def started(environ: Mapping[str, str]) -> bool:
    """Whether this family started the process."""
    return "PMI_RANK" in environ and "PMI_SIZE" in environ


def read(environ: Mapping[str, str]) -> LaunchEnvironment:
    """The place that the variables say. Raises InvalidArgumentError, as `launch_environment`."""
    rank, world_size = (whole_number(name, environ[name]) for name in ("PMI_RANK", "PMI_SIZE"))
    local_rank = optional_integer(environ, "MPI_LOCALRANKID")
    local_size = optional_integer(environ, "MPI_LOCALNRANKS")
    return LaunchEnvironment(
        launcher="mpiexec",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_size,
        init_method=meeting_point(
            environ,
            one_host=local_size == world_size,
            job=_hydra_job(),
            advice="pass -genv MASTER_ADDR <host of rank 0> -genv MASTER_PORT <free port> to mpiexec",
        ),
    )


def _hydra_job() -> str:
    """The name of a job of Hydra, which gives none: the process that started all ranks of this host."""
    for pid, name in _ancestors(os.getpid()):
        if name.startswith("hydra_pmi_prox"):  # proc(5) cuts names to 15 characters
            return f"hydra-{pid}"
    return ""


def _ancestors(pid: int) -> Iterator[tuple[int, str]]:
    """(process id, name) of the parent, its parent and so on, as far as /proc tells."""
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            yield pid, Path(f"/proc/{pid}/comm").read_text().strip()
        except (OSError, ValueError, IndexError):
            return
