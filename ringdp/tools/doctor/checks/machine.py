"""Cores and their quota, memory and huge pages, the limits of a process, the clock."""

from __future__ import annotations

import ctypes
import math
import os
import re
from collections.abc import Iterator

from ringdp.config import threads
from ringdp.text import format_size
from ringdp.tools.doctor.finding import Finding, note, ok, problem
from ringdp.tools.doctor.host import Host

BUSY = 0.5
"""Waiting processes for each core, on average over a minute, from which on others count as busy."""


def processor(host: Host) -> Iterator[Finding]:
    """Cores that ranks may use, their quota, NUMA nodes, and the load of other programs."""
    yield from cores(host.cores, os.cpu_count() or host.cores, host.cgroup_cores(), host.local_ranks)
    yield from nodes(host)
    yield from load(host)
    yield from computing_threads(host)


def cores(usable: int, present: int, quota: float | None, local_ranks: int) -> Iterator[Finding]:
    """Whether the ranks of this host have a core each, and whether a quota stops them now and then."""
    facts = {"cores": usable, "present": present, "quota": quota, "local_ranks": local_ranks}
    of = f" of {present}" if usable != present else ""
    budget = usable if quota is None else min(usable, quota)
    if quota is not None and quota < usable:
        words = f"the control group's quota gives {quota:g} of the {usable} cores: above it all threads are stopped"
        remedy = f"raise the limit (docker run --cpus={usable}, resources.limits.cpu), or start fewer ranks"
        yield note(words, remedy, **facts)
    if local_ranks > max(1, math.floor(budget)):
        remedy = f"start {max(1, math.floor(budget))} ranks on this host, or take a larger one"
        yield note(f"{local_ranks} ranks share {budget:g} cores: they work in turns", remedy, **facts)
    else:
        each = threads.threads_per_rank(max(1, math.floor(budget)), local_ranks, alone=local_ranks == 1)
        share = f"; ringrun gives each of {local_ranks} ranks {each} threads" if local_ranks > 1 else ""
        yield ok(f"{usable}{of} cores may be used{share}", **facts)


def nodes(host: Host) -> Iterator[Finding]:
    """NUMA nodes, by the ranges of cores in /sys."""
    found = {
        name: host.read(f"/sys/devices/system/node/{name}/cpulist") or ""
        for name in host.names("/sys/devices/system/node")
        if name.startswith("node") and name[4:].isdecimal()
    }
    with_cores = {name: cpus for name, cpus in found.items() if cpus}
    if len(with_cores) < 2:
        return
    parts = ", ".join(f"{name} has cores {cpus}" for name, cpus in with_cores.items())
    remedy = (
        "bind each rank to the cores and memory of one node: numactl --cpunodebind=N --membind=N, or srun --cpu-bind"
    )
    yield note(f"{len(with_cores)} NUMA nodes ({parts}): memory of the other node is slower", remedy, nodes=with_cores)


def load(host: Host) -> Iterator[Finding]:
    """Processes that wait for a core besides this one."""
    words = (host.read("/proc/loadavg") or "").split()
    try:
        others = float(words[0])
    except (IndexError, ValueError):
        return
    if others > BUSY * host.cores and host.local_ranks == 1:
        sentence = f"{others:g} processes computed or waited here on average over the last minute"
        yield note(sentence, "end other programs (top shows them): ranks wait for the slowest", load=others)


def computing_threads(host: Host) -> Iterator[Finding]:
    """OMP_NUM_THREADS against the cores that a rank has."""
    text = host.environ.get("OMP_NUM_THREADS", "")
    if not text:
        return
    if not text.isdecimal() or int(text) < 1:
        yield problem(f"OMP_NUM_THREADS={text} is not a number of threads", "unset it, or write a number from 1 on")
    elif int(text) * host.local_ranks > host.cores:
        sentence = f"OMP_NUM_THREADS={text} on {host.local_ranks} ranks is more than the {host.cores} cores"
        yield note(sentence, "unset OMP_NUM_THREADS: ringrun shares the cores out")


SMALL_SHM_BYTES = 256 << 20
"""Below this much in /dev/shm data-loader workers soon die; Docker gives 64 MiB."""

LITTLE = 0.1
"""The free share of the memory below which a note is given."""


def memory(host: Host) -> Iterator[Finding]:
    """Memory and its limits, shared memory for ranks and for data loaders, huge pages."""
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


OWN_DESCRIPTORS = 300
"""Of a rank besides its connections: torch, libraries, logs, files of the data set."""

DESCRIPTORS_PER_WORKER = 100
"""A DataLoader's batches in flight are descriptors, too (torch.multiprocessing's file_descriptor strategy)."""

NO_LIMIT = -1


