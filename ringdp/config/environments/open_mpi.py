"""Open MPI's mpirun."""

from __future__ import annotations

from collections.abc import Mapping

from ringdp.config.environments.environment import LaunchEnvironment, meeting_point, require_all, whole_number

COUNTS = ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE")  # ranks on this host, and in the job


def started(environ: Mapping[str, str]) -> bool:
    """Whether this family started the process."""
    return "OMPI_COMM_WORLD_SIZE" in environ


def read(environ: Mapping[str, str]) -> LaunchEnvironment:
    """The place that the variables say. Raises InvalidArgumentError, as `launch_environment`."""
    names = (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    )
    require_all(environ, names)
    rank, world_size, local_rank, local_size = (whole_number(name, environ[name]) for name in names)
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or ""
    return LaunchEnvironment(
        launcher="mpirun",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_size,
        init_method=meeting_point(
            environ,
            one_host=local_size == world_size,
            job=job,
            advice="pass -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=<free port> to mpirun",
        ),
    )
