"""Memory and its limits, shared memory for ranks and for data loaders, huge pages."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from ringdp.text import format_size
from ringdp.tools.doctor.finding import Finding, note, ok, problem
from ringdp.tools.doctor.host import Host

SMALL_SHM_BYTES = 256 << 20
"""Below this much in /dev/shm data-loader workers soon die; Docker gives 64 MiB."""

LITTLE = 0.1
"""The free share of the memory below which a note is given."""


def check(host: Host) -> Iterator[Finding]:
    limit = host.cgroup_limit("memory", "memory.max", "memory.limit_in_bytes")
    yield from amounts(meminfo(host.read("/proc/meminfo") or ""), limit)
    yield from between_ranks()
    space = host.free_bytes("/dev/shm")
    yield from of_data_loaders(space, host.thresholds.min_shared_memory_bytes)
    thp = "/sys/kernel/mm/transparent_hugepage"
    yield from huge_pages(host.read(f"{thp}/enabled"), host.read(f"{thp}/shmem_enabled"))


def meminfo(text: str) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    rows = (line.split() for line in text.splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if len(row) == 3 and row[1].isdecimal()}


def amounts(found: dict[str, int], limit: int | None) -> Iterator[Finding]:
    """The memory of the machine, and the control group's limit."""
    total, free = found.get("MemTotal"), found.get("MemAvailable")
    facts = {"total_bytes": total, "available_bytes": free, "limit_bytes": limit, "swap_bytes": found.get("SwapTotal")}
    if total is None or free is None:
        return
    words = f"{format_size(free)} of {format_size(total)} memory are available"
    if free < LITTLE * total:
        yield note(words, "end other programs here: above the limit the kernel kills ranks", **facts)
    else:
        yield ok(words, **facts)
    if limit is not None and limit < total:
        remedy = "raise it (docker run --memory, resources.limits.memory) if ranks are killed: they get SIGKILL"
        yield note(f"the control group allows {format_size(limit)} of it", remedy, **facts)


def between_ranks() -> Iterator[Finding]:
    """The ranks of a host exchange gradients through memory files (memfd_create(2)), which need no /dev/shm."""
    try:
        os.close(os.memfd_create("ringdp-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
    except OSError as error:
        remedy = "allow memfd_create in the container's seccomp profile; until then ranks of a host use TCP"
        yield note(f"ranks of this host cannot share memory: memfd_create: {error.strerror}", remedy, memfd=False)
    else:
        yield ok("ranks of this host can share memory", memfd=True)


def of_data_loaders(space: tuple[int, int] | None, wanted: int | None) -> Iterator[Finding]:
    """/dev/shm, through which torch's DataLoader workers give their batches; ringdp itself does not use it."""
    remedy = "docker run --shm-size=8g (or --ipc=host), a memory-backed emptyDir at /dev/shm, or num_workers=0"
    if space is None:
        yield note("there is no /dev/shm: DataLoader workers cannot give batches to their rank", remedy)
        return
    free, total = space
    words = f"{format_size(free)} of {format_size(total)} are free in /dev/shm, which DataLoader workers use"
    facts = {"shm_free_bytes": free, "shm_bytes": total}
    if wanted is not None and free < wanted:
        yield problem(f"{words}; at least {format_size(wanted)} were asked for", remedy, **facts)
    elif free < SMALL_SHM_BYTES:
        yield note(f"{words}: workers die of it (bus error)", remedy, **facts)
    else:
        yield ok(words, **facts)


def huge_pages(enabled: str | None, shared: str | None) -> Iterator[Finding]:
    """Transparent huge pages, which gradients' memory asks for; the word in brackets is what is set."""
    if enabled is None:
        return
    chosen, of_shared = bracketed(enabled), bracketed(shared or "")
    facts = {"huge_pages": chosen, "huge_pages_shared": of_shared}
    if chosen == "never":
        remedy = "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        yield note("huge pages are switched off: large gradients cost more page faults", remedy, **facts)
    else:
        yield ok(f"huge pages: {chosen}, for shared memory {of_shared or 'not said'}", **facts)


def bracketed(text: str) -> str:
    """``madvise`` of ``always [madvise] never``."""
    found = re.search(r"\[([\w+-]+)\]", text)
    return found[1] if found else ""