def limits(host: Host) -> Iterator[Finding]:
    """The limits of descriptors, processes and locked memory (getrlimit(2))."""
    soft, hard = host.limit("RLIMIT_NOFILE")
    yield from descriptors(soft, hard, host.ranks, host.thresholds.min_descriptors)
    locked, _ = host.limit("RLIMIT_MEMLOCK")
    yield from lockable(locked, has_rdma=bool(host.names("/sys/class/infiniband")))
    processes, _ = host.limit("RLIMIT_NPROC")
    in_group = host.cgroup_limit("pids", "pids.max", "pids.max")
    yield from startable(min([it for it in (processes, in_group) if it not in (None, NO_LIMIT)], default=None))


def descriptors(soft: int, hard: int, ranks: int, wanted: int | None) -> Iterator[Finding]:
    """Two connections for each other rank at most, and what the process has open anyway."""
    needed = OWN_DESCRIPTORS + 2 * ranks
    facts = {"descriptors": soft, "descriptors_hard": hard}
    shown = "any number of" if soft == NO_LIMIT else str(soft)
    if soft != NO_LIMIT and wanted is not None and soft < wanted:
        yield problem(
            f"a process may open {soft} descriptors; at least {wanted} were asked for", _raise(wanted), **facts
        )
    elif soft != NO_LIMIT and soft < needed:
        words = f"a process may open {soft} descriptors, and a rank of {ranks} needs about {needed}"
        yield problem(words, _raise(4096), **facts)
    elif soft != NO_LIMIT and soft < needed + DESCRIPTORS_PER_WORKER:
        yield note(f"a process may open {soft} descriptors, few for DataLoader workers", _raise(4096), **facts)
    else:
        yield ok(f"a process may open {shown} descriptors", **facts)


def lockable(limit: int, *, has_rdma: bool) -> Iterator[Finding]:
    """Memory that may be locked: what NCCL over InfiniBand registers. ringdp locks none."""
    shown = "any amount of memory" if limit == NO_LIMIT else f"{format_size(limit)} of memory"
    facts = {"memlock_bytes": limit}
    if has_rdma and limit != NO_LIMIT:
        remedy = "ulimit -l unlimited (docker run --ulimit memlock=-1): NCCL registers its buffers with the card"
        yield note(f"this host has InfiniBand, and a process may lock only {shown}", remedy, **facts)
    else:
        yield ok(f"a process may lock {shown}; only NCCL over InfiniBand needs it", **facts)


def startable(limit: int | None) -> Iterator[Finding]:
    """Threads and processes of this user or control group."""
    if limit is not None and limit < 1024:
        remedy = "raise it (ulimit -u, docker run --pids-limit): a rank has some 20 threads, more with data loaders"
        yield note(f"only {limit} threads and processes may be started", remedy, processes=limit)


def _raise(number: int) -> str:
    return f"ulimit -n {number} before the job (docker run --ulimit nofile={number}, LimitNOFILE= of systemd)"


UNSYNCHRONISED = 0x40  # STA_UNSYNC of adjtimex(2)
FAST_SOURCES = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page")


def clock(host: Host) -> Iterator[Finding]:
    """Whether this host's clock is kept right, and how cheap it is to read."""
    yield from synchronised(kernel_status())
    yield from source(host.read("/sys/devices/system/clocksource/clocksource0/current_clocksource"))


def kernel_status() -> int | None:
    """The status word of adjtimex(2), which a user may read; None where it cannot be had."""

    class Timex(ctypes.Structure):
        _fields_ = [
            ("modes", ctypes.c_uint),
            ("offset", ctypes.c_long),
            ("freq", ctypes.c_long),
            ("maxerror", ctypes.c_long),
            ("esterror", ctypes.c_long),
            ("status", ctypes.c_int),
            ("rest", ctypes.c_byte * 512),
        ]

    found = Timex()
    try:
        failed = ctypes.CDLL(None).adjtimex(ctypes.byref(found)) < 0
    except (OSError, AttributeError):
        return None
    return None if failed else int(found.status)


def synchronised(status: int | None) -> Iterator[Finding]:
    """From the kernel's status. ringdp itself does not compare clocks of hosts; logs and merged timelines do."""
    if status is None:
        return
    if status & UNSYNCHRONISED:
        remedy = "run chrony or systemd-timesyncd; until then the times in logs of several hosts do not compare"
        yield note("no service keeps the clock synchronised", remedy, synchronised=False)
    else:
        yield ok("the clock is synchronised", synchronised=True)


def source(name: str | None) -> Iterator[Finding]:
    """A slow clock source makes each reading a system call; a rank reads it often."""
    if name is not None and name not in FAST_SOURCES:
        remedy = f"look in dmesg why the kernel does not trust a faster one ({', '.join(FAST_SOURCES[:2])})"
        yield note(f"the clock source is {name}, which is slow to read", remedy, source=name)
