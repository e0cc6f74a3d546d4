"""What launchers put into the environment of the ranks they start: torchrun, Open MPI, Slurm, and Hydra (MPICH).

The last three bring no store. On one host the ranks meet at a port that each computes from the job's name; on several,
somebody has to say MASTER_ADDR.
"""

from __future__ import annotations

import dataclasses
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from ringdp.errors import InvalidArgumentError

# srun sets these in a job step; a batch script, which runs as one process, has SLURM_PROCID and SLURM_NTASKS too.
_SLURM_STEP = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "SLURM_STEP_NODELIST")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchEnvironment:
    """This process's place in the job, as its launcher put it into the environment.

    Attributes:
        launcher: which family of variables was read: ``torchrun`` (and everything that sets the same),
            ``mpirun`` (Open MPI), ``mpiexec`` (MPICH, Intel MPI: whatever starts ranks with Hydra), ``srun``.
        rank: rank in the job.
        world_size: number of ranks in the job.
        local_rank: rank on this host; None where the launcher does not say.
        local_world_size: ranks on this host; None where the launcher does not say.
        init_method: where the ranks meet, ``tcp://host:port``.
        agent_store: the launcher itself keeps the store there; otherwise rank 0 does.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int | None
    local_world_size: int | None
    init_method: str
    agent_store: bool = False

    def __post_init__(self) -> None:
        if self.world_size < 1 or not 0 <= self.rank < self.world_size:
            raise InvalidArgumentError(
                f"{self.launcher} says rank {self.rank} of {self.world_size}: a rank lies between 0 and the world size"
            )
        if self.local_rank is not None and self.local_rank < 0:
            raise InvalidArgumentError(f"{self.launcher} says local rank {self.local_rank}, which is below 0")

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None) -> LaunchEnvironment | None:
        """What the launcher said, or None where there is no launcher.

        torchrun's variables come first, then Open MPI's, then those of a Slurm job step, then Hydra's.

        Raises:
            InvalidArgumentError: only some of a family's variables are set (the message names the missing
                ones), one is no number, or the ranks cannot know where to meet.
        """
        environ = os.environ if environ is None else environ
        family = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if "RANK" in environ or "WORLD_SIZE" in environ:
            _require_all(environ, family, also=("LOCAL_RANK",))
            return cls(
                launcher="torchrun",
                rank=whole_number("RANK", environ["RANK"]),
                world_size=whole_number("WORLD_SIZE", environ["WORLD_SIZE"]),
                local_rank=optional_integer(environ, "LOCAL_RANK"),
                local_world_size=optional_integer(environ, "LOCAL_WORLD_SIZE"),
                init_method=_tcp(environ["MASTER_ADDR"], whole_number("MASTER_PORT", environ["MASTER_PORT"])),
                agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            )
        if "OMPI_COMM_WORLD_SIZE" in environ:
            return _from_open_mpi(environ)
        if "SLURM_PROCID" in environ and any(name in environ for name in _SLURM_STEP):
            return _from_slurm(environ)
        if "PMI_RANK" in environ and "PMI_SIZE" in environ:
            return _from_hydra(environ)
        if any(name in environ for name in (*family, "LOCAL_RANK")):
            _require_all(environ, family, also=("LOCAL_RANK",))
        return None


def several_hosts(environ: Mapping[str, str]) -> bool:
    """Whether the launcher put fewer ranks on this host than the job has; False where it does not say."""
    pairs = (
        ("LOCAL_WORLD_SIZE", "WORLD_SIZE"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
        ("MPI_LOCALNRANKS", "PMI_SIZE"),
    )
    for local, world in pairs:
        counts = environ.get(local, ""), environ.get(world, "")
        if all(count.isdigit() for count in counts):
            return int(counts[0]) < int(counts[1])
    return False


def whole_number(name: str, text: str) -> int:
    """``text`` as an integer. Raises InvalidArgumentError naming the variable."""
    try:
        return int(text)
    except ValueError:
        raise InvalidArgumentError(f"{name}={text} is not a whole number") from None


def optional_integer(environ: Mapping[str, str], name: str) -> int | None:
    return whole_number(name, environ[name]) if environ.get(name) else None


def _require_all(environ: Mapping[str, str], names: tuple[str, ...], *, also: tuple[str, ...] = ()) -> None:
    missing = [name for name in names if not environ.get(name)]
    if missing:
        present = [f"{name}={environ[name]}" for name in (*names, *also) if environ.get(name)]
        raise InvalidArgumentError(
            f"the environment says {', '.join(present) or 'nothing usable'} but lacks {', '.join(missing)}:"
            " start the script with ringrun or torchrun, set all of them, or unset them all to run on one"
            " rank"
        )


def _from_open_mpi(environ: Mapping[str, str]) -> LaunchEnvironment:
    names = (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    )
    _require_all(environ, names)
    rank, world_size, local_rank, local_size = (whole_number(name, environ[name]) for name in names)
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or ""
    return LaunchEnvironment(
        launcher="mpirun",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_size,
        init_method=_meeting_point(
            environ,
            one_host=local_size == world_size,
            job=job,
            advice="pass -x MASTER_ADDR=<host of rank 0> -x MASTER_PORT=<free port> to mpirun",
        ),
    )


def _from_slurm(environ: Mapping[str, str]) -> LaunchEnvironment:
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    names = ("SLURM_PROCID", size, "SLURM_LOCALID")
    _require_all(environ, names)
    rank, world_size, local_rank = (whole_number(name, environ[name]) for name in names)
    local_size = _slurm_local_size(environ)
    nodes = optional_integer(environ, "SLURM_STEP_NUM_NODES") or optional_integer(environ, "SLURM_NNODES")
    if nodes is None:
        listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
        nodes = 2 if re.search(r"[,\[]", listed) else 1  # two or more: the names are for Slurm to read
    return LaunchEnvironment(
        launcher="srun",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_size if local_size is not None or nodes > 1 else world_size,
        init_method=_meeting_point(
            environ,
            one_host=nodes == 1,
            job=f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}".strip("."),
            advice='before srun, export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
            " and MASTER_PORT=<free port>",
        ),
    )


def _slurm_local_size(environ: Mapping[str, str]) -> int | None:
    """This node's entry in a list like ``2(x3),1``, or what --ntasks-per-node said."""
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or ""
    node = optional_integer(environ, "SLURM_NODEID")
    if node is not None and re.fullmatch(r"\d+(\(x\d+\))?(,\d+(\(x\d+\))?)*", text):
        counts = [n for n, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]
        if 0 <= node < len(counts):
            return int(counts[node])
    return optional_integer(environ, "SLURM_NTASKS_PER_NODE")


