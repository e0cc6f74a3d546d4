"""What every benchmark here shares: sizes, summaries, tables, and whether the machine was quiet."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.lib.ranks import start, stop_all
from ringdp.text import format_size as format_size
from ringdp.text import parse_size as parse_size
from ringdp.text import table as table

QUIET_LOAD = 0.3  # waiting processes beside us, on average over the last minute
QUIET_OTHERS = 0.05  # share of the machine's CPU time that went to somebody else during the run

_T_95 = (
    12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09
)  # fmt: skip
"""Two-sided 95 % quantiles of Student's t for 1, 2, … degrees of freedom; beyond the last one that one is taken."""


def codec_names() -> tuple[str, ...]:
    """The core's codecs in the order of their numbers, from the sources: nothing has to be built."""
    rows = Path(__file__).resolve().parents[2] / "ringdp" / "csrc" / "base" / "codecs.def"
    return tuple(re.findall(r'^RINGDP_\w+_CODEC\(\w+, "(\w+)"\)', rows.read_text(), re.MULTILINE))


def format_time(seconds: float) -> str:
    """Four digits in the unit that suits, also of what is below 0: `12.3 µs`, `4.56 ms`, `1.2 s`."""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if abs(seconds) >= unit:
            return f"{seconds / unit:.4g} {name}"
    return f"{seconds * 1e6:.4g} µs"


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the values lie, by linear interpolation. Raises ValueError on none."""
    if not values:
        raise ValueError("no values, so no percentile")
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Their mean, and half the width of its 95 % interval."""
    count = len(differences)
    if count < 2:
        return differences[0], math.inf
    quantile = _T_95[min(count - 1, len(_T_95)) - 1]
    return statistics.fmean(differences), quantile * statistics.stdev(differences) / math.sqrt(count)


@dataclass(frozen=True)
class Summary:
    """Times of one operation, in seconds."""

    median_s: float
    p99_s: float
    min_s: float
    count: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Summary:
        return cls(percentile(seconds, 0.5), percentile(seconds, 0.99), min(seconds), len(seconds))

    @classmethod
    def slowest(cls, per_rank: Sequence[Summary]) -> Summary:
        """The slowest rank's view of each number: an operation is over when everybody has it."""
        return cls(
            max(one.median_s for one in per_rank),
            max(one.p99_s for one in per_rank),
            max(one.min_s for one in per_rank),
            min(one.count for one in per_rank),
        )


@contextlib.contextmanager
def busy_processes(count: int, *, cores: Sequence[int] = ()) -> Iterator[None]:
    """`count` processes that do nothing but compute, for as long as the `with` lasts; pinned to `cores` in turn."""
    loop = "import os, sys\nif sys.argv[1:]: os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
    running: list[subprocess.Popen[Any]] = []
    try:
        for i in range(count):
            pinned = [str(cores[i % len(cores)])] if cores else []
            running.append(start([sys.executable, "-c", loop, *pinned]))
        yield
    finally:
        stop_all(running)


@dataclass
class Quiet:
    """Whether somebody else used the machine while we measured: load averages, and CPU time that was not ours."""

    load_before: float = 0.0
    load_after: float = 0.0
    others_share: float = 0.0  # of all cores' time between start and stop
    steal_share: float = 0.0  # taken by the hypervisor
    _stamp: tuple[float, float, float, float] = field(default=(0.0, 0.0, 0.0, 0.0), repr=False)

    @staticmethod
    def start() -> Quiet:
        return Quiet(load_before=os.getloadavg()[0], _stamp=_cpu_seconds())

    def stop(self, *, ranks_s: float) -> None:
        """`ranks_s`: CPU time the ranks used by their own account; under mpirun some are no children of ours."""
        wall, busy, steal, own = (now - then for now, then in zip(_cpu_seconds(), self._stamp, strict=True))
        capacity_s = max(wall * (os.cpu_count() or 1), 1e-9)
        self.load_after = os.getloadavg()[0]
        self.others_share = max(0.0, busy - max(own, ranks_s)) / capacity_s
        self.steal_share = steal / capacity_s

    def warnings(self) -> list[str]:
        found = []
        if self.load_before > QUIET_LOAD:
            found.append(f"load average was {self.load_before:.2f} before the run: the machine was not quiet")
        if self.others_share > QUIET_OTHERS:
            found.append(f"other processes used {self.others_share:.0%} of the machine during the run")
        if self.steal_share > QUIET_OTHERS:
            found.append(f"the hypervisor took {self.steal_share:.0%} of the machine during the run")
        return found

    def as_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if not key.startswith("_")} | {
            "warnings": self.warnings(),
            "words": str(self),
        }

    def __str__(self) -> str:
        return (
            f"load average {self.load_before:.2f} before, {self.load_after:.2f} after (ours included); "
            f"others used {self.others_share:.1%} of the cores, steal {self.steal_share:.1%}"
        )


def _cpu_seconds() -> tuple[float, float, float, float]:
    """(now, busy over all cores, stolen, used by us and by children waited for), in seconds; see proc(5)."""
    with open("/proc/stat", encoding="ascii") as file:
        ticks = [int(word) for word in file.readline().split()[1:9]]
    tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
    user, nice, system, _idle, _iowait, _irq, _softirq, steal = ticks
    own = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return time.monotonic(), (user + nice + system) * tick_s, steal * tick_s, own


def machine() -> dict[str, Any]:
    """What a reader needs to judge the numbers: cores, processor, kernel, versions."""
    model = "unknown"
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    import torch

    return {
        "cores": os.cpu_count(),
        "processor": model,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
