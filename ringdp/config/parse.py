"""How the values of RINGDP_* variables are written: text in, a value out.

Each raises InvalidArgumentError with the variable (`check_interfaces`: the field of `RingConfig`) and what it says,
unless its docstring says otherwise. Nothing here reads the environment: ringdp/config/variables.py has the table.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from pathlib import Path

from ringdp.errors import InvalidArgumentError

_RATE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([kmg]?)bit(?:/s)?|([kMG]?)B/s)", re.ASCII)


def check_interfaces(text: str) -> None:
    """Whether ``text`` is a list as RINGDP_IFACE has it; what is there is not looked at."""
    items = text.split(",") if text else []
    if any(not item.strip("^=") for item in items):
        raise InvalidArgumentError(f"iface has an empty item: {text!r}")
    if items and not items[0].startswith("^") and any(item.startswith("^") for item in items):
        raise InvalidArgumentError(
            f"iface {text!r} mixes interfaces to use with some to leave out: ^ goes first, for all"
        )
    for item in items:
        if "/" in item:
            try:
                ipaddress.ip_network(item.lstrip("^"), strict=False)
            except ValueError as error:
                raise InvalidArgumentError(f"iface {text!r}: {error}; a network looks like 10.0.0.0/8") from None


def read_door(folder: str) -> tuple[str, int, int, int]:
    """Of the launcher's folder for ranks of a job with a door: itself, the port that ranks dial, the number of this
    host, and the microseconds of a round trip to the door.

    Raises:
        InvalidArgumentError: there is no such folder, or it is another one.
    """
    try:
        port, node, round_trip_us = (Path(folder) / "door").read_text().split()
        return folder, int(port), int(node), int(round_trip_us)
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(
            f"RINGDP_DOOR={folder} is no folder of a launcher with --door or --join: {error}"
        ) from None


def read_address(text: str) -> tuple[str, int]:
    """The host and the port of HOST:PORT. Raises ValueError."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"{text!r} is no HOST:PORT, such as node1:29400 or [::1]:29400")
    return host.strip("[]"), int(port)


def read_port_range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,5})\s*[-:]\s*(\d{1,5})|(\d{1,5})", text)
    if match is None:
        raise InvalidArgumentError(f"RINGDP_PORT_RANGE={text} is not LOW-HIGH, for example 29600-29699")
    low, high, single = match.groups()
    return (int(single), int(single)) if single else (int(low), int(high))


def parse_rate(text: str) -> float:
    """Bytes a second of ``1gbit``, ``900mbit`` or ``100MB/s``.

    Decimal, as for every network: 1 gbit is 10^9 bits, 1 MB/s is 10^6 bytes a second.

    Raises:
        ValueError: it is not a rate; the message is the end of a sentence that begins with the text.
    """
    match = _RATE.fullmatch(text if text.endswith("B/s") else text.lower())
    if match is None:
        raise ValueError("is not a rate: write 1gbit, 100mbit or 500kbit, or bytes a second as 125MB/s")
    amount, bits, many = match.groups()
    per_s = float(amount) * 1000.0 ** " kmg".index((bits or (many or "").lower()) or " ")
    return per_s if bits is None else per_s / 8


def read_rate(text: str) -> int:
    try:
        rate = round(parse_rate(text))
    except ValueError as error:
        raise InvalidArgumentError(f"RINGDP_RATE={text} {error}") from None
    if rate == 0:
        raise InvalidArgumentError(f"RINGDP_RATE={text} would send nothing; leave the variable out for no limit")
    return rate


def read_streams(text: str) -> int:
    if text.lower() == "auto":
        return 0
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 32:
        raise InvalidArgumentError(f"RINGDP_STREAMS={text} is neither auto nor a number from 1 to 32")
    return int(text)


def switch(variable: str, text: str) -> bool:
    if text not in ("0", "1"):
        raise InvalidArgumentError(f"{variable}={text} is neither 0 nor 1")
    return text == "1"


def milliseconds(variable: str) -> Callable[[str], int]:
    """A reader of that variable's seconds."""

    def parse(text: str) -> int:
        try:
            return int(float(text) * 1000)
        except (ValueError, OverflowError):
            raise InvalidArgumentError(f"{variable}={text} is not a number of seconds") from None

    return parse
