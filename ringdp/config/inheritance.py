"""What a process inherits from a rank that has started it: an evaluation, a data server, a launcher of another job.

A process that joins a job by `ringdp.init` leaves a mark in its environment: its pid, and what the variables were that
belong to the job. A process that finds the mark of another one was started by it. A variable that still has the same
value was inherited, and not set on purpose. A launcher leaves a mark without a pid, for what its ranks start before
they join.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import zlib
from collections.abc import Mapping

from ringdp.errors import InvalidStateError

MARK = "RINGDP_RANK_PROCESS"

PLACES = (
    "RINGDP_SECRET_FILE",
    "RINGDP_TLS",
    "RINGDP_TLS_CERT",
    "RINGDP_TLS_KEY",
    "RINGDP_TLS_CA",
    "RINGDP_REPORT_FILE",
    "RINGDP_DUMP_DIR",
    "RINGDP_METRICS_DIR",
    "RINGDP_TENSORBOARD",
    "RINGDP_TIMELINE",
    "RINGDP_ELASTIC",
    "RINGDP_JOIN",
    "RINGDP_DOOR",
    "RINGDP_MIN_RANKS",
    "RINGDP_MAX_RANKS",
)
"""Variables of ringdp that belong to one job: where it writes, its secret and what is keyed by it, and whether it goes
on without ranks."""

_LAUNCHER = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|ROLE_NAME|MASTER_(ADDR|PORT)|(TORCHELASTIC|PET)_\w+"
)
"""Those of torchrun and ringrun: for the ranks, and the flags (PET_) of a launcher."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """The rank that has left the mark.

    Attributes:
        pid: its process; 0 for a mark of the launcher, whose rank had not joined.
        start: when that process began, as in /proc/PID/stat.
        rank, world_size: its place.
        meet: where the ranks of its job meet; None where it was alone.
        values: of the variables that belong to its job, a hash each.
    """

    pid: int
    start: str
    rank: int
    world_size: int
    meet: str | None
    values: dict[str, int]

    @property
    def is_this_process(self) -> bool:
        """Whether this process has left the mark itself, perhaps before an exec."""
        return self.pid == os.getpid() and self.start == _start_of(self.pid)

    @property
    def runs(self) -> bool:
        """Whether another process has left the mark, and is still in its job."""
        return self.pid not in (0, os.getpid()) and self.start == _start_of(self.pid)

    def gave(self, name: str, value: str) -> bool:
        """Whether a variable is as it was there."""
        return self.values.get(name) == _hash(value)


def mark(environ: Mapping[str, str], *, pid: int, rank: int, world_size: int, meet: str | None) -> str:
    """The value of `MARK` for what a process with this environment starts."""
    values = {name: _hash(value) for name, value in environ.items() if name in PLACES or _LAUNCHER.fullmatch(name)}
    origin = Origin(
        pid=pid, start=_start_of(pid) if pid else "", rank=rank, world_size=world_size, meet=meet, values=values
    )
    return json.dumps(dataclasses.asdict(origin), separators=(",", ":"))


def origin(environ: Mapping[str, str]) -> Origin | None:
    """The rank that has left the mark in this environment; None where there is none."""
    try:
        return Origin(**json.loads(environ[MARK]))
    except (KeyError, ValueError, TypeError):
        return None


def without_places(environ: Mapping[str, str]) -> Mapping[str, str]:
    """The environment without the `PLACES` of the job of another process."""
    it = origin(environ)
    if it is None or it.pid == 0 or it.is_this_process:
        return environ
    return {name: value for name, value in environ.items() if name not in PLACES or not it.gave(name, value)}


def inherited_by_launcher(environ: Mapping[str, str]) -> list[str]:
    """The variables that a launcher inside a rank must not hand on to its own ranks."""
    it = origin(environ)
    if it is None:
        return []
    job = [name for name in environ if name in PLACES or _LAUNCHER.fullmatch(name)]
    return [MARK, *(name for name in job if it.gave(name, environ[name]))]


def has_own_agent(environ: Mapping[str, str]) -> bool:
    """Whether torchrun's variables name this process's own agent, and not that of a rank that started this process."""
    it = origin(environ)
    return it is None or not it.runs or not it.gave("TORCHELASTIC_RUN_ID", environ.get("TORCHELASTIC_RUN_ID", ""))


def refuse_inside_rank(environ: Mapping[str, str], meet: str | None) -> None:
    """Raises InvalidStateError in a process that a rank has started and that is about to join as that rank.

    Args:
        environ: of this process.
        meet: where it is going to meet others; None for nowhere.
    """
    it = origin(environ)
    if it is None or not it.runs or meet is None or meet != it.meet:
        return
    raise InvalidStateError(
        f"this process (pid {os.getpid()}) was started inside rank {it.rank} (pid {it.pid}) of a running job of"
        f" {it.world_size} rank{'s' * (it.world_size != 1)}, and would meet at {meet} as if it were a rank of that job:"
        " to work alone, start it without the launcher's variables (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT); for a"
        " job of its own start it with ringrun or ringdp.launch, or pass rank, world_size and another init_method"
    )


def _hash(value: str) -> int:
    return zlib.crc32(value.encode(errors="surrogateescape"))


def stat_fields(pid: int) -> list[bytes]:
    """Of /proc/PID/stat what stands behind the name: the state, the parent's pid, and so on, as in proc(5).

    Raises:
        OSError: there is no such process.
    """
    with open(f"/proc/{pid}/stat", "rb") as file:
        # The name, in parentheses, may hold blanks and parentheses itself.
        return file.read().rpartition(b")")[2].split()


def _start_of(pid: int) -> str:
    """When a process began, in clock ticks; empty where there is none, or where it has ended."""
    try:
        fields = stat_fields(pid)
    except OSError:
        return ""
    return "" if fields[0] in (b"Z", b"X") else fields[19].decode()
