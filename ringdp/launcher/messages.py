"""The messages of the agent to the supervisor: one JSON object a line, through a pipe."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from typing import Any

from ringdp.launcher.logs import RankLogs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Started:
    """An attempt begins; its ranks are about to be started.

    Attributes:
        attempt: number of restarts before it.
        world_size: ranks of the job.
        threads: OMP_NUM_THREADS of each rank; None where it is not set.
        ranks: those on this host.
        elastic, max_restarts: of the job, which a door may have said.
    """

    attempt: int
    world_size: int
    threads: str | None
    ranks: tuple[RankLogs, ...]
    elastic: bool
    max_restarts: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Running:
    """The ranks of the attempt have been started.

    Attributes:
        pids: of the processes that the agent has started, by rank.
    """

    pids: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Signalled:
    """The agent itself has got a signal that is meant for the ranks."""

    number: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankFailure:
    """The end of a rank, as torch's agent saw it.

    Attributes:
        exit_code: as of a shell command, or minus the number of the signal that killed it.
        observed_s: when, in whole seconds since the epoch.
        cause: the reason for which the launcher itself killed it; empty where it did not.
    """

    rank: int
    local_rank: int
    pid: int
    exit_code: int
    observed_s: float
    cause: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failed:
    """The job is over because ranks of this host failed, in the order in which that was seen."""

    failures: tuple[RankFailure, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restarting:
    """Ranks of this host failed, and all are started again."""

    failures: tuple[RankFailure, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lost:
    """Ranks of this host died, and the others go on without them (--elastic)."""

    failures: tuple[RankFailure, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replaced:
    """Another process was started in the place of a rank that had died."""

    logs: RankLogs


@dataclasses.dataclass(frozen=True, kw_only=True)
class Waiting:
    """Lines for the user about the other nodes: their launchers have not all come, or their ranks not all ended.

    Attributes:
        lines: the lines.
        said_elsewhere: the launcher of another node shows the same.
    """

    lines: tuple[str, ...]
    said_elsewhere: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class FailedElsewhere:
    """The job has failed on another node, while the ranks of this one had ended well."""

    words: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Broken:
    """The agent itself failed: the ranks were not started, or the hosts lost each other."""

    error: str


Message = Started | Running | Signalled | Failed | Restarting | Lost | Replaced | Waiting | FailedElsewhere | Broken
_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (Started, Running, Signalled, Failed, Restarting, Lost, Replaced, Waiting, FailedElsewhere, Broken)
}


def encode(message: Message) -> bytes:
    """One line."""
    return json.dumps({"kind": type(message).__name__, **dataclasses.asdict(message)}).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message in one line that ``encode`` made."""
    fields = json.loads(line)
    kind = fields.pop("kind")
    if kind == "Started":
        fields["ranks"] = tuple(RankLogs(**{**rank, "terminals": tuple(rank["terminals"])}) for rank in fields["ranks"])
    if kind == "Replaced":
        fields["logs"] = RankLogs(**{**fields["logs"], "terminals": ()})
    if kind == "Running":
        fields["pids"] = tuple((rank, pid) for rank, pid in fields["pids"])
    if kind == "Waiting":
        fields["lines"] = tuple(fields["lines"])
    if kind in ("Failed", "Restarting", "Lost"):
        fields["failures"] = tuple(RankFailure(**failure) for failure in fields["failures"])
    message: Message = _KINDS[kind](**fields)
    return message


def post(descriptor: int, message: Message) -> None:
    """Write a message; a supervisor that is gone is not an error here: the agent's leash handles it."""
    data = encode(message)
    with contextlib.suppress(BrokenPipeError):
        while data:
            data = data[os.write(descriptor, data) :]


class Inbox:
    """The supervisor's end of the pipe, which must not block."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""

    def read(self) -> list[Message]:
        """The messages that have arrived."""
        while True:
            try:
                data = os.read(self._descriptor, 65536)
            except BlockingIOError:
                break
            if not data:
                break
            self._rest += data
        *lines, self._rest = self._rest.split(b"\n")
        return [decode(line) for line in lines]
