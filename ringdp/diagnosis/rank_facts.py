"""A rank's facts beside the times of its steps: its host, the times it could not compute, and its busiest link."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import Any

_PACKED = struct.Struct("<5d2qQi5d64s")
FACTS_BYTES = 256  # room for them in csrc/torch/reducer/step_report.h
ATTACHED_BYTES = 16  # at its end, for what travels with them; before that as many of a hash of the gradients
assert _PACKED.size <= FACTS_BYTES - 2 * ATTACHED_BYTES
_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_MANY_BYTES = 4 << 20  # more than buffers on the way hold
_LONG_S = 0.1
_MOST_THREADS = 64  # that are looked at

Carried = Mapping[int, tuple[int, float, float, int]]
"""By peer: bytes that arrived there, seconds with something to carry, round trip, bytes a second lately."""


@dataclass(frozen=True)
class Facts:
    """Of the time since the last message. Times are in seconds.

    Attributes:
        period_s: how long that is; 0: nothing is known.
        cpu_s: of all threads of the process.
        ready_s: for which the training thread could have run, and other threads had its core.
        threads_ready_s: the same of the thread of this process that waited longest, of all but the training thread.
        throttled_s: for which the quota of its cgroup stopped the training thread, at most.
        page_waits: faults for which a page had to be read from a disk.
        memory_bytes: resident now.
        kernel: a number of the running kernel: ranks with the same one share its clock.
        link_to: the peer whose link was busiest; -1: no peer is reached over TCP.
        link_bytes: that arrived there.
        link_busy_s: in which it had bytes to carry.
        link_round_trip_s: of a packet.
        link_bytes_per_s: what the kernel measured lately, at its best.
        quota_cores: what its cgroup may use, and those around it; 0: there is no quota.
        host: its name.
    """

    period_s: float = 0.0
    cpu_s: float = 0.0
    ready_s: float = 0.0
    threads_ready_s: float = 0.0
    throttled_s: float = 0.0
    page_waits: int = 0
    memory_bytes: int = 0
    kernel: int = 0
    link_to: int = -1
    link_bytes: float = 0.0
    link_busy_s: float = 0.0
    link_round_trip_s: float = 0.0
    link_bytes_per_s: float = 0.0
    quota_cores: float = 0.0
    host: str = ""

    def packed(self) -> bytes:
        *numbers, host = _in_order(self)
        return _PACKED.pack(*numbers, host.encode()[:64])

    @classmethod
    def unpacked(cls, data: bytes) -> Facts:
        values: list[Any] = list(_PACKED.unpack(data[: _PACKED.size]))
        values[-1] = values[-1].rstrip(b"\0").decode(errors="replace")
        return cls(*values)

    @property
    def rate(self) -> float:
        """Bytes a second that the busiest link carried while it was busy, at least; 0: not known.

        Of short messages the time is mostly that of their acknowledgements, so the link can carry more.
        """
        return self.link_bytes / self.link_busy_s if self.link_busy_s > 0 else 0.0

    @property
    def rate_at_most(self) -> float:
        """What the busiest link can carry at most, bytes a second.

        Of many bytes that is what it carried. Of few the kernel's figure may be higher; it is that of a burst, which
        switches and socket buffers take faster than the link carries it.
        """
        if self.link_bytes >= _MANY_BYTES and self.link_busy_s >= _LONG_S:
            return self.rate
        return max(self.rate, self.link_bytes_per_s)


_in_order = attrgetter(*(field.name for field in fields(Facts)))  # dataclasses.astuple takes 30 µs


class FactCounters:
    """The counters of this process, and what they were when they were read last. Used by the training thread."""

    def __init__(self) -> None:
        self._groups = _cpu_groups()
        self._throttles = [_KeptFile(group / "cpu.stat") for group in self._groups]
        self._quota_cores = self._least_quota()
        self._kernel, self._host = _kernel(), socket.gethostname()
        self._before = self._read()
        self._threads = _threads_ready_s()
        self._links: dict[int, tuple[int, float, float, int]] = {}

    def since_last(self, carried: Carried) -> Facts:
        """What happened since the last call, or since this object was made."""
        before, self._before = self._before, self._read()
        period, cpu, ready, throttled, waits = (now - then for now, then in zip(self._before, before, strict=True))
        threads, self._threads = self._threads, _threads_ready_s()
        link = self._busiest(carried)
        if throttled > 0:  # it may have changed, and matters
            self._quota_cores = self._least_quota()
        return Facts(
            period_s=period,
            cpu_s=cpu,
            ready_s=ready,
            threads_ready_s=max((now - threads.get(one, now) for one, now in self._threads.items()), default=0.0),
            throttled_s=min(throttled, ready if ready > 0 else period),  # of a group it is the sum of its threads
            page_waits=int(waits),
            memory_bytes=memory_bytes(),
            kernel=self._kernel,
            quota_cores=self._quota_cores,
            host=self._host,
            **link,
        )

    def forget_links(self) -> None:
        """Called when the ranks have other numbers."""
        self._links = {}

    def _busiest(self, carried: Carried) -> dict[str, Any]:
        before, self._links = self._links, dict(carried)
        since = {
            peer: (now[0] - before[peer][0], now[1] - before[peer][1])
            for peer, now in carried.items()
            if peer in before
        }
        if not since:
            return {}
        peer = max(since, key=lambda one: since[one][1])
        return {
            "link_to": peer,
            "link_bytes": float(since[peer][0]),
            "link_busy_s": since[peer][1],
            "link_round_trip_s": carried[peer][2],
            "link_bytes_per_s": float(carried[peer][3]),
        }

    def _read(self) -> tuple[float, float, float, float, float]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        throttled = sum(filter(None, (_throttled_s(file.text()) for file in self._throttles)))
        return time.monotonic(), used.ru_utime + used.ru_stime, _ready_s(), throttled, float(used.ru_majflt)

    def _least_quota(self) -> float:
        return min(filter(None, map(_quota_cores, self._groups)), default=0.0)


class _KeptFile:
    """A file of the kernel that is read often: opening it is most of the work."""

    def __init__(self, path: Path) -> None:
        self._descriptor: int | None = None
        with contextlib.suppress(OSError):
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._descriptor).atexit = False

    def text(self) -> str:
        """Empty where it cannot be read (any more)."""
        if self._descriptor is None:
            return ""
        with contextlib.suppress(OSError):
            return os.pread(self._descriptor, 4096, 0).decode()
        return ""


def _text(path: str) -> str:
    """As pathlib's read_text, in a third of the time. OSError: it cannot be read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, 4096).decode()
    finally:
        os.close(descriptor)


