"""What a reduction must give, to the bit: docs/reference/algorithms.md and kernels/elements.h re-enacted in numpy.

Arrays are flat. bfloat16, which numpy does not have, is an array of uint16 with its bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

STORAGE: dict[str, Any] = {
    "uint8": np.uint8,
    "int8": np.int8,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int64,
    "uint16": np.uint16,
    "uint32": np.uint32,
    "uint64": np.uint64,
    "float16": np.float16,
    "bfloat16": np.uint16,
    "float32": np.float32,
    "float64": np.float64,
    "bool": np.bool_,
    "complex64": np.complex64,
    "complex128": np.complex128,
}
HALF = ("float16", "bfloat16")
FLOATING = (*HALF, "float32", "float64")
COMPLEX = ("complex64", "complex128")
INTEGERS = tuple(name for name in STORAGE if "int" in name)
_GRANULE = 16  # elements: where the chunks of an all-reduce begin


def pairs() -> list[tuple[str, str]]:
    """Every (dtype, op) that exists: bits for integers and bool only, no mean of bools, no order of complex numbers."""
    found = [(dtype, op) for dtype in STORAGE for op in ("SUM", "PRODUCT")]
    found += [(dtype, "AVG") for dtype in STORAGE if dtype != "bool"]
    found += [(dtype, op) for dtype in STORAGE if dtype not in COMPLEX for op in ("MIN", "MAX")]
    found += [(dtype, op) for dtype in (*INTEGERS, "bool") for op in ("BAND", "BOR", "BXOR")]
    return found


def itemsize(dtype: str) -> int:
    return np.dtype(STORAGE[dtype]).itemsize


def zeros(dtype: str, count: int) -> Array:
    return np.zeros(count, STORAGE[dtype])


def random_input(dtype: str, op: str, count: int, seed: Sequence[int]) -> Array:
    """One rank's input: any value of the type, but no product that overflows at once."""
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.random(count) < 0.5
    if dtype in INTEGERS:
        limits = np.iinfo(STORAGE[dtype])
        return rng.integers(limits.min, limits.max, count, STORAGE[dtype], endpoint=True)
    parts = 2 * count if dtype in COMPLEX else count
    if op == "PRODUCT":
        values = rng.uniform(0.5, 1.5, parts) * rng.choice([-1.0, 1.0], parts)
    else:
        values = rng.standard_normal(parts) * np.exp2(rng.integers(-8, 8, parts))
    return narrow(values, dtype)


def special_input(dtype: str, rank: int, world: int) -> Array:
    """Every pair of an infinity, NaN, both zeros, a subnormal and the largest number meets on neighbouring ranks."""
    tiny = {"float16": 6e-8, "bfloat16": 1e-40, "float32": 1e-44, "float64": 5e-324}[dtype]
    huge = {"float16": 65504.0, "bfloat16": 3.3e38, "float32": 3.4e38, "float64": 1.7e308}[dtype]
    values = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, tiny, -tiny, huge, -huge, 1.0])
    return narrow(np.roll(np.repeat(values, len(values)), rank * (len(values) + 1) % (7 * world)), dtype)


def narrow(values: npt.NDArray[np.float64], dtype: str) -> Array:
    """float64 values as elements of `dtype`; complex ones take two each."""
    with np.errstate(over="ignore"):
        if dtype == "bfloat16":
            return _to_bfloat16(values.astype(np.float32))
        if dtype in COMPLEX:
            part = np.float32 if dtype == "complex64" else np.float64
            return values.astype(part).view(STORAGE[dtype])
        return values.astype(STORAGE[dtype])


def widen(x: Array, dtype: str) -> Array:
    """The values of elements in double precision, for a sum to be close to."""
    if dtype == "bfloat16":
        return _from_bfloat16(x).astype(np.float64)
    return x.astype(np.complex128 if dtype in COMPLEX else np.float64)


def in_rank_order(inputs: Sequence[Array], dtype: str, op: str, *, divisor: int | None = None) -> Array:
    """x_0 op x_1 op …; half types in float32, rounded once. A mean divides by `divisor`, or by how many there are."""
    divisor = len(inputs) if divisor is None else divisor
    if len(inputs) == 1 and (divisor == 1 or op != "AVG"):
        return inputs[0].copy()
    if dtype in HALF:
        total: Array = _to_float32(inputs[0], dtype)
        for x in inputs[1:]:
            total = _combine(total, _to_float32(x, dtype), "float32", op)
        with np.errstate(all="ignore"):
            return _from_float32(np.divide(total, np.float32(divisor)) if op == "AVG" else total, dtype)
    result = inputs[0].copy()
    for x in inputs[1:]:
        result = _combine(result, x, dtype, op)
    return _divide(result, divisor, dtype) if op == "AVG" and divisor > 1 else result


