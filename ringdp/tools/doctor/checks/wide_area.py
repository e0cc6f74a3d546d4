"""The kernel's settings that decide how fast one TCP connection is over a long or lossy path (tcp(7)).

A connection carries a receive window for each round trip, at most. Linux lets the window grow to about half of the
largest receive buffer (tcp_adv_win_scale is 1 since Linux 6.6; older kernels give three quarters of it), so a buffer of
B bytes carries B / 2 for each round trip. Congestion control decides the cost of a lost packet: cubic halves its rate
or nearly so, bbr keeps its measured rate.
"""

from __future__ import annotations

from collections.abc import Iterator

from ringdp.text import format_size
from ringdp.tools.doctor.finding import Finding, note, ok
from ringdp.tools.doctor.host import Host

FAR_S = 0.1
"""The round trip that the sentences compute with: between continents."""

WINDOW_SHARE = 0.5
ENOUGH_BYTES = 64 << 20
BEST_CONTROL = "bbr"


def wide_area(host: Host) -> Iterator[Finding]:
    tcp, core = "/proc/sys/net/ipv4", "/proc/sys/net/core"
    yield from buffers(largest(host.read(f"{tcp}/tcp_rmem")), largest(host.read(f"{tcp}/tcp_wmem")))
    yield from control(
        host.read(f"{tcp}/tcp_congestion_control"),
        (host.read(f"{tcp}/tcp_available_congestion_control") or "").split(),
        (host.read(f"{tcp}/tcp_allowed_congestion_control") or "").split(),
    )
    yield from switches(
        window_scaling=host.number(f"{tcp}/tcp_window_scaling"),
        mtu_probing=host.number(f"{tcp}/tcp_mtu_probing"),
        slow_start_after_idle=host.number(f"{tcp}/tcp_slow_start_after_idle"),
        qdisc=host.read(f"{core}/default_qdisc"),
        control=host.read(f"{tcp}/tcp_congestion_control"),
    )


def largest(text: str | None) -> int | None:
    """The third number of tcp_rmem and tcp_wmem: least, default, most bytes."""
    words = (text or "").split()
    return int(words[2]) if len(words) == 3 and words[2].isdecimal() else None


def carries_bytes_per_s(buffer_bytes: float, round_trip_s: float) -> float:
    """What one connection carries at most with that receive buffer."""
    return buffer_bytes * WINDOW_SHARE / round_trip_s


def buffer_for(bytes_per_s: float, round_trip_s: float) -> int:
    """The largest receive buffer that such a path needs: a power of two, at least 1 MiB."""
    needed = bytes_per_s * round_trip_s / WINDOW_SHARE
    return 1 << max(20, (int(needed) - 1).bit_length())


def set_buffers(size_bytes: int) -> str:
    """The command for both directions, on both hosts."""
    receive, send = f"4096 131072 {size_bytes}", f"4096 65536 {size_bytes}"
    return f"on both hosts: sysctl -w net.ipv4.tcp_rmem='{receive}' net.ipv4.tcp_wmem='{send}'"


def buffers(receive: int | None, send: int | None) -> Iterator[Finding]:
    """The largest rate of a connection over 100 ms."""
    if receive is None or send is None:
        return
    smaller = min(receive, send)
    mbit = carries_bytes_per_s(smaller, FAR_S) * 8 / 1e6
    words = f"TCP's buffers grow to {format_size(receive)} (receive) and {format_size(send)} (send): {mbit:.0f} Mbit/s "
    words += "for each connection over 100 ms"
    facts = {"receive_bytes": receive, "send_bytes": send, "mbit_per_s_over_100_ms": round(mbit)}
    if smaller < ENOUGH_BYTES:
        yield note(
            f"{words}; a local network needs no more", f"for wide-area links, {set_buffers(ENOUGH_BYTES)}", **facts
        )
    else:
        yield ok(words, **facts)


def control(current: str | None, available: list[str], allowed: list[str]) -> Iterator[Finding]:
    """Which congestion control is used, and whether a program may choose a better one for a lossy path."""
    if current is None:
        return
    facts = {"current": current, "available": available, "allowed": allowed}
    if current == BEST_CONTROL:
        yield ok(f"congestion control is {current}, which keeps its rate over lossy paths", **facts)
        return
    sentence = f"congestion control is {current}: over a long path each lost packet costs seconds of its rate"
    remedy = f"sysctl -w net.ipv4.tcp_congestion_control={BEST_CONTROL}"
    if BEST_CONTROL not in available:
        remedy = f"modprobe tcp_{BEST_CONTROL}, then {remedy}"
    elif BEST_CONTROL not in allowed:
        sentence += f", and users may not choose {BEST_CONTROL} (allowed: {' '.join(allowed) or 'none'})"
        together = " ".join([*allowed, BEST_CONTROL])
        remedy += f", or let users choose it: net.ipv4.tcp_allowed_congestion_control='{together}'"
    remedy = f"for wide-area links: {remedy}"
    yield note(sentence, remedy, **facts)


def switches(
    *,
    window_scaling: int | None,
    mtu_probing: int | None,
    slow_start_after_idle: int | None,
    qdisc: str | None,
    control: str | None,
) -> Iterator[Finding]:
    """Single settings, reported only where they cost time."""
    if window_scaling == 0:
        remedy = "sysctl -w net.ipv4.tcp_window_scaling=1"
        yield note("window scaling is off: a connection carries 64 KiB for each round trip", remedy, window_scaling=0)
    if slow_start_after_idle == 1:
        remedy = "for wide-area links: sysctl -w net.ipv4.tcp_slow_start_after_idle=0"
        sentence = "a connection that was idle starts slowly again: between two steps each pause counts as idle"
        yield note(sentence, remedy, slow_start_after_idle=1)
    if mtu_probing == 0:
        sentence = "the kernel does not work around a path that drops large packets silently (tcp_mtu_probing=0)"
        yield ok(f"{sentence}; ringdp names such a path", mtu_probing=0)
    if control == BEST_CONTROL and qdisc is not None and qdisc not in ("fq", "fq_codel", "cake", "noqueue"):
        yield ok(f"the default queue is {qdisc}; {BEST_CONTROL} paces by itself where it is not fq", qdisc=qdisc)
