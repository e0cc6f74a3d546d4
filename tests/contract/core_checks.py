"""The core's collectives on ranks that are threads, each compared with a plain re-enactment of what was promised."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from ringdp.errors import PeerLostError
from tests.contract.core_ranks import BUILT_IN, World
from tests.contract.reduction_order import (
    FLOATING,
    HALF,
    Array,
    in_halving_order,
    in_rank_order,
    in_ring_order,
    in_tree_order,
    in_two_levels,
    in_two_levels_scattered,
    itemsize,
    pairs,
    random_input,
    same_bits,
    special_input,
    widen,
    zeros,
)

SEGMENT_BYTES = 256 * 1024
EAGER_BYTES = 64 * 1024
FOLD_BLOCK_BYTES = 128 * 1024
# The host of each rank, where there are several and ranks share one.
SHARED_HOSTS: dict[str, tuple[int, ...]] = {
    "2x2": (0, 0, 1, 1),
    "interleaved": (0, 1, 0, 1),
    "3+1": (0, 0, 0, 1),
    "1+2": (0, 1, 1),
    "2+1+1": (0, 0, 1, 2),
    "3+2": (0, 1, 0, 0, 1),
    "3x2": (0, 0, 1, 1, 2, 2),
    "2x4": (0, 0, 0, 0, 1, 1, 1, 1),
    "mixed": (0, 1, 1, 2, 0, 2, 2, 1),
}
BOUND_S = 3.0  # until all have heard of what has happened to one
BATCH = 12  # cases in flight at a time: more than the engine starts at once


@dataclass(frozen=True)
class Case:
    """One collective; `count` elements of one rank's input, or of its chunk in a reduce-scatter."""

    dtype: str
    op: str
    count: int
    seed: int
    special: bool = False  # infinities, NaN, both zeros, subnormal and largest numbers, where the type has them

    def inputs(self, ranks: int, pieces: int = 1) -> list[Array]:
        if self.special and self.dtype in FLOATING:
            return [np.resize(special_input(self.dtype, rank, ranks), pieces * self.count) for rank in range(ranks)]
        return [random_input(self.dtype, self.op, pieces * self.count, (self.seed, rank)) for rank in range(ranks)]


