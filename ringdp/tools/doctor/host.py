"""The input of checks: the files of /proc and /sys, the settings, and the user's thresholds.

Checks read the machine through `Host` alone. A test gives it a folder with made-up files, and so tests other machines.
Where a container hides a file, `read` returns None and `names` an empty list.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import socket
from collections.abc import Mapping
from pathlib import Path

from ringdp.config import RingConfig, threads
from ringdp.errors import RingError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thresholds:
    """The user's thresholds; None where one was not given.

    Attributes:
        min_bytes_per_s: of the slowest edge between two ranks, in each direction.
        max_latency_s: of the round trip between two ranks.
        max_clock_offset_s: between the clocks of two hosts.
        min_shared_memory_bytes: free in /dev/shm.
        min_descriptors: that a process may have open.
    """

    min_bytes_per_s: float | None = None
    max_latency_s: float | None = None
    max_clock_offset_s: float | None = None
    min_shared_memory_bytes: int | None = None
    min_descriptors: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """The machine as the checks see it.

    Attributes:
        root: where its files are.
        environ: the environment of this process.
        cores: those that this process may use.
        local_ranks: of the job on this host; 1 without a launcher.
        ranks: of the job.
        thresholds: the user's.
    """

    root: Path = Path("/")
    environ: Mapping[str, str] = dataclasses.field(default_factory=lambda: dict(os.environ))
    cores: int = dataclasses.field(default_factory=lambda: len(os.sched_getaffinity(0)))
    local_ranks: int = 1
    ranks: int = 1
    thresholds: Thresholds = dataclasses.field(default_factory=Thresholds)

    def read(self, path: str) -> str | None:
        """The file's text without blanks around it; None where it is not there, or not to be read by this user."""
        try:
            return (self.root / path.lstrip("/")).read_text(errors="replace").strip()
        except (OSError, ValueError):
            return None

    def number(self, path: str) -> int | None:
        """The whole number in a file; None where there is none (cgroups write ``max``)."""
        text = self.read(path)
        try:
            return None if text is None else int(text)
        except ValueError:
            return None

    def names(self, folder: str) -> list[str]:
        """The names in a folder, sorted; empty where it is not there."""
        try:
            return sorted(os.listdir(self.root / folder.lstrip("/")))
        except OSError:
            return []

    def exists(self, path: str) -> bool:
        """Whether there is such a file or folder."""
        return (self.root / path.lstrip("/")).exists()

    def free_bytes(self, folder: str) -> tuple[int, int] | None:
        """Free and all bytes of the file system of a folder; None where it is not there."""
        try:
            found = os.statvfs(self.root / folder.lstrip("/"))
        except OSError:
            return None
        return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize

    def limit(self, name: str) -> tuple[int, int]:
        """Soft and hard limit of a resource, ``RLIMIT_…``; -1 is no limit."""
        soft, hard = resource.getrlimit(getattr(resource, name))
        return soft, hard

    def cgroup_limit(self, controller: str, v2: str, v1: str) -> int | None:
        """The smallest limit on the way from this process's control group to the root; None: no limit (cgroups(7)).

        Args:
            controller: ``memory``, ``pids``, …
            v2, v1: the names of its file in the two versions.
        """
        limits = []
        for line in (self.read("/proc/self/cgroup") or "0::/").splitlines():
            _, controllers, path = [*line.split(":", 2), "", ""][:3]
            if controllers and controller not in controllers.split(","):
                continue
            base, name = (f"/sys/fs/cgroup/{controller}", v1) if controllers else ("/sys/fs/cgroup", v2)
            for folder in (Path(path), *Path(path).parents):
                limits.append(self.number(f"{base}{str(folder).rstrip('/')}/{name}"))
        found = [limit for limit in limits if limit is not None and limit < 1 << 60]  # version 1 writes 2^63 for none
        return min(found, default=None)

    def cgroup_cores(self) -> float | None:
        """The CPU quota of this process's control groups, in cores; None: no quota."""
        return threads.cgroup_quota(self.root / "proc/self/cgroup", self.root / "sys/fs/cgroup")

    def settings(self) -> RingConfig | str:
        """The ``RINGDP_*`` settings, or the message of their error."""
        try:
            return RingConfig.from_environment(self.environ)
        except RingError as error:
            return str(error)

    @property
    def name(self) -> str:
        """This host's own name."""
        return socket.gethostname()
