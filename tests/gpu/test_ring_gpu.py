"""CUDA tensors over ring: the contracts of the collectives, the bits of the CPU, streams, memory, graphs."""
# torch.distributed is annotated for one process group of its own; the calls here go past what its stubs know.
# mypy: disable-error-code="arg-type, attr-defined, union-attr, func-returns-value"

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.contract import test_collectives_torch as contract
from tests.train.harness import on_ranks, run_ranks

pytestmark = pytest.mark.gpu

NO_KERNELS = {"uint16", "uint32", "uint64"}  # torch itself can hardly compute with them on a GPU
CASES = [
    (contract.all_types, 2),
    (contract.all_ops, 3),
    (contract.shapes, 3),
    (contract.layouts, 3),
    (contract.inputs_stay, 3),
    (partial(contract.asynchronous, ends_in_wait=False), 2),
    (partial(contract.thousand, ends_in_order=False), 2),
    (contract.coalesced, 2),
    (contract.groups, 4),
    (contract.threads, 2),
]


def on_gpu(case: Callable[[], Any]) -> None:
    """A case of the contract, whose tensors are made on the GPU."""
    known = dict(contract.DTYPES)
    for name in NO_KERNELS:
        contract.DTYPES.pop(name, None)
    try:
        with torch.device("cuda", 0):
            case()
        torch.cuda.synchronize()
    finally:
        contract.DTYPES.update(known)


@pytest.mark.parametrize("case, ranks", CASES, ids=[getattr(case, "func", case).__name__ for case, _ in CASES])
def test_the_contract_of_collectives(case: Callable[[], Any], ranks: int) -> None:
    run_ranks(on_gpu, case, world_size=ranks, backend="ring")


# --- the bits


def digest_of(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.cpu().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


SIZES = (0, 1, 7, 70_001, 6_553_600)
OPS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX)


def reduced_on(kinds: list[str]) -> list[str]:
    """Digests of all-reduces of the same numbers, wherever this rank has them."""
    rank = dist.get_rank()
    seen = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        for size in SIZES:
            for op in OPS if size < 100_000 else OPS[:1]:
                x = torch.randn(size, generator=torch.Generator().manual_seed(rank)).to(dtype).to(kinds[rank])
                dist.all_reduce(x, op=op)
                seen.append(digest_of(x))
    return seen


@pytest.mark.timeout(240)
@pytest.mark.parametrize("kinds", [["cuda", "cuda"], ["cuda", "cpu"], ["cuda", "cpu", "cuda"]], ids=":".join)
def test_gpus_and_cpus_get_the_same_bits(kinds: list[str]) -> None:
    ranks = len(kinds)
    expected = run_ranks(reduced_on, ["cpu"] * ranks, world_size=ranks, backend="ring", timeout_s=120)
    assert run_ranks(reduced_on, kinds, world_size=ranks, backend="ring", timeout_s=120) == expected


# --- streams and memory

COUNT = 2_000_000
BUSY_CYCLES = 200_000_000  # a tenth of a second or so, in which the GPU is not done with what was queued before


@on_ranks()
def test_on_other_streams() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.zeros(COUNT, device="cuda")
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    first.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(first):
        torch.cuda._sleep(BUSY_CYCLES)
        x.fill_(rank + 1.0)  # not there yet when the all-reduce is called
        work = dist.all_reduce(x, async_op=True)
    with torch.cuda.stream(second):
        work.wait()  # makes this stream wait, and no other
        doubled = x * 2
    second.synchronize()
    assert bool((doubled == world * (world + 1)).all())


@on_ranks()
def test_freed_at_once() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    out = torch.zeros(world * COUNT, device="cuda")
    mine = torch.full((COUNT,), float(rank + 1), device="cuda")
    torch.cuda._sleep(BUSY_CYCLES)
    work = dist.all_gather_into_tensor(out, mine, async_op=True)
    del mine
    spoilers = [torch.full((COUNT,), -1.0, device="cuda") for _ in range(4)]  # of the size that was freed
    work.wait()
    assert out.view(world, -1)[:, ::1000].cpu().tolist() == [[r + 1.0] * (COUNT // 1000) for r in range(world)]
    assert all(bool((one == -1).all()) for one in spoilers)
    # Nor does a result that nobody holds any more reach memory that is in use again.
    torch.cuda._sleep(BUSY_CYCLES)
    dist.all_reduce(torch.ones(COUNT, device="cuda"), async_op=True)
    spoilers = [torch.full((COUNT,), -1.0, device="cuda") for _ in range(4)]
    dist.barrier()
    torch.cuda.synchronize()
    assert all(bool((one == -1).all()) for one in spoilers)


@on_ranks()
def test_flattened_and_freed() -> None:
    """Of input whose strides are not those of a flat buffer the library makes a copy, which nobody else holds."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = torch.full((1000, COUNT // 1000), float(rank + 1), device="cuda")
    parts = [torch.zeros(COUNT // 1000, 1000, device="cuda") for _ in range(world)]
    torch.cuda._sleep(BUSY_CYCLES)
    work = dist.all_gather(parts, mine.t(), async_op=True)
    spoilers = [torch.full((COUNT,), -1.0, device="cuda") for _ in range(4)]
    work.wait()
    assert all(bool((part == r + 1).all()) for r, part in enumerate(parts))
    assert all(bool((one == -1).all()) for one in spoilers)


@on_ranks()
def test_two_on_the_same_memory() -> None:
    """Without a wait between, the second takes what the first gives, as it would on one stream."""
    world = dist.get_world_size()
    for count in (1000, COUNT):
        x = torch.ones(count, device="cuda")
        works = [dist.all_reduce(x, async_op=True) for _ in range(3)]
        for work in works:
            work.wait()
        assert bool((x == world**3).all())


@on_ranks()
def test_chained() -> None:
    """What a future's callback computes is ordered after the result, on streams."""
    world = dist.get_world_size()
    x = torch.ones(COUNT, device="cuda")
    torch.cuda._sleep(BUSY_CYCLES)
    future = dist.all_reduce(x, async_op=True).get_future().then(lambda done: done.value()[0] * 2)
    assert bool((future.wait() == 2 * world).all())


# --- CUDA graphs


@on_ranks()
def test_capturing_a_cuda_graph_is_refused_in_words() -> None:
    x = torch.ones(1000, device="cuda")
    dist.all_reduce(x)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(Exception, match="CUDA graph"), torch.cuda.graph(graph):
        dist.all_reduce(x)
    dist.all_reduce(x)  # and the group goes on
    assert bool((x == dist.get_world_size() ** 2).all())