def edges(hosts: Sequence[int], dtype: str) -> list[int]:
    """Element counts of inputs at which a segment, a block, a share or another algorithm begins, up to 512 KiB."""
    size, h, most = len(hosts), len(set(hosts)), max(map(hosts.count, hosts))
    tables = [limit // max(1, size - 1) for limit in (24 * 1024, 128 * 1024)] + [size * 24 * 16, size * 128 * 16]
    two_levels = [16 * 1024 * h, 64 * 1024 * h * most]
    bytes_ = [4096, EAGER_BYTES, FOLD_BLOCK_BYTES, SEGMENT_BYTES, 3 * FOLD_BLOCK_BYTES, *tables, *two_levels]
    return [16 * size, 1009, *(n // itemsize(dtype) for n in sorted(set(bytes_)) if n <= 512 * 1024)]


def every_pair(hosts: Sequence[int], shift: int) -> list[Case]:
    """Every (dtype, op) once, with the sizes going round; `shift` makes other sizes meet them."""
    cases = []
    for index, (dtype, op) in enumerate(pairs()):
        small = [0, 1, len(hosts) - 1, len(hosts), len(hosts) + 1]
        choice = small + [edge + off for edge in edges(hosts, dtype) for off in (-1, 0, 1)]
        cases.append(Case(dtype, op, choice[(7 * index + shift) % len(choice)], seed=index))
    # The longest ones in the type that gradients have and in one that is added in another one.
    longest = {dtype: len(hosts) * SEGMENT_BYTES // itemsize(dtype) + 17 for dtype in ("float32", "bfloat16")}
    return cases + [Case(dtype, "SUM", count, seed=7) for dtype, count in longest.items()]


def batches(cases: Sequence[Case]) -> Iterator[Sequence[Case]]:
    for start in range(0, len(cases), BATCH):
        yield cases[start : start + BATCH]


def expect_equal(got: Sequence[Array], wanted: Sequence[Array], what: str) -> None:
    """The same bits, rank by rank."""
    for rank, (mine, theirs) in enumerate(zip(got, wanted, strict=True)):
        if same_bits(mine, theirs):
            continue
        raw = np.dtype(("V", mine.itemsize))
        wrong = np.flatnonzero(mine.view(raw) != theirs.view(raw))
        pytest.fail(
            f"{what}: {len(wrong)} of {len(mine)} elements differ on rank {rank}, the first at {wrong[0]}:"
            f" {mine[wrong[0]]!r} where {theirs[wrong[0]]!r} was due"
        )


def expect_close(got: Array, inputs: Sequence[Array], case: Case, what: str) -> None:
    """Within what rounding n times can do of the sum in double precision."""
    dtype, op = case.dtype, case.op
    if dtype not in FLOATING or op not in ("SUM", "AVG") or case.special:
        return
    wide = [widen(x, dtype) for x in inputs]
    exact, size = np.sum(wide, axis=0), np.sum(np.abs(wide), axis=0)
    if op == "AVG":
        exact, size = exact / len(inputs), size / len(inputs)
    step = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float32": 2.0**-23, "float64": 2.0**-52}[dtype]
    bound = (1.0 if dtype in HALF else len(inputs)) * step * size + (2.0**-24 if dtype == "float16" else 0.0)
    error = np.abs(widen(got, dtype) - exact)
    assert bool(np.all(error <= bound)), f"{what}: off by {error.max()}"


# Built in, by layout: written down again, as the order is part of what is promised.
FOLD_SENT_BYTES = {"one_host": 128 * 1024, "one_rank_per_host": 48 * 1024, "several_ranks_per_host": 24 * 1024}
HALVING_RANK_BYTES = {"one_host": 4 * 1024, "one_rank_per_host": 512 * 1024, "several_ranks_per_host": 64 * 1024}
PAIRWISE_BYTES = {"one_host": 0, "one_rank_per_host": 256 * 1024, "several_ranks_per_host": 0}


def takes_fold(ranks: World, table: Mapping[str, int], case: Case) -> bool:
    """Whether an all-reduce or reduce is a fold."""
    sent_bytes = FOLD_SENT_BYTES[layout_of(ranks)]
    limits = {"fold_two_ranks_bytes": 1024 * 1024, "fold_sent_bytes": sent_bytes, **table}
    most = limits["fold_two_ranks_bytes"] if ranks.size == 2 else limits["fold_sent_bytes"] // max(1, ranks.size - 1)
    return goes_direct(ranks.size, table) and case.count * itemsize(case.dtype) <= most


def takes_tree(ranks: World, table: Mapping[str, int], case: Case) -> bool:
    """Whether an all-reduce or reduce of this size goes along a tree."""
    limit = {"fold_sent_bytes": FOLD_SENT_BYTES[layout_of(ranks)], **table}["fold_sent_bytes"]
    return not goes_direct(ranks.size, table) and case.count * itemsize(case.dtype) <= limit // 64 * ranks.size


def takes_halving(ranks: World, table: Mapping[str, int], case: Case) -> bool:
    """Whether an all-reduce above those of a tree or a fold is one by halving."""
    size, layout = case.count * itemsize(case.dtype), layout_of(ranks)
    limits = {"halving_rank_bytes": HALVING_RANK_BYTES[layout], "pairwise_bytes": PAIRWISE_BYTES[layout], **table}
    most = limits["halving_rank_bytes"]
    if ranks.size < 2 or not most or -(-size // ranks.size) > most:
        return False
    if case.dtype in HALF and goes_direct(len(set(ranks.hosts)), table):
        return False
    if len({ranks.hosts.count(host) for host in ranks.hosts}) > 1:
        return False
    if not goes_direct(ranks.size, table):
        return size > 1024 or not takes_tree(ranks, table, case)
    return not takes_fold(ranks, table, case) and size > limits["pairwise_bytes"]


def layout_of(ranks: World) -> str:
    if len(set(ranks.hosts)) == 1:
        return "one_host"
    return "several_ranks_per_host" if shares_hosts(ranks) else "one_rank_per_host"


def shares_hosts(ranks: World) -> bool:
    """Whether there are several hosts, and several ranks on one of them."""
    return 1 < len(set(ranks.hosts)) < ranks.size


def goes_direct(size: int, table: Mapping[str, int]) -> bool:
    """Whether small collectives go from every rank straight to every other."""
    return size <= max(2, table.get("direct_ranks", 16))


def takes_two_levels(ranks: World, table: Mapping[str, int], case: Case) -> bool:
    """Whether an all-reduce of this size, or a reduce-scatter with such chunks, is one of two levels."""
    if not shares_hosts(ranks):
        return False
    limit = {"fold_sent_bytes": 24 * 1024, **table}["fold_sent_bytes"]
    return case.count * itemsize(case.dtype) > limit // (ranks.size - 1)


def documented_algorithm(ranks: World, table: Mapping[str, int], case: Case) -> str:
    """Which algorithm reduces all by the table and the map of hosts."""
    if takes_halving(ranks, table, case):
        return "halving"
    if takes_tree(ranks, table, case):
        return "tree"
    if takes_fold(ranks, table, case):
        return "fold"
    if shares_hosts(ranks):
        return "two_level"
    most = {"pairwise_bytes": PAIRWISE_BYTES[layout_of(ranks)], **table}["pairwise_bytes"]
    in_pairs = goes_direct(ranks.size, table) and case.count * itemsize(case.dtype) <= most
    return "pairwise" if case.dtype in HALF or in_pairs else "ring"


# The order in which each algorithm adds up.
ORDERS: dict[str, Callable[[Sequence[Array], str, str, Sequence[int]], Array]] = {
    "fold": lambda inputs, dtype, op, hosts: in_rank_order(inputs, dtype, op),
    "pairwise": lambda inputs, dtype, op, hosts: in_rank_order(inputs, dtype, op),
    "ring": lambda inputs, dtype, op, hosts: in_ring_order(inputs, dtype, op),
    "tree": lambda inputs, dtype, op, hosts: in_tree_order(inputs, dtype, op),
    "halving": in_halving_order,
    "two_level": in_two_levels,
}


def documented_order(ranks: World, table: Mapping[str, int], case: Case, inputs: Sequence[Array]) -> Array:
    """What an all-reduce gives by the table and the map of hosts."""
    return ORDERS[documented_algorithm(ranks, table, case)](inputs, case.dtype, case.op, ranks.hosts)


def check_all_reduce(ranks: World, table: Mapping[str, int], cases: Sequence[Case], *, in_flight: bool = True) -> None:
    inputs = [case.inputs(ranks.size) for case in cases]
    buffers = [[x.copy() for x in each] for each in inputs]

    def body(rank: int, group: Any) -> None:
        works = []
        for case, buffer in zip(cases, buffers, strict=True):
            work = group.all_reduce(buffer[rank].view(np.uint8), case.dtype, case.op)
            if in_flight:
                works.append(work)
            else:
                work.wait()
        for work in works:
            work.wait()

    ranks.run(body, table)
    for case, before, after in zip(cases, inputs, buffers, strict=True):
        what = f"all_reduce of {case} on {ranks.size} ranks"
        expect_equal(after, [documented_order(ranks, table, case, before)] * ranks.size, what)
        expect_close(after[0], before, case, what)


def check_reduce_scatter(ranks: World, table: Mapping[str, int], cases: Sequence[Case]) -> None:
    n = ranks.size
    inputs = [case.inputs(n, pieces=n) for case in cases]
    given_ = [[x.copy() for x in each] for each in inputs]
    outputs = [[zeros(case.dtype, case.count) for _ in range(n)] for case in cases]

    def piece(x: Array, rank: int, case: Case) -> Array:
        return x[rank * case.count : (rank + 1) * case.count]

    def body(rank: int, group: Any) -> None:
        works = []
        for case, mine, output in zip(cases, given_, outputs, strict=True):
            pieces = [piece(mine[rank], other, case).view(np.uint8) for other in range(n)]
            works.append(group.reduce_scatter(pieces, output[rank].view(np.uint8), case.dtype, case.op))
        for work in works:
            work.wait()

    ranks.run(body, table)
    for case, before, after, output in zip(cases, inputs, given_, outputs, strict=True):
        what = f"reduce_scatter of {case} on {n} ranks"
        chunks = [[piece(x, rank, case) for x in before] for rank in range(n)]
        if takes_two_levels(ranks, table, case):
            wanted = [in_two_levels_scattered(each, case.dtype, case.op, ranks.hosts) for each in chunks]
        else:
            wanted = [in_rank_order(each, case.dtype, case.op) for each in chunks]
        expect_equal(output, wanted, what)
        expect_equal(after, before, f"inputs of {what}")
        for rank in range(n):
            expect_close(output[rank], [piece(x, rank, case) for x in before], case, what)


def check_all_gather(ranks: World, table: Mapping[str, int], cases: Sequence[Case]) -> None:
    n = ranks.size
    inputs = [case.inputs(n) for case in cases]
    given_ = [[x.copy() for x in each] for each in inputs]
    outputs = [[[zeros(case.dtype, case.count) for _ in range(n)] for _ in range(n)] for case in cases]

    def body(rank: int, group: Any) -> None:
        works = []
        for case, mine, output in zip(cases, given_, outputs, strict=True):
            blocks = [block.view(np.uint8) for block in output[rank]]
            works.append(group.all_gather(mine[rank].view(np.uint8), blocks, case.dtype))
        for work in works:
            work.wait()

    ranks.run(body, table)
    for case, before, after, output in zip(cases, inputs, given_, outputs, strict=True):
        what = f"all_gather of {case} on {n} ranks"
        for rank in range(n):
            expect_equal(output[rank], before, f"{what}, rank {rank}'s blocks")
        expect_equal(after, before, f"inputs of {what}")


def check_broadcast(ranks: World, table: Mapping[str, int], cases: Sequence[Case]) -> None:
    inputs = [case.inputs(ranks.size) for case in cases]
    buffers = [[x.copy() for x in each] for each in inputs]

    def body(rank: int, group: Any) -> None:
        works = [
            group.broadcast(buffer[rank].view(np.uint8), case.dtype, case.seed % ranks.size)
            for case, buffer in zip(cases, buffers, strict=True)
        ]
        for work in works:
            work.wait()

    ranks.run(body, table)
    for case, before, after in zip(cases, inputs, buffers, strict=True):
        wanted = [before[case.seed % ranks.size]] * ranks.size
        expect_equal(after, wanted, f"broadcast of {case} on {ranks.size} ranks")


def check_reduce(ranks: World, table: Mapping[str, int], cases: Sequence[Case]) -> None:
    inputs = [case.inputs(ranks.size) for case in cases]
    buffers = [[x.copy() for x in each] for each in inputs]

    def body(rank: int, group: Any) -> None:
        works = [
            group.reduce(buffer[rank].view(np.uint8), case.dtype, case.seed % ranks.size, case.op)
            for case, buffer in zip(cases, buffers, strict=True)
        ]
        for work in works:
            work.wait()

    ranks.run(body, table)
    for case, before, after in zip(cases, inputs, buffers, strict=True):
        what = f"reduce of {case} on {ranks.size} ranks"
        wanted = list(before)  # the other ranks' tensors stay as they are
        root = case.seed % ranks.size
        tree = takes_tree(ranks, table, case)
        order = in_tree_order(before, case.dtype, case.op, root) if tree else in_rank_order(before, case.dtype, case.op)
        wanted[root] = order
        expect_equal(after, wanted, what)
        expect_close(after[case.seed % ranks.size], before, case, what)


def check_gather_and_scatter(ranks: World, table: Mapping[str, int], cases: Sequence[Case]) -> None:
    """What a gather has brought to the root a scatter takes back, one rank further."""
    n = ranks.size
    inputs = [case.inputs(n) for case in cases]
    gathered = [[zeros(case.dtype, case.count) for _ in range(n)] for case in cases]
    outputs = [[zeros(case.dtype, case.count) for _ in range(n)] for case in cases]

    def body(rank: int, group: Any) -> None:
        works = []
        for case, given, blocks, output in zip(cases, inputs, gathered, outputs, strict=True):
            root = case.seed % n
            all_blocks = [block.view(np.uint8) for block in blocks] if rank == root else []
            works.append(group.gather(given[rank].view(np.uint8), all_blocks, case.dtype, root))
            turned = [*all_blocks[1:], *all_blocks[:1]]
            works.append(group.scatter(turned, output[rank].view(np.uint8), case.dtype, root))
        for work in works:
            work.wait()

    ranks.run(body, table)
    for case, before, at_root, output in zip(cases, inputs, gathered, outputs, strict=True):
        expect_equal(at_root, before, f"gather of {case} on {n} ranks")
        expect_equal(output, [*before[1:], *before[:1]], f"scatter of {case} on {n} ranks")


def check_all_to_all(ranks: World, table: Mapping[str, int], cases: Sequence[Case], *, even: bool = False) -> None:
    """Uneven: rank a has for rank b a piece of its own length, often none at all."""
    n = ranks.size

    def length(case: Case, a: int, b: int) -> int:
        return case.count if even else case.count * ((a + 2 * b + case.seed) % 3) // 2

    def piece(case: Case, a: int, b: int) -> Array:
        return random_input(case.dtype, case.op, length(case, a, b), (case.seed, a, b))

    sent = [[[piece(case, a, b) for b in range(n)] for a in range(n)] for case in cases]
    got = [[[zeros(case.dtype, length(case, a, b)) for a in range(n)] for b in range(n)] for case in cases]

    def body(rank: int, group: Any) -> None:
        works = []
        for case, mine, blocks in zip(cases, sent, got, strict=True):
            chunks = [chunk.view(np.uint8) for chunk in mine[rank]]
            works.append(group.all_to_all(chunks, [block.view(np.uint8) for block in blocks[rank]], case.dtype))
        for work in works:
            work.wait()

    ranks.run(body, table)
    for case, before, after in zip(cases, sent, got, strict=True):
        for rank in range(n):
            wanted = [before[a][rank] for a in range(n)]
            expect_equal(after[rank], wanted, f"all_to_all of {case} on {n} ranks, rank {rank}'s blocks")


CHECKS: Sequence[Callable[[World, Mapping[str, int], Sequence[Case]], None]] = (
    check_all_reduce,
    check_reduce_scatter,
    check_all_gather,
    check_broadcast,
    check_reduce,
    check_gather_and_scatter,
    check_all_to_all,
)
"""Of every collective, for tests that take them all."""


def check_that_all_hear_who_leaves(size: int, victim: int, count: int, table: Mapping[str, int] = BUILT_IN) -> None:
    """Of a rank that leaves between two all-reduces, also those who have nothing to do with it."""
    ranks = World(size)

    def body(rank: int, group: Any) -> str:
        group.barrier().wait()
        x = np.ones(count, np.float32)
        if rank == victim:
            for _ in range(3):
                group.all_reduce(x, "float32").wait()
            ranks.runtimes[rank].shut_down()
            return ""
        start = time.monotonic()
        with pytest.raises(PeerLostError) as caught:  # noqa: PT012
            while True:
                group.all_reduce(x, "float32").wait()
        assert time.monotonic() - start < BOUND_S
        return str(caught.value)

    try:
        told = ranks.run(body, table)
    finally:
        ranks.close()
    assert all(f"rank {victim} (host " in words for rank, words in enumerate(told) if rank != victim)
