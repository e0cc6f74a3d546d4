"""Whether this host's clock is kept right, and how cheap it is to read."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

from ringdp.tools.doctor.finding import Finding, note, ok
from ringdp.tools.doctor.host import Host

UNSYNCHRONISED = 0x40  # STA_UNSYNC of adjtimex(2)
FAST_SOURCES = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page")


def check(host: Host) -> Iterator[Finding]:
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