def in_ring_order(inputs: Sequence[Array], dtype: str, op: str, *, one_host: bool = True) -> Array:
    """Block c is x_c op x_{c+1} op …, ranks modulo n; blocks begin at multiples of 16 elements.

    Between two ranks, and inside a host, the buffer is first cut into slabs of a block per rank: 256 KiB, or 64 KiB
    between three and four ranks of a host.
    """
    world, count = len(inputs), len(inputs[0])
    block = 256 * 1024 if world == 2 or (one_host and world > 4) else 64 * 1024 if one_host else 0
    slab = world * block // inputs[0].itemsize or max(count, 1)
    result = inputs[0].copy()
    for begin in range(0, count, slab):
        for block, part in enumerate(_chunks(begin, min(begin + slab, count), world)):
            result[part] = in_rank_order([inputs[(block + step) % world][part] for step in range(world)], dtype, op)
    return result


def in_tree_order(inputs: Sequence[Array], dtype: str, op: str, root: int = 0) -> Array:
    """The sums of a binomial tree whose places count from the root: place p adds to its own input the sums of p+1, p+2,
    p+4, …, below the lowest bit set in p, from left to right. Half types in float32, rounded once."""
    size, half = len(inputs), dtype in HALF
    turned = [*inputs[root:], *inputs[:root]]

    def sum_of(place: int) -> Array:
        total: Array = _to_float32(turned[place], dtype) if half else turned[place].copy()
        step = 1
        while place + step < size and not place & step:
            total = _combine(total, sum_of(place + step), "float32" if half else dtype, op)
            step *= 2
        return total

    result = sum_of(0)
    if not half:
        return _divide(result, size, dtype) if op == "AVG" else result
    with np.errstate(all="ignore"):
        return _from_float32(np.divide(result, np.float32(size)) if op == "AVG" else result, dtype)


def in_halving_order(inputs: Sequence[Array], dtype: str, op: str, hosts: Sequence[int]) -> Array:
    """The sums of a halving, block by block: of the ranks of each host, then of the hosts; half types in float32,
    rounded once. Hosts have as many ranks each."""
    members = [[rank for rank, it in enumerate(hosts) if it == host] for host in dict.fromkeys(hosts)]
    half, places, count = dtype in HALF, len(members[0]), len(members)
    wide = "float32" if half else dtype
    result = inputs[0].copy()

    def halved(sums: list[Array]) -> Array:
        """`sums[i]`: of the rank that is i before the owner."""
        distance = 1 << (len(sums) - 1).bit_length()
        while distance > 1:
            distance //= 2
            for i in range(len(sums) - distance):
                sums[i] = _combine(sums[i], sums[i + distance], wide, op)
            del sums[distance:]
        return sums[0]

    for number, part in enumerate(_chunks(0, len(result), places * count)):
        place, home = divmod(number, count)

        def of(rank: int, part: slice = part) -> Array:
            return _to_float32(inputs[rank][part], dtype) if half else inputs[rank][part]

        of_hosts = [
            halved([of(members[(home - j) % count][(place - i) % places]) for i in range(places)]) for j in range(count)
        ]
        total = halved(of_hosts)
        if half:
            with np.errstate(all="ignore"):
                total = _from_float32(np.divide(total, np.float32(len(inputs))) if op == "AVG" else total, dtype)
        else:
            total = _divide(total, len(inputs), dtype) if op == "AVG" else total
        result[part] = total
    return result


def in_two_levels(inputs: Sequence[Array], dtype: str, op: str, hosts: Sequence[int]) -> Array:
    """The sum of each host in rank order, then these, host after host; `hosts[r]` is rank r's, any numbers.

    The buffer is cut into shares, and each share into a block per host. Block c begins at host c and goes round the
    hosts. Half types: each host's sum is rounded, and these are added from the first host on, in float32, and rounded
    again; a mean is divided inside the host. Other types are divided last.
    """
    count, numbers = len(inputs[0]), list(dict.fromkeys(hosts))
    members = [[rank for rank, host in enumerate(hosts) if host == number] for number in numbers]
    result = inputs[0].copy()
    for share in _chunks(0, count, _share_count(inputs[0].nbytes, members)):
        for first, part in enumerate(_chunks(share.start, share.stop, len(members))):
            of_host = [[inputs[rank][part] for rank in ranks] for ranks in members]
            if dtype in HALF:
                sums = [in_rank_order(each, dtype, op, divisor=len(inputs)) for each in of_host]
                result[part] = in_rank_order(sums, dtype, op, divisor=1)
            else:
                sums = [in_rank_order(each, dtype, op, divisor=1) for each in of_host]
                result[part] = in_rank_order(sums[first:] + sums[:first], dtype, op, divisor=len(inputs))
    return result


