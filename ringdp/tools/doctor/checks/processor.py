"""Cores that ranks may use, their quota, NUMA nodes, and the load of other programs."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

from ringdp.config import threads
from ringdp.tools.doctor.finding import Finding, note, ok, problem
from ringdp.tools.doctor.host import Host

BUSY = 0.5
"""Waiting processes for each core, on average over a minute, from which on others count as busy."""


def check(host: Host) -> Iterator[Finding]:
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
