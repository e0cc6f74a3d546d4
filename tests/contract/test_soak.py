# mypy: disable-error-code="arg-type, attr-defined, union-attr, func-returns-value"
"""All-reduces without end: random size, type, reduction and number in flight, each compared to the bit.

Whole numbers, so sums are exact in every order. `make test` runs a bounded part; `pytest -m slow -k soak` 100,000.
"""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest

from tests.helpers import need
from tests.train.harness import ring_is_built, run_ranks

torch: Any = need("torch")
import torch.distributed as dist  # noqa: E402

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built (make build)")

DTYPES = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.float32, torch.float64, torch.bfloat16)
OPS = {
    "SUM": lambda x: x.sum(0),
    "MAX": lambda x: x.amax(0),
    "MIN": lambda x: x.amin(0),
    "BXOR": lambda x: x[0] ^ x[1] if len(x) == 2 else x[0] ^ x[1] ^ x[2] if len(x) == 3 else x[0] ^ x[1] ^ x[2] ^ x[3],
}


def soak(seed: int, count: int, threads: int) -> int:
    """`threads` threads, each with a group of its own, share the work; ranks run them at their own pace."""
    rank, world = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group() for _ in range(threads)]
    # Every all-reduce takes a window of these, so that nothing is made anew for each.
    pool = torch.randint(0, 60, (world, 1 << 17), generator=torch.Generator().manual_seed(seed))
    as_type = {dtype: pool.to(dtype) for dtype in DTYPES}
    failures: list[str] = []

    def work_on(index: int) -> None:
        choice = random.Random(f"{seed} {index}")
        flying: list[tuple[Any, Any, Any, str]] = []
        most = 1
        for number in range(count // threads):
            dtype = choice.choice(DTYPES)
            op = choice.choice(("SUM", "MAX", "MIN") if dtype.is_floating_point else tuple(OPS))
            size = choice.choice((0, 1, choice.randrange(64), choice.randrange(3000), choice.randrange(1 << 15)))
            size = choice.randrange(1 << 17) if choice.random() < 0.01 else size
            begin = choice.randrange((1 << 17) - size)
            window = as_type[dtype][:, begin : begin + size]
            wanted = OPS[op](window).to(dtype)
            mine = window[rank].clone()
            what = f"thread {index}, all-reduce {number}: {op} of {size} {dtype}"
            flying.append((dist.all_reduce(mine, getattr(dist.ReduceOp, op), groups[index], True), mine, wanted, what))
            if number % 50 == 0:
                most = choice.choice((1, 2, 5, 20))
            while len(flying) >= most:
                work, got, right, text = flying.pop(0)
                work.wait()
                if not torch.equal(got, right):
                    failures.append(text)
                    return
        for work, got, right, text in flying:
            work.wait()
            if not torch.equal(got, right):
                failures.append(text)

    running = [threading.Thread(target=work_on, args=(i,)) for i in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    assert not failures, failures
    return count


@pytest.mark.parametrize(("world_size", "threads"), [(2, 1), (3, 3)])
def test_a_short_soak(world_size: int, threads: int) -> None:
    assert run_ranks(soak, 1, 1500, threads, world_size=world_size, backend="ring") == [1500] * world_size


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world_size", [2, 4])
def test_soak(world_size: int) -> None:
    got = run_ranks(soak, 7, 100_000, 4, world_size=world_size, backend="ring", timeout_s=3500)
    assert got == [100_000] * world_size