def in_two_levels_scattered(inputs: Sequence[Array], dtype: str, op: str, hosts: Sequence[int]) -> Array:
    """A reduce-scatter's chunk: the sum of each host in rank order, then these, from the first host on; see above."""
    half, world = dtype in HALF, len(inputs)
    of_host = [[x for x, its in zip(inputs, hosts, strict=True) if its == host] for host in dict.fromkeys(hosts)]
    sums = [in_rank_order(each, dtype, op, divisor=world if half else 1) for each in of_host]
    return in_rank_order(sums, dtype, op, divisor=1 if half else world)


def _share_count(nbytes: int, members: Sequence[Sequence[int]]) -> int:
    """Blocks of at most 128 KiB; four shares for each rank of the largest host, where blocks stay above 16 KiB."""
    hosts, most = len(members), max(len(ranks) for ranks in members)
    needed = -(-nbytes // (hosts * 128 * 1024))
    wanted = min(4 * most, nbytes // (hosts * 16 * 1024))
    return -(-max(needed, wanted, 1) // most) * most


def _chunks(begin: int, end: int, parts: int) -> list[slice]:
    """Equal parts, but that they begin at multiples of 16 elements; the last ones may be shorter or empty."""
    each = -(-(end - begin) // parts)
    each = -(-each // _GRANULE) * _GRANULE
    edges = [min(begin + part * each, end) for part in range(parts + 1)]
    return [slice(*edge) for edge in itertools.pairwise(edges)]


def same_bits(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def _combine(a: Array, b: Array, dtype: str, op: str) -> Array:
    with np.errstate(all="ignore"):
        return _COMPLEX_OR_PLAIN[dtype in COMPLEX](a, b, dtype, op)


def _plain(a: Array, b: Array, dtype: str, op: str) -> Array:
    floating = dtype in FLOATING
    if dtype == "bool":
        return {
            "SUM": np.logical_or,
            "MAX": np.logical_or,
            "BOR": np.logical_or,
            "PRODUCT": np.logical_and,
            "MIN": np.logical_and,
            "BAND": np.logical_and,
            "BXOR": np.logical_xor,
        }[op](a, b)
    if op in ("SUM", "AVG", "PRODUCT"):
        result = a * b if op == "PRODUCT" else a + b
        return _one_nan(result) if floating else result
    if op in ("MIN", "MAX"):
        first = a < b if op == "MIN" else a > b
        return np.where(np.isnan(a) | first, a, b) if floating else np.where(first, a, b)
    return {"BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}[op](a, b)


def _complex(a: Array, b: Array, dtype: str, op: str) -> Array:
    part = np.float32 if dtype == "complex64" else np.float64
    x: Array = a.view(part)
    y: Array = b.view(part)
    if op in ("SUM", "AVG"):
        return _one_nan(x + y).view(a.dtype)
    result = np.empty_like(x)
    result[0::2] = _one_nan(x[0::2] * y[0::2]) - _one_nan(x[1::2] * y[1::2])
    result[1::2] = _one_nan(x[0::2] * y[1::2]) + _one_nan(x[1::2] * y[0::2])
    return _one_nan(result).view(a.dtype)


_COMPLEX_OR_PLAIN = {True: _complex, False: _plain}


def _divide(x: Array, world: int, dtype: str) -> Array:
    """The mean, last: integers towards zero, complex numbers part by part."""
    if dtype in INTEGERS:
        quotient = np.floor_divide(x, np.array(world, x.dtype))
        remainder = x - quotient * np.array(world, x.dtype)
        return (quotient + ((x < 0) & (remainder != 0))).astype(x.dtype)
    part: Array = x.view(np.float32 if dtype == "complex64" else np.float64) if dtype in COMPLEX else x
    with np.errstate(all="ignore"):
        return (part / part.dtype.type(world)).view(x.dtype)


def _one_nan(x: Array) -> Array:
    return np.where(np.isnan(x), np.array(np.nan, x.dtype), x)


def _to_float32(x: Array, dtype: str) -> Floats:
    return _from_bfloat16(x) if dtype == "bfloat16" else x.astype(np.float32)


def _from_float32(x: Array, dtype: str) -> Array:
    with np.errstate(over="ignore"):
        return _to_bfloat16(x) if dtype == "bfloat16" else x.astype(np.float16)


def _from_bfloat16(x: Array) -> Floats:
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _to_bfloat16(x: Array) -> Array:
    """Round to nearest, ties to even, as integers; every NaN becomes 0x7fc0."""
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded.astype(np.uint16)).astype(np.uint16)
