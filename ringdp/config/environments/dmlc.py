"""The variables of MXNet's and BytePS's start scripts (the tracker of dmlc-core)."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping

from ringdp.config.environments.environment import LaunchEnvironment, require_all, tcp_address, whole_number
from ringdp.errors import InvalidArgumentError

COUNTS = None  # the variables do not count the ranks of a host
_RANKS = ("DMLC_WORKER_ID", "DMLC_TASK_ID")
_VARIABLES = ("DMLC_NUM_WORKER", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT")


def started(environ: Mapping[str, str]) -> bool:
    """Whether this family started the process."""
    return "DMLC_ROLE" in environ


def read(environ: Mapping[str, str]) -> LaunchEnvironment:
    """The place that the variables say. Raises InvalidArgumentError, as `launch_environment`.

    The ranks meet where MXNet's scheduler would listen.
    """
    if environ["DMLC_ROLE"] != "worker":
        raise InvalidArgumentError(f"DMLC_ROLE={environ['DMLC_ROLE']} is not worker, server or scheduler")
    require_all(environ, _VARIABLES, also=("DMLC_ROLE",))
    rank = next((environ[name] for name in _RANKS if environ.get(name)), None)
    if rank is None:
        raise InvalidArgumentError(
            "DMLC_ROLE=worker, but neither DMLC_WORKER_ID nor DMLC_TASK_ID says which worker this is: set"
            " DMLC_WORKER_ID to 0, 1, … in the workers, or start them with ringrun"
        )
    host = environ.get("MASTER_ADDR") or environ["DMLC_PS_ROOT_URI"]
    port = environ.get("MASTER_PORT") or environ["DMLC_PS_ROOT_PORT"]
    return LaunchEnvironment(
        launcher="dmlc",
        rank=whole_number("DMLC_WORKER_ID", rank),
        world_size=whole_number("DMLC_NUM_WORKER", environ["DMLC_NUM_WORKER"]),
        local_rank=None,
        local_world_size=None,
        init_method=tcp_address(host, whole_number("DMLC_PS_ROOT_PORT", port)),
    )


def with_servers(environ: Mapping[str, str]) -> tuple[LaunchEnvironment, int] | None:
    """The place in a job of workers, then servers, and how many servers there are; None where none were started.

    A server's place is that of the first one: servers are not numbered.

    Raises:
        InvalidArgumentError: as `read`.
    """
    role, servers = environ.get("DMLC_ROLE"), whole_number("DMLC_NUM_SERVER", environ.get("DMLC_NUM_SERVER") or "0")
    if role not in ("worker", "server") or servers < 1:
        return None
    place = read(environ if role == "worker" else {**environ, "DMLC_ROLE": "worker", "DMLC_WORKER_ID": "0"})
    rank = place.rank if role == "worker" else place.world_size
    return dataclasses.replace(place, rank=rank, world_size=place.world_size + servers), servers


def end_needless_role(environ: Mapping[str, str]) -> None:
    """End the process, with exit code 0 and a line, where it was started as a server or a scheduler."""
    role = environ.get("DMLC_ROLE")
    if role in ("server", "scheduler"):
        sys.stderr.write(f"ringdp: DMLC_ROLE={role}: none is needed, the workers do its work; this process ends\n")
        raise SystemExit(0)


def as_node(environ: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables, by which a ringrun that was started as one of several workers knows that it is one of as
    many nodes.

    Raises InvalidArgumentError, as `read`.
    """
    if environ.get("DMLC_ROLE") != "worker" or "PET_NNODES" in environ:
        return {}
    place = read(environ)
    if place.world_size == 1:
        return {}
    host, _, port = place.init_method.removeprefix("tcp://").rpartition(":")
    return {
        "PET_NNODES": str(place.world_size),
        "PET_NODE_RANK": str(place.rank),
        "PET_MASTER_ADDR": host.strip("[]"),
        "PET_MASTER_PORT": port,
    }
