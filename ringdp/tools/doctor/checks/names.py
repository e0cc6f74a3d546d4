"""The addresses of this host's name. If the name resolves to loopback, other hosts cannot connect to it as
MASTER_ADDR."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator, Sequence

from ringdp.tools.doctor.finding import Finding, note, ok
from ringdp.tools.doctor.host import Host


def check(host: Host) -> Iterator[Finding]:
    yield from resolved(host.name, addresses_of(host.name))


def addresses_of(name: str) -> list[str] | str:
    """All addresses of a name, or the resolver's error."""
    try:
        return list(dict.fromkeys(str(it[4][0]) for it in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)))
    except (OSError, UnicodeError) as error:
        return getattr(error, "strerror", None) or str(error)


def resolved(name: str, addresses: Sequence[str] | str) -> Iterator[Finding]:
    """Whether this name can serve as MASTER_ADDR."""
    if isinstance(addresses, str):
        remedy = (
            f"add a line 'ADDRESS {name}' to /etc/hosts, or use an address as MASTER_ADDR; ringdp itself needs no name"
        )
        yield note(f"the name of this host, {name}, cannot be resolved: {addresses}", remedy, name=name, addresses=[])
        return
    facts = {"name": name, "addresses": list(addresses)}
    words = f"{name} is {', '.join(addresses)}"
    if all(ipaddress.ip_address(it.partition("%")[0]).is_loopback for it in addresses):
        remedy = (
            f"in a job on several hosts give --master-addr an address, or name this host's in /etc/hosts instead of "
            f"{addresses[0]}; gloo takes GLOO_SOCKET_IFNAME; ringdp publishes addresses and not names"
        )
        yield note(f"{words}: loopback, so other hosts that ask for the name find themselves", remedy, **facts)
    else:
        yield ok(words, **facts)
