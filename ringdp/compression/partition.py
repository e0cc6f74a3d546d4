"""The owners of a parameter's elements: the same formula as the core's, which docs/reference/wire_format.md has.

A parameter of `count` elements is cut into units of 256, the last one shorter. The units are dealt to the parts as
evenly as they go, and `owner_offset`, a hash of the name, says which parts get one more: many small parameters load
all ranks alike.
"""

from __future__ import annotations

import zlib

UNIT = 256


def owner_offset_of(name: str) -> int:
    """CRC-32 of the parameter's name in UTF-8: the same on every machine, and in C++."""
    return zlib.crc32(name.encode())


def bounds(count: int, parts: int, owner_offset: int) -> list[int]:
    """Where the parts begin, and at the end `count`: part p is ``[bounds[p], bounds[p + 1])``, and rank p owns it."""
    units = -(-count // UNIT)
    each, more = divmod(units, parts)
    edges, unit = [0], 0
    for part in range(parts):
        unit += each + ((part + parts - owner_offset % parts) % parts < more)
        edges.append(min(unit * UNIT, count))
    return edges
