"""A control group with a memory limit, below the one this process is in: cgroups(7), version 1 or 2."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


class MemoryGroup:
    """Made at once; `why_not` says in words where that cannot be, and is None otherwise."""

    def __init__(self, limit_bytes: int) -> None:
        self.why_not: str | None = None
        own = {line.split(":")[1]: line.split(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines()}
        first = next((path for names, path in own.items() if "memory" in names.split(",")), None)
        parent, file = ROOT / "memory", "memory.limit_in_bytes"
        if first is None:
            parent, file, first = ROOT, "memory.max", own.get("", "/")
        if (parent / first.lstrip("/")).is_dir():  # in a container the path may be the host's
            parent = parent / first.lstrip("/")
        self.path = parent / f"ringdp-test-{os.getpid()}"
        try:
            self.path.mkdir()
            (self.path / file).write_text(str(limit_bytes))
        except OSError as error:
            self.why_not = f"no control group with a memory limit can be made here: {error}"
            self.remove()

    def remove(self) -> None:
        """When no process is in it any more."""
        if self.path.is_dir():
            self.path.rmdir()
