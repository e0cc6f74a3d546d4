"""The hosts of a job as the user names them: ``-H node1:4,node2:4``, or a file as of mpirun, DeepSpeed, PBS or SGE."""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import re
from collections.abc import Mapping
from pathlib import Path

_NAME = re.compile(r"[A-Za-z0-9_.@%\[\]:-]+")


@dataclasses.dataclass(frozen=True)
class Host:
    """A host and the number of its ranks; None where the list does not say it."""

    name: str
    slots: int | None = None


def parse_hosts(text: str) -> list[Host]:
    """``-H``: names with commas between, each with ``:slots`` behind it or without.

    Raises:
        ValueError: it is empty, or has a name or number that cannot be used.
    """
    return _merged([_host(part.strip(), f"-H {text}") for part in text.split(",")])


def read_host_file(path: Path) -> list[Host]:
    """One host a line: ``name``, ``name slots=4`` (mpirun, DeepSpeed), ``name:4``, ``name 4 queue processors`` (SGE).

    A name that stands there several times without a number has as many slots (PBS). ``#`` begins a comment.

    Raises:
        ValueError: a line cannot be read; the message has its number.
        OSError: the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text file") from None
    hosts = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"{path}, line {number}"
        host = _host(words[0], where)
        for word in words[1:]:
            if found := re.fullmatch(r"slots=(\S+)", word):
                host = Host(host.name, _slots(found[1], where))
            elif word.isdecimal() and word is words[1]:
                host = Host(host.name, _slots(word, where))
                break  # SGE's queue and processors
            elif not re.fullmatch(r"max[-_]slots=\d+", word):
                raise ValueError(f"{where}: {word!r} is not slots=NUMBER")
        hosts.append(host)
    if not hosts:
        raise ValueError(f"{path} names no host")
    return _merged(hosts)


def scheduler_host_file(environ: Mapping[str, str]) -> tuple[str, Path] | None:
    """The variable and host file of PBS or Sun Grid Engine, inside one of their jobs."""
    for name in ("PBS_NODEFILE", "PE_HOSTFILE"):
        if environ.get(name) and os.path.isfile(environ[name]):
            return name, Path(environ[name])
    return None


def _host(text: str, where: str) -> Host:
    name, colon, slots = text.rpartition(":")
    if not colon or text.endswith("]") or _is_ipv6(text):
        name, slots = text, ""
    if not _NAME.fullmatch(name) or name.startswith("-") or (":" in name and not _is_ipv6(name.strip("[]"))):
        raise ValueError(f"{where}: {name!r} is not a host's name")
    return Host(name.strip("[]"), _slots(slots, where) if slots or (colon and name != text) else None)


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def _slots(text: str, where: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{where}: the number of ranks must be 1 or more, not {text!r}")
    return int(text)


def _merged(hosts: list[Host]) -> list[Host]:
    """Each name once, where it stood first; a name without a number counts as one slot if it is there again."""
    counts: dict[str, list[int | None]] = {}
    for host in hosts:
        counts.setdefault(host.name, []).append(host.slots)
    return [
        Host(name, slots[0] if len(slots) == 1 else sum(1 if it is None else it for it in slots))
        for name, slots in counts.items()
    ]
