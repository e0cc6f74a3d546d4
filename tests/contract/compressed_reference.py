"""What a compressed all-reduce must give, to the bit: docs/reference/wire_format.md in numpy, over `_core`'s codecs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tests.contract.core_ranks import core

Floats = npt.NDArray[np.float32]
UNIT = 256


def parts(count: int, owner_offset: int, how_many: int, weights: Sequence[int] = ()) -> list[slice]:
    """Where a section is cut: whole units, what is left over going to some parts from `owner_offset` on.

    With `weights`, one for each host, parts are as long as those say.
    """
    units = -(-count // UNIT)
    out, begin = [], 0
    before, whole = 0, how_many // max(1, len(weights)) * sum(weights)
    for part in range(how_many if weights else 0):
        before += weights[part % len(weights)]
        end = min((units * before + owner_offset % whole) // whole * UNIT, count)
        out.append(slice(begin, end))
        begin = end
    for part in range(0 if weights else how_many):
        more = (part - owner_offset) % how_many < units % how_many
        end = min(begin + (units // how_many + more) * UNIT, count)
        out.append(slice(begin, end))
        begin = end
    assert begin == count
    return out


def decoded(codec: str, code: bytes, count: int) -> Floats:
    return np.frombuffer(core.codec_decompress(codec, code, count), np.float32)


def add(a: Floats, b: Floats) -> Floats:
    """In float32, with the one NaN of the kernels."""
    with np.errstate(invalid="ignore", over="ignore"):
        total = a + b
    total[np.isnan(total)] = np.nan
    return total


@dataclass
class Outcome:
    means: list[Floats]  # [section], the same on all ranks
    residuals: list[list[Floats]]  # [rank][section]; what a rank has none of stays as it was


def all_reduce(
    inputs: Sequence[Sequence[Floats]],
    owner_offsets: Sequence[int],
    codec: str,
    *,
    hosts: Sequence[int],
    weights: Sequence[int] = (),
    divisor: int,
    factor: float = 1.0,
    residuals: Sequence[Sequence[Floats]] | None = None,
) -> Outcome:
    """`inputs[rank][section]`; `hosts[rank]`: its host, numbered as they first appear; `weights`: what each owns."""
    ranks = len(inputs)
    if len(set(hosts)) in (1, ranks):
        hosts = list(range(ranks))
    members = [[rank for rank in range(ranks) if hosts[rank] == host] for host in sorted(set(hosts))]
    shares = max(map(len, members))
    means = [x.copy() for x in inputs[0]]
    after = [[r.copy() for r in each] for each in residuals] if residuals is not None else []

    def encode(values: Floats, rank: int, section: int, where: slice) -> Floats:
        if residuals is None:
            return decoded(codec, core.codec_compress(codec, values), len(values))
        old = np.ascontiguousarray(residuals[rank][section][where])
        code, left = core.codec_compress_with_feedback(codec, values, old, factor)
        after[rank][section][where] = np.frombuffer(left, np.float32)
        return decoded(codec, code, len(values))

    for section, owner_offset in enumerate(owner_offsets):
        for part, where in enumerate(parts(len(means[section]), owner_offset, shares * len(members), weights)):
            if where.start == where.stop:
                continue
            share, owner = divmod(part, len(members))
            total: Floats | None = None
            for host, local in enumerate(members):
                value = inputs[local[0]][section][where].copy()
                for rank in local[1:]:
                    value = add(value, inputs[rank][section][where])
                if host != owner:
                    value = encode(value, local[share % len(local)], section, where)
                total = value if total is None else add(total, value)
            assert total is not None
            if divisor > 1:
                total = total / np.float32(divisor)
            carrier = members[owner][share % len(members[owner])]
            means[section][where] = encode(np.ascontiguousarray(total), carrier, section, where)
    return Outcome(means, after)
