"""Network interfaces, the addresses of this host's name, and ports: what other hosts reach."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ringdp.errors import RingError
from ringdp.tools.doctor.finding import Finding, note, ok, problem
from ringdp.tools.doctor.host import Host

BRIDGES = re.compile(r"docker|br-|virbr|veth|cni|flannel|cali|lxc|podman|kube")
"""Names of interfaces that lead to containers of this host; their addresses are often the same on every host."""

Row = dict[str, Any]


def interfaces(host: Host) -> Iterator[Finding]:
    """Which of them ranks would publish to other hosts, in which order, and why."""
    settings = host.settings()
    if isinstance(settings, str):
        return
    rows = [row | attributes(host, row["name"]) for row in every()]
    chosen = selected(settings.iface)
    if isinstance(chosen, str):
        used: list[tuple[str, str]] = []
        verdict = problem if settings.iface or host.ranks > host.local_ranks else note
        yield verdict(
            chosen, "bring an interface up, or set RINGDP_IFACE to one that other hosts reach; one host needs none"
        )
    else:
        used = [(row["name"], row["ip"]) for row in chosen]
    yield from described(rows, used, settings.iface)
    yield from order(rows, used)
    if settings.advertise:
        yield ok(f"RINGDP_ADVERTISE={settings.advertise} is published first", advertise=settings.advertise)


def every() -> list[Row]:
    """All addresses that are up: name, ip, prefix_bits, loopback, running."""
    from ringdp import _C

    return _C.network_interfaces()


def selected(spec: str) -> list[Row] | str:
    """The addresses that a rank publishes, or the core's message where there is none."""
    from ringdp import _C

    try:
        return _C.network_interfaces(spec)
    except (RingError, RuntimeError) as error:
        return str(error)


def attributes(host: Host, name: str) -> Row:
    """Speed in Mbit/s, MTU and kind, as far as /sys/class/net tells; virtual interfaces have no speed."""
    folder = f"/sys/class/net/{name}"
    speed = host.number(f"{folder}/speed")
    return {
        "mbit_per_s": speed if speed is not None and speed > 0 else None,
        "mtu": host.number(f"{folder}/mtu"),
        "wireless": host.exists(f"{folder}/wireless"),
        "half_duplex": host.read(f"{folder}/duplex") == "half",
    }


def described(rows: Sequence[Row], used: Sequence[tuple[str, str]], spec: str) -> Iterator[Finding]:
    """A finding for each address."""
    for row in rows:
        place = used.index((row["name"], row["ip"])) + 1 if (row["name"], row["ip"]) in used else None
        words = f"{row['name']} {row['ip']}/{row['prefix_bits']}, {format_speed(row)}, MTU {row['mtu'] or 'not said'}"
        facts = row | {"place": place}
        if place is None:
            why = "loopback serves this host only" if row["loopback"] else f"left out by RINGDP_IFACE={spec}"
            yield ok(f"{words}: not published to other hosts, {why}", **facts)
            continue
        why = f"named by RINGDP_IFACE={spec}" if spec else "it is up"
        sentence = f"{words}: used between hosts, number {place} of {len(used)} ({why})"
        if not row["running"]:
            yield note(
                f"{sentence}, but it has no carrier", f"plug the cable in, or RINGDP_IFACE=^{row['name']}", **facts
            )
        elif BRIDGES.match(row["name"]) and not spec:
            remedy = f"RINGDP_IFACE=^{row['name']} saves the attempts to reach it"
            yield note(f"{sentence}; its name is that of a bridge to containers of this host", remedy, **facts)
        elif row["wireless"]:
            yield note(f"{sentence}; it is wireless: slow, and slower at times", "use a cable", **facts)
        elif row["half_duplex"]:
            remedy = f"check cable and switch: ethtool {row['name']}; ring sends and receives at once"
            yield note(f"{sentence}; it runs at half duplex", remedy, **facts)
        elif row["mtu"] is not None and row["mtu"] < 1280:
            yield note(f"{sentence}; the MTU is unusually small", f"ip link set dev {row['name']} mtu 1500", **facts)
        else:
            yield ok(sentence, **facts)


def order(rows: Sequence[Row], used: Sequence[tuple[str, str]]) -> Iterator[Finding]:
    """Whether a slower card stands before a faster one: peers try the first that lies in a network of theirs first."""
    by_key = {(row["name"], row["ip"]): row for row in rows}
    cards = [by_key[key] for key in used if key in by_key and by_key[key]["mbit_per_s"]]
    for before, behind in ((a, b) for i, a in enumerate(cards) for b in cards[i + 1 :]):
        if before["name"] != behind["name"] and behind["mbit_per_s"] > before["mbit_per_s"]:
            sentence = (
                f"{before['name']} ({format_speed(before)}) is tried before {behind['name']} ({format_speed(behind)}),"
                " which is faster"
            )
            yield note(sentence, f"RINGDP_IFACE={behind['name']},{before['name']} on every host")
            return


def format_speed(row: Row) -> str:
    """``1 Gbit/s``."""
    speed = row["mbit_per_s"]
    if speed is None:
        return "speed not said"
    return f"{speed / 1000:g} Gbit/s" if speed >= 1000 else f"{speed} Mbit/s"


def network_of(row: Row) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    """The network that an address of this host lies in."""
    return ipaddress.ip_network(f"{row['ip'].partition('%')[0]}/{row['prefix_bits']}", strict=False)


def host_name(host: Host) -> Iterator[Finding]:
    """The addresses of this host's name. Where that is loopback, other hosts cannot connect to it as MASTER_ADDR."""
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


def ports(host: Host) -> Iterator[Finding]:
    """Whether a rank can listen at the addresses that it publishes."""
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
