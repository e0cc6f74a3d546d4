# mypy: disable-error-code="arg-type, attr-defined, union-attr, func-returns-value"
"""Some 300 sampled calls of torch.distributed on ring, on real processes: which operation, type, reduction, shape and
layout, with others in flight, comes from a seed that every rank has. Values are small whole numbers, so every order of
summation gives the same, and each rank can work out what it must get."""

from __future__ import annotations

import functools
import operator
import random
from typing import Any

import pytest

from tests.helpers import need
from tests.train.harness import ring_is_built, run_ranks

torch: Any = need("torch")
import torch.distributed as dist  # noqa: E402

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built (make build)")

SHAPES = ((), (0,), (1,), (7,), (3, 5), (2, 3, 4), (1009,), (16_384,), (65_537,), (3, 40_000))
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES = (*FLOATS, *COMPLEX, *INTEGERS, torch.bool)
REDUCTIONS = {
    "SUM": lambda x: sum(x[1:], x[0]),
    "PRODUCT": lambda x: functools.reduce(operator.mul, x),
    "MIN": lambda x: functools.reduce(torch.minimum, x),
    "MAX": lambda x: functools.reduce(torch.maximum, x),
    "BAND": lambda x: functools.reduce(torch.bitwise_and, x),
    "BOR": lambda x: functools.reduce(torch.bitwise_or, x),
    "BXOR": lambda x: functools.reduce(torch.bitwise_xor, x),
}


class Case:
    """One call as every rank knows it; `expect` is compared when the call is over."""

    def __init__(self, seed: int, rank: int, world: int) -> None:
        self.choice = random.Random(seed)
        self.seed, self.rank, self.world = seed, rank, world
        self.name = self.choice.choice(CALLS)
        self.dtype = self.choice.choice(DTYPES)
        self.shape = self.choice.choice(SHAPES)
        self.layout = self.choice.choice(("plain", "plain", "transposed", "sliced"))
        ops = ["SUM"] if self.dtype in COMPLEX else ["SUM", "PRODUCT", "MIN", "MAX"]
        ops += ["BAND", "BOR", "BXOR"] if self.dtype in (*INTEGERS, torch.bool) else []
        self.op = self.choice.choice(ops)
        self.root = self.choice.randrange(world)
        self.expected: list[tuple[Any, Any]] = []

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.name} {self.op} {self.dtype} {self.shape} {self.layout} root {self.root}"

    def values(self, rank: int, part: int = 0) -> Any:
        generator = torch.Generator().manual_seed(1000 * self.seed + 10 * rank + part)
        # Products of these stay below 128, sums too.
        return torch.randint(0, 3, self.shape, generator=generator).to(self.dtype)

    def laid_out(self, values: Any) -> Any:
        if self.layout == "transposed" and values.dim() > 1:
            return values.transpose(0, 1).contiguous().transpose(0, 1)
        if self.layout == "sliced":
            return torch.stack([values, values], -1)[..., 0]
        return values.clone()

    def room(self) -> Any:
        return self.laid_out(torch.zeros(self.shape, dtype=self.dtype))

    def expect(self, got: Any, wanted: Any) -> None:
        self.expected.append((got, wanted))

    def reduced(self, part: int = 0) -> Any:
        parts = [self.values(rank, part) for rank in range(self.world)]
        if self.dtype == torch.bool and self.op in ("SUM", "PRODUCT", "MIN", "MAX"):
            return REDUCTIONS["BOR" if self.op in ("SUM", "MAX") else "BAND"](parts)
        return REDUCTIONS[self.op](parts)

    def issue(self) -> list[Any]:
        works = getattr(self, self.name)()
        return works if isinstance(works, list) else [works]

    def check(self) -> None:
        for got, wanted in self.expected:
            assert torch.equal(got, wanted), str(self)

    def all_reduce(self) -> Any:
        x = self.laid_out(self.values(self.rank))
        self.expect(x, self.reduced())
        return dist.all_reduce(x, op=getattr(dist.ReduceOp, self.op), async_op=True)

    def reduce(self) -> Any:
        x = self.laid_out(self.values(self.rank))
        self.expect(x, self.reduced() if self.rank == self.root else self.values(self.rank))
        return dist.reduce(x, self.root, op=getattr(dist.ReduceOp, self.op), async_op=True)

    def broadcast(self) -> Any:
        x = self.laid_out(self.values(self.rank))
        self.expect(x, self.values(self.root))
        return dist.broadcast(x, self.root, async_op=True)

    def all_gather(self) -> Any:
        rooms = [self.room() for _ in range(self.world)]
        for rank, x in enumerate(rooms):
            self.expect(x, self.values(rank))
        return dist.all_gather(rooms, self.laid_out(self.values(self.rank)), async_op=True)

    def reduce_scatter(self) -> Any:
        x = self.room()
        self.expect(x, self.reduced(part=self.rank))
        parts = [self.laid_out(self.values(self.rank, part)) for part in range(self.world)]
        return dist.reduce_scatter(x, parts, op=getattr(dist.ReduceOp, self.op), async_op=True)

    def gather(self) -> Any:
        rooms = [self.room() for _ in range(self.world)] if self.rank == self.root else None
        for rank, x in enumerate(rooms or []):
            self.expect(x, self.values(rank))
        return dist.gather(self.laid_out(self.values(self.rank)), rooms, dst=self.root, async_op=True)

    def scatter(self) -> Any:
        x = self.room()
        self.expect(x, self.values(self.root, self.rank))
        mine = [self.laid_out(self.values(self.rank, part)) for part in range(self.world)]
        return dist.scatter(x, mine if self.rank == self.root else None, src=self.root, async_op=True)

    def all_to_all(self) -> Any:
        rooms = [self.room() for _ in range(self.world)]
        for rank, x in enumerate(rooms):
            self.expect(x, self.values(rank, self.rank))
        parts = [self.laid_out(self.values(self.rank, part)) for part in range(self.world)]
        return dist.all_to_all(rooms, parts, async_op=True)

    def messages(self) -> list[Any]:
        after, before = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        x = self.room()
        self.expect(x, self.values(before))
        tag = self.choice.randrange(3)
        return [
            dist.isend(self.laid_out(self.values(self.rank)), after, tag=tag),
            dist.irecv(x, before, tag=tag),
        ]

    def barrier(self) -> Any:
        return dist.barrier(async_op=True)


CALLS = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
    "all_to_all",
    "messages",
    "barrier",
)


def run(first: int, count: int) -> int:
    rank, world = dist.get_rank(), dist.get_world_size()
    pace = random.Random(first)  # how many are in flight before the oldest is waited for
    flying: list[tuple[Case, list[Any]]] = []
    for seed in range(first, first + count):
        case = Case(seed, rank, world)
        flying.append((case, case.issue()))
        while len(flying) > pace.choice((0, 0, 3, 9)):
            oldest, works = flying.pop(0)
            for work in works:
                work.wait()
            oldest.check()
    for case, works in flying:
        for work in works:
            work.wait()
        case.check()
    return count


def test_the_sample_covers_every_operation() -> None:
    assert {Case(seed, 0, 2).name for seed in range(100)} == set(CALLS)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_sampled_calls(world_size: int) -> None:
    assert run_ranks(run, 1000 * world_size, 100, world_size=world_size, backend="ring") == [100] * world_size


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
def test_many_sampled_calls(world_size: int) -> None:
    got = run_ranks(run, 100_000 * world_size, 1500, world_size=world_size, backend="ring", timeout_s=1000)
    assert got == [1500] * world_size
