"""The limits of descriptors, processes and locked memory (getrlimit(2))."""

from __future__ import annotations

from collections.abc import Iterator

from ringdp.text import format_size
from ringdp.tools.doctor.finding import Finding, note, ok, problem
from ringdp.tools.doctor.host import Host

OWN_DESCRIPTORS = 300
"""Of a rank besides its connections: torch, libraries, logs, files of the data set."""

DESCRIPTORS_PER_WORKER = 100
"""A DataLoader's batches in flight are descriptors, too (torch.multiprocessing's file_descriptor strategy)."""

NO_LIMIT = -1


def check(host: Host) -> Iterator[Finding]:
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
