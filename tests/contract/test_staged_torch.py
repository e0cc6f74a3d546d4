# mypy: disable-error-code="arg-type, attr-defined, union-attr, func-returns-value"
"""Every collective of torch as on a device: through mirrors that copies fill and empty late and out of order
(`tests.core.staging`). The cases are those that hold without a device; here they hold with one on all ranks, and on
some."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.contract import test_collectives_torch as collectives
from tests.contract import test_operations_torch as operations
from tests.helpers import need
from tests.train.harness import ring_is_built, run_ranks

torch: Any = need("torch")
need("tests.core._core", "ringdp's extension, built with `make build`,")
import torch.distributed as dist  # noqa: E402

from tests.core.staging import staged  # noqa: E402

pytestmark = pytest.mark.skipif(not ring_is_built(), reason="ringdp is not built (make build)")

Case = Callable[..., Any]
CASES: list[tuple[Case, int]] = [
    (collectives.all_types, 2),
    (collectives.all_types, 3),
    (collectives.all_ops, 3),
    (collectives.shapes, 3),
    (collectives.layouts, 3),
    (collectives.inputs_stay, 3),
    (collectives.objects, 3),
    (collectives.asynchronous, 3),
    (collectives.thousand, 3),
    (collectives.coalesced, 3),
    (collectives.groups, 4),
    (collectives.threads, 2),
    (collectives.refusals, 2),
    (collectives.profiled, 2),
    (operations.every_case, 2),
    (operations.every_case, 3),
    (operations.more_than_gloo, 3),
    (operations.refusals, 2),
    (operations.disagreement, 2),
]


def on_some(case: Case, ranks: list[int], seed: int, *args: Any) -> Any:
    """`case` on a rank that has a device if it is one of `ranks`."""
    if dist.get_rank() not in ranks:
        return case(*args)
    with staged(seed * 100 + dist.get_rank()):
        return case(*args)


@pytest.mark.parametrize(("case", "world_size"), CASES, ids=[f"{case.__name__}-{n}" for case, n in CASES])
@pytest.mark.parametrize(
    "ranks", [pytest.param([0, 1, 2, 3], id="all ranks"), pytest.param([1], id="one rank", marks=pytest.mark.slow)]
)
def test_as_without_a_device(case: Case, world_size: int, ranks: list[int]) -> None:
    arguments: tuple[Any, ...] = {operations.disagreement: ("roots",), collectives.thousand: (False,)}.get(case, ())
    seed = random.Random(f"{case.__name__} {world_size} {ranks}").randrange(1000)
    run_ranks(on_some, case, ranks, seed, *arguments, world_size=world_size, backend="ring")


# The same bits.


def reduced(sizes: list[int], dtype: Any) -> list[Any]:
    rank = dist.get_rank()
    mean = dist.ReduceOp.AVG
    out = []
    for size in sizes:
        x = torch.randn(size, generator=torch.Generator().manual_seed(size + rank)).to(dtype)
        dist.all_reduce(x, op=mean)
        out.append(x)
    return out


@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_the_same_bits_with_and_without(world_size: int) -> None:
    sizes = [1, 1000, 40_009, 1_100_003]
    for dtype in (torch.float32, torch.bfloat16):
        wanted = run_ranks(reduced, sizes, dtype, world_size=world_size, backend="ring")[0]
        for ranks in ([0, 1, 2, 3], [1, 3]):
            for got in run_ranks(on_some, reduced, ranks, 5, sizes, dtype, world_size=world_size, backend="ring"):
                assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)), (dtype, ranks)


# In flight.


def used_again() -> None:
    """Several calls on the same memory before anybody waits: in the order of the calls."""
    rank, world = dist.get_rank(), dist.get_world_size()
    with staged(rank):
        x = torch.full((300_000,), float(rank + 1))
        first = dist.all_reduce(x, async_op=True)
        second = dist.all_reduce(x, async_op=True)
        y = torch.zeros(300_000 * world)
        third = dist.all_gather_into_tensor(y, x, async_op=True)
        for work in (third, second, first):
            work.wait()
    total = world * (world + 1) / 2
    assert bool((x == total * world).all())
    assert bool((y == total * world).all())


def test_calls_on_the_same_memory_keep_their_order() -> None:
    run_ranks(used_again, world_size=2, backend="ring")


def inference() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    with staged(rank):
        with torch.inference_mode():
            x = torch.full((6, 4), float(rank + 1))
            dist.all_reduce(x)
            dist.all_reduce(x.t())
            got = [torch.zeros(4, 6).t() for _ in range(world)]
            dist.all_gather(got, x)
        assert bool((x == world * world * (world + 1) / 2).all())
        assert all(torch.equal(block, x) for block in got)
        leaf = torch.full((5,), float(rank + 1), requires_grad=True)
        dist.all_reduce(leaf)
        dist.all_reduce(leaf[::2])
        assert leaf.grad_fn is None
        assert leaf.tolist()[1] == world * (world + 1) / 2


def test_inference_mode_and_leaves() -> None:
    run_ranks(inference, world_size=2, backend="ring")


def completed() -> list[bool]:
    """A work is completed when its result is on the device, not before."""
    rank, world = dist.get_rank(), dist.get_world_size()
    seen = []
    with staged(rank) as device:
        for _ in range(5):
            x = torch.full((500_000,), float(rank))
            work = dist.all_reduce(x, async_op=True)
            while not work.is_completed():
                time.sleep(0.0001)
            seen.append(bool((x == world * (world - 1) / 2).all()))
        future = dist.all_reduce(torch.ones(400_000), async_op=True).get_future()
        seen.append(bool((future.then(lambda it: it.value()[0] + 1).wait() == world + 1).all()))
        device.hold(True)
        work = dist.all_reduce(torch.ones(4), async_op=True)
        time.sleep(0.05)
        seen.append(not work.is_completed())
        device.hold(False)
        work.wait()
    return seen


def test_completed_means_that_the_result_is_there() -> None:
    for seen in run_ranks(completed, world_size=2, backend="ring"):
        assert all(seen), seen


# What goes wrong.


def never_comes() -> tuple[str, str]:
    from datetime import timedelta

    rank = dist.get_rank()
    group = dist.new_group([0, 1, 2], timeout=timedelta(seconds=1))
    with staged(rank) as device:
        dist.all_reduce(torch.ones(3), group=group)
        device.hold(rank == 1)
        x = torch.ones(100_000)
        try:
            dist.all_reduce(x, group=group)
        except Exception as error:
            return type(error).__name__, str(error)
        finally:
            del x
    return "", ""


def test_a_device_that_does_not_answer_is_a_timeout_with_its_name() -> None:
    for rank, (kind, text) in enumerate(run_ranks(never_comes, world_size=3, backend="ring")):
        assert kind == "RingTimeoutError", text
        assert "all_reduce" in text
        assert "device" in text
        assert rank == 1 or "rank 1 (host" in text or "on rank 1" in text, text


# Two hosts.


def on_two_hosts(folder: str, ranks: list[int]) -> list[Any]:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    name = f"{folder}/store{''.join(map(str, ranks))}"
    with mock.patch.dict(os.environ, RINGDP_HOST_ID=f"host{rank // 2}"):
        dist.init_process_group("ring", init_method=f"file://{name}", rank=rank, world_size=world)
    out = on_some(reduced, ranks, 9, [1000, 400_003], torch.float32)
    out += on_some(reduced, ranks, 9, [400_003], torch.bfloat16)
    pieces = torch.randn(world * 100_003, generator=torch.Generator().manual_seed(rank))
    mine = torch.zeros(100_003)
    on_some(dist.reduce_scatter_tensor, ranks, 10, mine, pieces)
    dist.destroy_process_group()
    return [*out, mine]


def test_two_levels(tmp_path: Path) -> None:
    results = [
        run_ranks(on_two_hosts, str(tmp_path), ranks, world_size=4, backend=None)
        for ranks in ([], [0, 1, 2, 3], [1, 2])
    ]
    for staged_results in results[1:]:
        for got, wanted in zip(staged_results, results[0], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
