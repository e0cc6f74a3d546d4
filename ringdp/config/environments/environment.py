"""This process's place in its job, as a launcher put it into the environment, and what the families of launchers share.

Those without a store of their own (all but torchrun) meet on one host at a port that each rank computes from the job's
name; on several, the user has to set MASTER_ADDR.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Mapping

from ringdp.errors import InvalidArgumentError


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaunchEnvironment:
    """This process's place in the job, as its launcher put it into the environment.

    Attributes:
        launcher: which family of variables was read: ``torchrun`` (and everything that sets the same),
            ``mpirun`` (Open MPI), ``mpiexec`` (MPICH, Intel MPI: whatever starts ranks with Hydra),
            ``srun``, ``dmlc`` (MXNet's scripts).
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


def whole_number(name: str, text: str) -> int:
    """``text`` as an integer. Raises InvalidArgumentError naming the variable."""
    try:
        return int(text)
    except ValueError:
        raise InvalidArgumentError(f"{name}={text} is not a whole number") from None


def optional_integer(environ: Mapping[str, str], name: str) -> int | None:
    return whole_number(name, environ[name]) if environ.get(name) else None


def require_all(environ: Mapping[str, str], names: tuple[str, ...], *, also: tuple[str, ...] = ()) -> None:
    missing = [name for name in names if not environ.get(name)]
    if missing:
        present = [f"{name}={environ[name]}" for name in (*names, *also) if environ.get(name)]
        raise InvalidArgumentError(
            f"the environment says {', '.join(present) or 'nothing usable'} but lacks {', '.join(missing)}:"
            " start the script with ringrun or torchrun, set all of them, or unset them all to run on one"
            " rank"
        )


def meeting_point(environ: Mapping[str, str], *, one_host: bool, job: str, advice: str, first_host: str = "") -> str:
    """``tcp://host:port`` for launchers without a store: what the user set, else loopback on one host and `first_host`,
    which has rank 0, on several, and a port that every rank computes from the job's name (20000 to 29499, below those
    the kernel and people hand out)."""
    host = environ.get("MASTER_ADDR") or ("127.0.0.1" if one_host else first_host)
    port = environ.get("MASTER_PORT") or ""
    missing = [name for name, value in (("MASTER_ADDR", host), ("MASTER_PORT", port or job)) if not value]
    if missing:
        why = "" if one_host else "the job runs on several hosts and "
        raise InvalidArgumentError(
            f"{why}the ranks cannot know where to meet, {' and '.join(missing)} is not set: {advice}"
        )
    number = whole_number("MASTER_PORT", port) if port else 20000 + zlib.crc32(job.encode()) % 9500
    return tcp_address(host, number)


def tcp_address(host: str, port: int) -> str:
    if not 0 < port < 65536:
        raise InvalidArgumentError(f"MASTER_PORT={port} is not between 1 and 65535")
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"
