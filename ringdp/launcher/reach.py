"""Whether hosts reach the one where a job meets, tried before its ranks start: torch's store would wait for minutes."""

from __future__ import annotations

import contextlib
import os
import socket

TRY_S = 4.0
"""Seconds that a host tries to connect; a firewall that drops packets does not answer."""


BACKLOG = 1024
"""Connections that may wait at a port."""


def open_port(port: int) -> socket.socket:
    """A socket that listens at the port on all addresses. Raises OSError where it cannot."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, dualstack_ipv6=both, backlog=BACKLOG)


def listen(port: int) -> socket.socket | None:
    """The same; None where it cannot, of which the job says more later."""
    with contextlib.suppress(OSError):
        return open_port(port)
    return None


def why_not(address: str, port: int) -> str:
    """Why this host cannot connect to a listening one, in a clause; empty where it can."""
    try:
        socket.create_connection((address, port), timeout=TRY_S).close()
    except TimeoutError:
        return f"no answer within {TRY_S:.0f} s"
    except OSError as error:
        number = error.errno if error.errno is not None else 0
        return os.strerror(number) if number > 0 else str(error)
    return ""


def sentence(host: str, first: str, address: str, port: int, why: str) -> str:
    """For the user. `host` cannot reach `first`, where the job meets."""
    return f"{host} cannot reach {first} at {address} port {port}: {why}"


def remedy(first: str, port: int) -> str:
    """What to open, and what to choose instead."""
    return (
        f"open TCP port {port} of {first} to the other hosts (--master-port chooses another one, --master-addr another"
        " address), and between all hosts the ports of RINGDP_PORT_RANGE, at which ranks listen"
    )
