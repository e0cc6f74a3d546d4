"""Whether a rank can listen at the addresses that it publishes."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ringdp.tools.doctor.checks.interfaces import selected
from ringdp.tools.doctor.finding import Finding, note, ok, problem
from ringdp.tools.doctor.host import Host


def check(host: Host) -> Iterator[Finding]:
    settings = host.settings()
    if isinstance(settings, str):
        return
    rows = selected(settings.iface)
    addresses = ["127.0.0.1"] if isinstance(rows, str) else [row["ip"] for row in rows]
    if settings.port_range is None:
        yield from any_port(addresses, host.read("/proc/sys/net/ipv4/ip_local_port_range"))
    else:
        low, high = settings.port_range
        free = [port for port in range(low, high + 1) if all(why_not(it, port) is None for it in addresses)]
        yield from of_range(low, high, free, host.local_ranks)


def why_not(address: str, port: int) -> str | None:
    """The reason for which a rank cannot listen there; None where it can."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
            probe.listen(1)
    except OSError as error:
        return error.strerror or str(error)
    return None


def any_port(addresses: Sequence[str], ephemeral: str | None) -> Iterator[Finding]:
    """Without RINGDP_PORT_RANGE: a free one of the kernel's."""
    problems: Mapping[str, Any] = {it: why for it in addresses if (why := why_not(it, 0)) is not None}
    if problems:
        listed = ", ".join(f"{address}: {why}" for address, why in problems.items())
        yield problem(f"a rank cannot listen ({listed})", "choose other interfaces with RINGDP_IFACE", failed=problems)
        return
    kernel = "-".join((ephemeral or "").split()) or "the kernel's"
    words = f"ranks can listen on any port ({kernel}); a firewall between hosts has to let them through"
    yield ok(words, addresses=list(addresses), ports=kernel)


def of_range(low: int, high: int, free: Sequence[int], local_ranks: int) -> Iterator[Finding]:
    """With RINGDP_PORT_RANGE: one for each rank of this host."""
    words = f"{len(free)} of the ports {low}-{high} (RINGDP_PORT_RANGE) are free"
    facts = {"range": [low, high], "free": len(free), "local_ranks": local_ranks}
    if len(free) < local_ranks:
        remedy = f"widen it to at least {local_ranks} free ports: each rank of a host needs one"
        yield problem(f"{words}, and this host has {local_ranks} ranks", remedy, **facts)
    elif low < 1024:
        yield note(words, "ports below 1024 need root: choose others", **facts)
    else:
        yield ok(words, **facts)
