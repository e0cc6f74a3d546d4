"""What launchers put into the environment of their ranks: a module for each family, and its name in `FAMILIES`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Protocol

from ringdp.config.environments import dmlc, hydra, open_mpi, slurm, torchrun
from ringdp.config.environments.environment import LaunchEnvironment, optional_integer, whole_number

__all__ = [
    "FAMILIES",
    "Family",
    "LaunchEnvironment",
    "forgotten",
    "launch_environment",
    "launched_with_servers",
    "optional_integer",
    "several_hosts",
    "whole_number",
]


class Family(Protocol):
    """A module of this folder."""

    @property
    def COUNTS(self) -> tuple[str, str] | None:  # a constant of the module
        """The variables with the number of ranks on this host and in the job; None where there are none."""

    def started(self, environ: Mapping[str, str]) -> bool:
        """Whether this family started the process."""

    def read(self, environ: Mapping[str, str]) -> LaunchEnvironment:
        """The place that the variables say. Raises InvalidArgumentError, as `launch_environment`."""


# The first whose variables are there counts.
FAMILIES: tuple[Family, ...] = (torchrun, open_mpi, slurm, hydra, dmlc)


def launch_environment(environ: Mapping[str, str] | None = None) -> LaunchEnvironment | None:
    """What the launcher said, or None where there is no launcher.

    In the order of `FAMILIES`: torchrun's variables first.

    Raises:
        InvalidArgumentError: only some of a family's variables are set (the message names the missing ones), one is not
            a number, or the ranks cannot know where to meet.
    """
    environ = os.environ if environ is None else environ
    dmlc.end_needless_role(environ)
    for family in FAMILIES:
        if family.started(environ):
            return family.read(environ)
    torchrun.refuse_the_rest(environ)
    return None


def launched_with_servers() -> tuple[LaunchEnvironment, int] | None:
    """Of a process that MXNet's scripts started, beside servers: see `dmlc.with_servers`."""
    return (
        dmlc.with_servers(os.environ) if next((it for it in FAMILIES if it.started(os.environ)), None) is dmlc else None
    )


def forgotten(environ: Mapping[str, str] | None = None) -> str | None:
    """The warning for a process that trains alone inside a job of several tasks; None for every other process."""
    environ = os.environ if environ is None else environ
    return slurm.forgotten(environ) if launch_environment(environ) is None else None


def several_hosts(environ: Mapping[str, str]) -> bool:
    """Whether the launcher put fewer ranks on this host than the job has; False where it does not say."""
    for family in FAMILIES:
        counts = tuple(environ.get(name, "") for name in family.COUNTS or ())
        if counts and all(count.isdigit() for count in counts):
            return int(counts[0]) < int(counts[1])
    return False