def _from_hydra(environ: Mapping[str, str]) -> LaunchEnvironment:
    rank, world_size = (whole_number(name, environ[name]) for name in ("PMI_RANK", "PMI_SIZE"))
    local_rank = optional_integer(environ, "MPI_LOCALRANKID")
    local_size = optional_integer(environ, "MPI_LOCALNRANKS")
    return LaunchEnvironment(
        launcher="mpiexec",
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_size,
        init_method=_meeting_point(
            environ,
            one_host=local_size == world_size,
            job=_hydra_job(),
            advice="pass -genv MASTER_ADDR <host of rank 0> -genv MASTER_PORT <free port> to mpiexec",
        ),
    )


def _hydra_job() -> str:
    """What tells jobs of Hydra apart, which have no name: the process that started all ranks of this host."""
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


def _meeting_point(environ: Mapping[str, str], *, one_host: bool, job: str, advice: str) -> str:
    """``tcp://host:port`` for launchers without a store: what the user set, else, on one host, loopback and a port that
    every rank computes from the job's name (20000 to 29499, below those the kernel and people hand out)."""
    host = environ.get("MASTER_ADDR") or ("127.0.0.1" if one_host else "")
    port = environ.get("MASTER_PORT") or ""
    missing = [name for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", port or job)) if not value]
    if missing:
        why = "" if one_host else "the job runs on several hosts and "
        raise InvalidArgumentError(
            f"{why}the ranks cannot know where to meet, {' and '.join(missing)} is not set: {advice}"
        )
    number = whole_number("MASTER_PORT", port) if port else 20000 + zlib.crc32(job.encode()) % 9500
    return _tcp(host, number)


def _tcp(host: str, port: int) -> str:
    if not 0 < port < 65536:
        raise InvalidArgumentError(f"MASTER_PORT={port} is not between 1 and 65535")
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"
