"""torchrun, and everything that sets the same variables."""

from __future__ import annotations

from collections.abc import Mapping

from ringdp.config.environments.environment import (
    LaunchEnvironment,
    optional_integer,
    require_all,
    tcp_address,
    whole_number,
)

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
COUNTS = ("LOCAL_WORLD_SIZE", "WORLD_SIZE")  # ranks on this host, and in the job


def started(environ: Mapping[str, str]) -> bool:
    """Whether this family started the process."""
    return "RANK" in environ or "WORLD_SIZE" in environ


def read(environ: Mapping[str, str]) -> LaunchEnvironment:
    """The place that the variables say. Raises InvalidArgumentError, as `launch_environment`."""
    require_all(environ, _VARIABLES, also=("LOCAL_RANK",))
    return LaunchEnvironment(
        launcher="torchrun",
        rank=whole_number("RANK", environ["RANK"]),
        world_size=whole_number("WORLD_SIZE", environ["WORLD_SIZE"]),
        local_rank=optional_integer(environ, "LOCAL_RANK"),
        local_world_size=optional_integer(environ, "LOCAL_WORLD_SIZE"),
        init_method=tcp_address(environ["MASTER_ADDR"], whole_number("MASTER_PORT", environ["MASTER_PORT"])),
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def refuse_the_rest(environ: Mapping[str, str]) -> None:
    """Raises InvalidArgumentError where a variable of this family is set although it started nothing."""
    if any(name in environ for name in (*_VARIABLES, "LOCAL_RANK")):
        require_all(environ, _VARIABLES, also=("LOCAL_RANK",))