def memory_bytes() -> int:
    """Resident memory of this process; 0 where the kernel does not report it."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(_text(f"{_PROC}/self/statm").split()[1]) * resource.getpagesize()
    return 0


def _kernel() -> int:
    with contextlib.suppress(OSError):
        return int.from_bytes((_PROC / "sys/kernel/random/boot_id").read_bytes()[:8], "little")
    return 0


def _ready_s() -> float:
    """proc(5), schedstat: how long this thread waited for a core."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(_text(f"{_PROC}/thread-self/schedstat").split()[1]) * 1e-9
    return 0.0


def _threads_ready_s() -> dict[str, float]:
    """The same by thread of this process, without the calling one."""
    found: dict[str, float] = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        threads = sorted(os.listdir(f"{_PROC}/self/task"), key=int)
        for one in threads[:_MOST_THREADS]:
            if int(one) != threading.get_native_id():
                with contextlib.suppress(OSError):  # it has ended
                    found[one] = int(_text(f"{_PROC}/self/task/{one}/schedstat").split()[1]) * 1e-9
    return found


def _cpu_groups() -> list[Path]:
    """The cgroup of this process and those around it that can have a CPU quota, of either version of cgroups(7)."""
    found: list[Path] = []
    with contextlib.suppress(OSError):
        for line in (_PROC / "self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            roots = [_CGROUPS / controllers, _CGROUPS / "cpu"] if controllers else [_CGROUPS]
            for root in roots:
                own = root / path.lstrip("/")
                around = [own, *own.parents]
                found += [one for one in around if one.is_relative_to(root)]
    return [group for group in dict.fromkeys(found) if _throttled_s(_KeptFile(group / "cpu.stat").text()) is not None]


def _throttled_s(stat: str) -> float | None:
    """Of a cpu.stat."""
    for name, unit in (("throttled_usec ", 1e-6), ("throttled_time ", 1e-9)):
        _, found, rest = stat.partition(name)
        if found:
            with contextlib.suppress(ValueError):
                return int(rest.partition("\n")[0]) * unit
    return None


def _quota_cores(group: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError):  # version 2; "max" is not a number
        quota, period = (group / "cpu.max").read_text().split()
        return int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):  # version 1; -1: none
        microseconds = int((group / "cpu.cfs_quota_us").read_text())
        return microseconds / int((group / "cpu.cfs_period_us").read_text()) if microseconds > 0 else None
    return None
